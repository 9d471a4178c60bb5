"""A checkout keeps the architectures that it was once built for. Real uv, maturin and cargo; a stand-in for nvcc."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NVCC = """#!/bin/sh
case "$1" in
  --version) echo "release 13.0, V0.0.0"; exit;;
  --list-gpu-arch) printf 'compute_%s\\n' 75 80 86 89 90 100 120; exit;;
esac
echo "$@" >> "$NVCC_LOG"
while [ "$1" != -o ]; do shift; done
echo image > "$2"
"""
pytestmark = [pytest.mark.install, pytest.mark.timeout(3600)]


class Checkout:
    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "packages", "rust", "pyproject.toml", "uv.lock", "README.md", "LICENSE"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.root / name)
        tools = folder / "toolkit" / "bin"
        tools.mkdir(parents=True)
        (tools / "nvcc").write_text(NVCC)
        (tools / "nvcc").chmod(0o755)
        self._log = folder / "compiled"
        dropped = {"VIRTUAL_ENV", "PYTHONPATH", "EXL_CUDA_ARCHS", "EXL_CUDA_CACHE", "CARGO_TARGET_DIR", "EXL_DEVICE"}
        self._env = {name: value for name, value in os.environ.items() if name not in dropped}
        self._env |= {"EXL_CUDA_HOME": str(tools.parent), "NVCC_LOG": str(self._log)}
        # The native module is only asked for its architectures: optimizing it would take minutes.
        self._env["CARGO_PROFILE_EDIT_OPT_LEVEL"] = "0"

    def uv(self, *args: str, archs: str | None = None) -> str:
        self._log.write_text("")
        env = self._env if archs is None else self._env | {"EXL_CUDA_ARCHS": archs}
        done = subprocess.run(["uv", *args], cwd=self.root, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-6000:]
        return done.stdout

    def sync(self, archs: str | None = None) -> None:
        self.uv("sync", "-q", "--locked", "--no-dev", archs=archs)

    def doctor(self) -> str | None:
        """Architectures that `uv run exl doctor` names."""
        answer: str | None = json.loads(self.uv("run", "-q", "--no-dev", "exl", "doctor", "--json"))["cuda"][
            "architectures"
        ]
        return answer

    def compiled(self) -> bool:
        """Whether the last command ran nvcc."""
        return bool(self._log.read_text())


def test_the_choice_stays_until_the_variable_changes_it(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.sync()
    assert checkout.compiled()
    first = checkout.doctor()
    assert first is not None
    other = "86" if first == "89" else "89"
    checkout.sync(other)
    assert checkout.compiled()
    assert checkout.doctor() == other
    assert not checkout.compiled()
    checkout.sync()
    assert (checkout.doctor(), checkout.compiled()) == (other, False)
    # An edit builds again, for the same card.
    source = checkout.root / "rust" / "exl-cuda" / "src" / "lib.rs"
    source.write_text(source.read_text() + "// edited\n")
    assert (checkout.doctor(), checkout.compiled()) == (other, False)
    checkout.sync("none")
    assert checkout.doctor() is None
    checkout.sync("auto")
    assert checkout.doctor() == first
