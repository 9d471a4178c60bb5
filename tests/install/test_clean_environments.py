"""Each package installs and passes its own tests in an environment that holds only it and what it declares."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ["exl-kernels", "exl-core", "exl-filters", "exl-generate", "exl-compat", "exl-serve"]
TESTS = {
    "exl-kernels": "kernels",
    "exl-core": "core",
    "exl-generate": "generate",
    "exl-compat": "compat",
    "exl-serve": "serve",
}
# Dependencies of each package's tests that the package itself does not need.
TEST_NEEDS = {
    "exl-kernels": ["safetensors"],
    "exl-core": ["safetensors", "transformers>=5", "jinja2", "peft>=0.17", "sentencepiece>=0.2.1", "pillow>=11"],
    "exl-generate": ["safetensors", "llguidance>=1.9,<2"],
    "exl-compat": ["safetensors", "websockets>=14", "pyarrow>=17", "formatron>=0.5", "lm-format-enforcer>=0.11.3"],
    "exl-serve": ["openai>=2", "httpx>=0.28", "jsonschema>=4.23", "selenium>=4.40", "pyyaml>=6"],
}
pytestmark = [pytest.mark.install, pytest.mark.timeout(7200)]


def run(*args: str, **env: str) -> str:
    """Runs a command; its output is in the failure message."""
    clean = {
        k: v for k, v in os.environ.items() if k not in {"VIRTUAL_ENV", "PYTHONPATH", "UV_FIND_LINKS", "PIP_FIND_LINKS"}
    }
    done = subprocess.run(args, cwd=ROOT, env=clean | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(args)}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def uv(*args: str) -> str:
    return run(shutil.which("uv") or "uv", *args)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels of all packages, the native one built in release mode without this checkout's environment and nvcc."""
    out = tmp_path_factory.mktemp("wheels")
    for package in PACKAGES:
        build = ["build", "-q", "--wheel", "--package", package, "--out-dir", str(out)]
        run(shutil.which("uv") or "uv", *build, EXL_CUDA_ARCHS="none")
    return out


def environment(where: Path, *options: str) -> Path:
    uv("venv", "-q", "--python", sys.executable, *options, str(where))
    return where / "bin" / "python"


def install(python: Path, wheels: Path, *what: str) -> None:
    uv("pip", "install", "-q", "--python", str(python), "--find-links", str(wheels), *what)


def installed(python: Path) -> dict[str, str]:
    lines = uv("pip", "list", "-q", "--python", str(python), "--format", "freeze").split()
    return dict(line.split("==", 1) for line in lines if "==" in line)


def own_tests_pass(python: Path, folder: str) -> None:
    """Run the default tests of a folder, in as many processes as `uv run pytest` uses: one takes twice as long."""
    processes = str(2 + len(os.sched_getaffinity(0)))
    run(str(python), "-m", "pytest", "-q", f"tests/{folder}", "--processes", processes, "-p", "no:cacheprovider")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the packages' environments are made, one after the other: a redirected bytecode cache goes by paths."""
    return tmp_path_factory.mktemp("alone") / "env"


# exl-filters has a file of its own.
@pytest.mark.parametrize("package", [p for p in PACKAGES if p != "exl-filters"])
def test_package_alone_passes_its_own_tests(package: str, wheels: Path, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    python = environment(place)
    install(python, wheels, package, "pytest", "pytest-timeout", "hypothesis", *TEST_NEEDS[package])
    others = {p for p in PACKAGES if p in installed(python)} - {package}
    allowed = {"exl-kernels": set(), "exl-filters": set(), "exl-core": {"exl-kernels"}}
    assert others <= allowed.get(package, set(PACKAGES)), others
    own_tests_pass(python, TESTS[package])


def torch_stand_in(folder: Path) -> Path:
    """Write an empty wheel of torch 2.6.0, the oldest version that is supported."""
    stand_in = folder / "torch-2.6.0-py3-none-any.whl"
    with zipfile.ZipFile(stand_in, "w") as wheel:
        wheel.writestr("torch/__init__.py", "__version__ = '2.6.0'\n")
        wheel.writestr("torch-2.6.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.6.0\n")
        wheel.writestr(
            "torch-2.6.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("torch-2.6.0.dist-info/RECORD", "")
    return stand_in


def test_a_present_torch_is_left_alone(wheels: Path, tmp_path: Path) -> None:
    """A stand-in torch 2.6.0 (the oldest supported) must still be there, alone, after everything is installed."""
    python = environment(tmp_path / "env")
    uv("pip", "install", "-q", "--python", str(python), str(torch_stand_in(tmp_path)))
    install(python, wheels, *PACKAGES)
    assert installed(python)["torch"] == "2.6.0"


def test_every_wheel_carries_the_licence(wheels: Path) -> None:
    text = (ROOT / "LICENSE").read_text()
    for package in PACKAGES:
        with zipfile.ZipFile(next(wheels.glob(f"{package.replace('-', '_')}-*.whl"))) as archive:
            found = [n for n in archive.namelist() if n.endswith(".dist-info/licenses/LICENSE")]
            assert [archive.read(n).decode() for n in found] == [text], package


def test_native_wheel_serves_every_python_and_links_no_gpu_library(wheels: Path, tmp_path: Path) -> None:
    wheel = next(wheels.glob("exl_kernels-*.whl"))
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith("_native.abi3.so"))
        library = Path(archive.extract(name, tmp_path))
        assert not [n for n in archive.namelist() if "libcuda" in n or "libtorch" in n]
    needed = run("ldd", str(library))
    assert not [
        line for line in needed.splitlines() if any(x in line for x in ("libcuda", "libtorch", "libc10", "libpython"))
    ], needed
