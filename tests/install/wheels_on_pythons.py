"""`make test-wheels`: the wheels of `make wheels` run on every supported Python, with the oldest and the newest torch.

EXL_WHEELS names the folder of the wheels. Every case downloads gigabytes of torch, so the file is collected only when
it is named.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.install, pytest.mark.timeout(3600)]

WHEELS = Path(os.environ.get("EXL_WHEELS", "dist/cpu")).resolve()
#: A clean environment: no checkout on the path, no other environment, no other source of packages.
HIDDEN = {"VIRTUAL_ENV", "PYTHONPATH", "UV_FIND_LINKS", "PIP_FIND_LINKS"}


def run(*args: str | Path, where: Path) -> subprocess.CompletedProcess[str]:
    """Run a command outside of the checkout."""
    clean = {key: value for key, value in os.environ.items() if key not in HIDDEN}
    return subprocess.run(args, cwd=where, env=clean, capture_output=True, text=True, check=False)


def documented_architectures() -> set[str]:
    """The architectures for which docs/install.md promises kernels of their own in wheels."""
    guide = (Path(__file__).parents[2] / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|[^|]+\| `(\d+a?)` \|(.*)\|$", guide, re.MULTILINE)
    return {arch for arch, state in rows if "wheels hold the code of" not in state}


@pytest.mark.parametrize(
    ("python", "torch"),
    [("3.11", "torch==2.6.0"), ("3.11", "torch"), ("3.12", "torch"), ("3.13", "torch"), ("3.14", "torch")],
)
def test_the_wheels_generate_text(python: str, torch: str, tmp_path: Path) -> None:
    assert list(WHEELS.glob("exl_kernels-*manylinux*.whl")), f"{WHEELS} holds no wheels: run `make wheels VARIANT=cpu`"
    uv = shutil.which("uv") or "uv"
    made = run(uv, "venv", "-q", "--python", python, tmp_path / "env", where=tmp_path)
    if made.returncode and os.environ.get("EXL_PYTHONS") != "required":
        pytest.skip(f"no Python {python} here: {made.stderr.splitlines()[0]}")
    bin_ = tmp_path / "env" / "bin"
    packages = ("exl-generate", "exl-compat", "exl-serve")
    commands: list[tuple[str | Path, ...]] = [
        (uv, "pip", "install", "-q", "--python", bin_ / "python", "--find-links", WHEELS, torch, *packages),
        (bin_ / "python", "-c", "import exl_serve, exllamav2.generator"),
        (bin_ / "exl", "doctor", "--json"),
    ]
    for command in commands:
        done = run(*command, where=tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    architectures = str(json.loads(done.stdout)["cuda"]["architectures"] or "")
    built = {arch.removesuffix("+ptx") for arch in architectures.replace(",", " ").split()}
    assert built == (set() if WHEELS.name == "cpu" else documented_architectures())
    told = run(
        bin_ / "exl", "generate", "Once upon", "-n", "12", "--greedy", "--device", "cpu", "--json", where=tmp_path
    )
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["new_tokens"] == 12
