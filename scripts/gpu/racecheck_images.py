"""Compiles the kernels that hand over through mbarriers or named barriers for racecheck, in forms that it can follow.

    python3 scripts/gpu/racecheck_images.py FOLDER [KERNELS, default rust/exl-cuda/kernels]

Writes NAME.fatbin for the code that the module has for this machine's GPU, or for the architecture that
EXL_RACECHECK_ARCH names (such as 90a or 80); EXL_CUDA_IMAGES=FOLDER loads them in place of the module's own. Images of
code before sm_90, which has no mbarriers, are PTX, so that newer cards run them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SWITCH = "EXL_EACH_LANE_ARRIVES"
FLAGS = ["-fatbin", "-O3", "-std=c++17", "--expt-relaxed-constexpr", "-lineinfo", f"-D{SWITCH}"]
CRATE = Path(__file__).resolve().parents[2] / "rust" / "exl-cuda"


def architecture() -> str:
    """The module's for the first GPU, with the `a` without which sm_90 has no warpgroup instructions."""
    from exl_kernels.selection import Card

    code = Card.device().code
    return f"{code}a" if has_mbarriers(str(code)) else str(code)


def has_mbarriers(arch: str) -> bool:
    return int(arch.rstrip("a")) >= 90


def target(arch: str) -> str:
    """The option of nvcc: code for the architecture, or PTX where a newer card is to run it."""
    return f"-gencode=arch=compute_{arch},code={'sm' if has_mbarriers(arch) else 'compute'}_{arch}"


def row_limits() -> list[str]:
    """The limits of rows as macros, as the build of the module passes them to nvcc."""
    limits = re.findall(r"^pub const (\w+): usize = (\d+);$", (CRATE / "src" / "rows.rs").read_text(), re.MULTILINE)
    return [f"-DEXL_{name}={rows}" for name, rows in limits]


def mentions(kernels: Path, source: Path, seen: set[Path]) -> bool:
    """Whether a source or what it includes, by paths relative to `kernels`, knows the switch."""
    seen.add(source)
    text = source.read_text()
    if SWITCH in text:
        return True
    inner = (kernels / name for name in re.findall(r'^#include "(.+?)"', text, re.MULTILINE))
    return any(mentions(kernels, path, seen) for path in inner if path not in seen)


def sources(kernels: Path, arch: str) -> list[Path]:
    """The sources whose code for an architecture the switch changes."""
    unchanged = set() if has_mbarriers(arch) else {kernels / "common" / "pipeline.cuh"}
    return [source for source in sorted(kernels.rglob("*.cu")) if mentions(kernels, source, set(unchanged))]


def main() -> None:
    folder = Path(sys.argv[1])
    kernels = Path(sys.argv[2]) if len(sys.argv) > 2 else CRATE / "kernels"
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        sys.exit("nvcc is not on PATH")
    folder.mkdir(parents=True, exist_ok=True)

    arch = os.environ.get("EXL_RACECHECK_ARCH") or architecture()
    flags = [*FLAGS, *row_limits(), f"-I{kernels}", target(arch)]

    def compile(source: Path) -> None:
        subprocess.run([nvcc, *flags, "-o", str(folder / f"{source.stem}.fatbin"), str(source)], check=True)

    found = sources(kernels, arch)
    with ThreadPoolExecutor() as pool:
        list(pool.map(compile, found))
    print("compiled for racecheck:", ", ".join(source.stem for source in found))


if __name__ == "__main__":
    main()
