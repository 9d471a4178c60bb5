"""Races planted in our own kernels, one at a time: racecheck must report each.

    python3 scripts/gpu/racecheck_planted.py FOLDER [KERNELS, default rust/exl-cuda/kernels]

Compiles a copy of the kernels with one barrier left out or one write moved, as racecheck_images.py does, and runs a
test that uses them under racecheck. Exit code 0 if every race is reported. FOLDER is for images and logs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
FUSED = "tests/kernels/test_cuda_fused_linear.py::test_several_matrices"
SINGLE = "tests/kernels/test_cuda_linear.py::test_rows_that_begin_anywhere"


@dataclass(frozen=True)
class Race:
    """`changes` of text in `file`; `images` are the kernels to compile, `test` what runs them."""

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    images: tuple[str, ...]
    test: str


ARRIVES = "    warp_arrives(s.ready + result.slot * 8, lane);\n"
FEW_STORES = "    store_four(result(buffer), total[0]);\n"
FEW_ARRIVES = "    warp_arrives(s.ready + buffer * 8, lane);\n"
SET_UP, MEET = "    batch.set_up_maxima();\n", "    bar<1>(BARRIER_THREADS);\n"
RACES = [
    Race(
        "a norm's sums are read unmet",
        "linear/ring_fill.cuh",
        (("synchronize();", ";"),),
        ("ring",),
        f"{FUSED}[True-dtype0-one order]",
    ),
    Race(
        "a tile's sums arrive before they are stored",
        "linear/ring.cuh",
        ((ARRIVES, ""), ("    if (stored) {\n", f"{ARRIVES}    if (stored) {{\n")),
        ("ring",),
        f"{FUSED}[False-dtype0-one order]",
    ),
    Race(
        "sums of few rows arrive before they are stored",
        "linear/few.cuh",
        ((FEW_STORES + FEW_ARRIVES, FEW_ARRIVES + FEW_STORES),),
        ("few",),
        f"{FUSED}[False-dtype0-one order]",
    ),
    Race(
        "maxima are written after the barrier",
        "linear/batch.cuh",
        ((SET_UP + MEET, MEET + SET_UP),),
        ("batch_exl2_128",),
        SINGLE,
    ),
]


def planted(race: Race, kernels: Path) -> str:
    """The text of the race's file with the race in it."""
    text = (kernels / race.file).read_text()
    for old, new in race.changes:
        if old not in text:
            sys.exit(f"{race.file} has nothing to plant this race in any more: {race.name}")
        text = text.replace(old, new)
    return text


def reported(race: Race, kernels: Path, folder: Path) -> bool:
    """Whether racecheck reports this race in a kernel of ours."""
    place = folder / race.name.replace(" ", "-").replace("'", "")
    sources = place / "kernels"
    shutil.copytree(kernels, sources, dirs_exist_ok=True)
    (sources / race.file).write_text(planted(race, kernels))
    for source in sources.rglob("*.cu"):
        if source.stem not in race.images:
            source.unlink()
    made = [sys.executable, str(HERE / "racecheck_images.py"), str(place / "images"), str(sources)]
    subprocess.run(made, check=True, capture_output=True)
    command = ["compute-sanitizer", "--tool", "racecheck", "--racecheck-report", "analysis", "--print-limit", "4"]
    command += ["--racecheck-num-workers", "2", "--destroy-on-device-error", "kernel"]
    for name in ("at6native", "cublas", "cutlass"):
        command += ["--kernel-name-exclude", f"kns={name}"]
    command += [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "-p", "no:cacheprovider", "--tb=line", race.test]
    environment = {
        **os.environ,
        "EXL_CUDA_IMAGES": str(place / "images"),
        "EXL_CUDA_PDL": "0",
        "EXL_SANITIZER": "racecheck",
    }
    with (place / "log").open("w") as log, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, check=False, stdout=log, stderr=log, env=environment, timeout=60)
    lines = (place / "log").read_text(errors="replace").splitlines()
    return any("Race reported" in line and "nvjet" not in line for line in lines)


def main() -> None:
    folder = Path(sys.argv[1])
    kernels = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE.parents[1] / "rust" / "exl-cuda" / "kernels"
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda race: reported(race, kernels, folder), RACES))
    for race, there in zip(RACES, found, strict=True):
        print(f"{race.file}: {race.name}: {'reported' if there else 'NOT REPORTED'}")
    sys.exit(0 if all(found) else 1)


if __name__ == "__main__":
    main()
