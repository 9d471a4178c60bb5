"""Generate `exl_kernels/_native.pyi` from the Rust signatures, or check that the committed file is current.

The stubs are built without CUDA kernels, which no signature depends on, and in a target folder of their own: nvcc does
not run and the installed module is not rebuilt. `--check` writes nothing and exits 1 if the committed file differs.
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "packages" / "exl-kernels"
TARGET = PACKAGE / "src" / "exl_kernels" / "_native.pyi"
# Nothing of this build runs: no optimization, no debug information.
BUILD = {"EXL_CUDA_ARCHS": "none", "CARGO_PROFILE_DEV_OPT_LEVEL": "0", "CARGO_PROFILE_DEV_DEBUG": "0"}


def generated() -> str:
    """Return the stub that the Rust sources describe, in the house style."""
    with tempfile.TemporaryDirectory() as folder:
        _run(
            *("-m", "maturin", "generate-stubs", "--quiet", "--locked", "--interpreter", sys.executable),
            *("--profile", "dev", "--features", "stubs"),
            *("--target-dir", str(ROOT / "rust" / "target" / "stubs"), "--out", folder),
            env=os.environ | BUILD,
        )
        # Formatted outside the tree, so the configuration and the package are named.
        (stub,) = Path(folder).rglob("*.pyi")
        own = 'lint.isort.known-first-party = ["exl_kernels"]'
        style = ["--quiet", "--config", str(ROOT / "pyproject.toml"), "--config", own, str(stub)]
        _run("-m", "ruff", "check", "--select", "I,RUF022", "--fix", *style)
        _run("-m", "ruff", "format", *style)
        return stub.read_text(encoding="utf-8")


def main() -> int:
    """Write or check the file; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed file instead of writing it")
    check = parser.parse_args().check
    text = generated()
    if not check:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    current = TARGET.read_text(encoding="utf-8") if TARGET.exists() else ""
    if current == text:
        return 0
    name = TARGET.relative_to(ROOT).as_posix()
    sys.stdout.writelines(difflib.unified_diff(current.splitlines(True), text.splitlines(True), name, "generated"))
    print(f"{name} does not match the Rust signatures: run `python scripts/native_stubs.py`")
    return 1


def _run(*arguments: str, env: dict[str, str] | None = None) -> None:
    subprocess.run([sys.executable, *arguments], cwd=PACKAGE, env=env, check=True)


if __name__ == "__main__":
    raise SystemExit(main())
