"""Compiles the kernels that hand over through mbarriers for racecheck: every lane of a warp arrives for itself.

    python3 scripts/gpu/racecheck_images.py FOLDER [KERNELS, default rust/exl-cuda/kernels]

Writes NAME.fatbin for this machine's GPU, or for the architecture that EXL_RACECHECK_ARCH names (such as 90a);
EXL_CUDA_IMAGES=FOLDER loads them in place of the module's own.
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
    """The first GPU's, with the `a` that `-arch=native` leaves out: without it, sm_90 has no warpgroup instructions."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    number = subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0].replace(".", "")
    return number + ("a" if int(number) >= 90 else "")


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


def main() -> None:
    folder = Path(sys.argv[1])
    kernels = Path(sys.argv[2]) if len(sys.argv) > 2 else CRATE / "kernels"
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        sys.exit("nvcc is not on PATH")
    folder.mkdir(parents=True, exist_ok=True)

    arch = os.environ.get("EXL_RACECHECK_ARCH") or architecture()
    flags = [*FLAGS, *row_limits(), f"-I{kernels}", f"-gencode=arch=compute_{arch},code=sm_{arch}"]

    def compile(source: Path) -> None:
        subprocess.run([nvcc, *flags, "-o", str(folder / f"{source.stem}.fatbin"), str(source)], check=True)

    found = [source for source in sorted(kernels.rglob("*.cu")) if mentions(kernels, source, set())]
    with ThreadPoolExecutor() as pool:
        list(pool.map(compile, found))
    print("compiled for racecheck:", ", ".join(source.stem for source in found))


if __name__ == "__main__":
    main()
