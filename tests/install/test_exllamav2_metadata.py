"""exl-compat's wheel installs an entry for `exllamav2`: what pip and uv make of it, with and without an original."""

from __future__ import annotations

import importlib.util
import subprocess
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.install, pytest.mark.timeout(7200)]

_spec = importlib.util.spec_from_file_location("clean", Path(__file__).with_name("test_clean_environments.py"))
assert _spec is not None
assert _spec.loader is not None
clean = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(clean)

VERSION = "import importlib.metadata as m; print(m.version('exllamav2'))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as it is published: built from the source distribution."""
    out = tmp_path_factory.mktemp("wheel")
    clean.uv("build", "-q", "--package", "exl-compat", "--out-dir", str(out))
    found: Path = next(out.glob("*.whl"))
    return found


@pytest.fixture
def python(tmp_path: Path, wheel: Path) -> Path:
    """An environment with pip and the wheel alone, installed by pip."""
    clean.uv("venv", "-q", "--seed", "--python", clean.sys.executable, str(tmp_path / "env"))
    found = tmp_path / "env" / "bin" / "python"
    pip(found, "install", "-q", "--no-deps", str(wheel))
    return found


def pip(python: Path, *args: str) -> str:
    found: str = clean.run(str(python), "-m", "pip", *args)
    return found


def original(folder: Path, version: str) -> Path:
    """A stand-in for the original's wheel."""
    path = folder / f"exllamav2-{version}-py3-none-any.whl"
    files = {
        "exllamav2/__init__.py": "original = True\n",
        f"exllamav2-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: exllamav2\nVersion: {version}\n",
        f"exllamav2-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"exllamav2-{version}.dist-info/RECORD"] = "".join(f"{name},,\n" for name in files)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_pip_sees_the_requirement_satisfied_and_removes_everything_with_exl_compat(python: Path) -> None:
    assert clean.run(str(python), "-c", VERSION).strip() == "0.3.2+exl"
    assert "already satisfied" in pip(python, "install", "--no-index", "--no-deps", "exllamav2>=0.3.1")
    assert "Version: 0.3.2+exl" in pip(python, "show", "exllamav2")
    pip(python, "uninstall", "-q", "-y", "exl-compat")
    left = [path.name for path in python.parents[1].glob("lib/*/site-packages/ex*")]
    assert left == []


@pytest.mark.parametrize("version", ["0.3.2", "0.3.3"])
def test_pip_does_not_install_an_original_over_it(python: Path, tmp_path: Path, version: str) -> None:
    command = [str(python), "-m", "pip", "install", "--no-deps", str(original(tmp_path, version))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "installed by exl-compat" in done.stderr + done.stdout
    package = next(python.parents[1].glob("lib/*/site-packages/exllamav2"))
    assert "original = True" not in (package / "__init__.py").read_text()


def test_uv_sees_it_and_leaves_it_alone(python: Path) -> None:
    assert clean.installed(python)["exllamav2"] == "0.3.2+exl"
    clean.uv("pip", "install", "-q", "--offline", "--no-deps", "--python", str(python), "exllamav2>=0.3.1")
    command = ["uv", "pip", "uninstall", "--python", str(python), "exllamav2"]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0
    assert clean.run(str(python), "-c", VERSION).strip() == "0.3.2+exl"
    clean.uv("pip", "uninstall", "-q", "--python", str(python), "exl-compat")
    assert "exllamav2" not in clean.installed(python)


def test_both_can_be_removed_after_both_were_installed(tmp_path: Path, wheel: Path) -> None:
    """The remedy of the warning at import: uninstall exl-compat and exllamav2, then install one."""
    clean.uv("venv", "-q", "--seed", "--python", clean.sys.executable, str(tmp_path / "env"))
    python = tmp_path / "env" / "bin" / "python"
    pip(python, "install", "-q", "--no-deps", str(original(tmp_path, "0.3.2")))
    pip(python, "install", "-q", "--no-deps", str(wheel))
    pip(python, "uninstall", "-q", "-y", "exl-compat")
    pip(python, "uninstall", "-q", "-y", "exllamav2")
    assert [path.name for path in python.parents[1].glob("lib/*/site-packages/ex*")] == []
    pip(python, "install", "-q", "--no-deps", str(wheel))
    assert clean.run(str(python), "-c", VERSION).strip() == "0.3.2+exl"
