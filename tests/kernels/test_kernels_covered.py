"""`scripts/gpu/kernels_covered.py` and `test_all.sh`: what a run launched and what not, and cases for the tools."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu" / "kernels_covered.py"


def run(*arguments: object) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=250
    )
    assert not done.stderr
    return done.returncode, done.stdout


def test_chosen_cases_have_every_kernel(tmp_path: Path) -> None:
    cases = [
        ("t.py::a[1]", 0.1, {"norm": 1}),
        ("t.py::a[2]", 9.0, {"norm": 1, "rope": 2, "ring": 1}),
        ("t.py::a[3]", 0.2, {"norm": 1, "rope": 2}),
        ("t.py::b", 0.1, {"norm": 3}),
        ("t.py::c", 0.1, {"few": 1}),
    ]
    lines: list[dict[str, Any]] = [{"module": ["few", "never", "norm", "ring", "rope"]}]
    for name, seconds, launches in cases:
        lines.append({"case": name, "outcome": "passed", "seconds": seconds, "launches": launches})
    lines.append({"case": "t.py::d", "outcome": "failed", "seconds": 1.0, "launches": {"few": 1}})
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "kernels-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    code, text = run(tmp_path)
    assert (code, text) == (1, "4 of 5 kernels launched by 6 tests\nnever launched: never\n")

    log, chosen = tmp_path / "log.txt", tmp_path / "chosen.txt"
    log.write_text("passed 70.0 t.py::a[2]\npassed 3.5 t.py::b\n")
    code, _ = run(tmp_path, "--choose", chosen, "--costs", log)
    assert code == 0
    names = [line.split(" ", 1)[1] for line in chosen.read_text().splitlines()]
    assert names == ["t.py::a[2]", "t.py::c"], "the only cases of `ring` and `few`; all else is in them"
    assert chosen.read_text().startswith("70.0 t.py::a[2]\n")


def test_a_case_that_ended_in_its_setup_has_no_other_ones_outcome(tmp_path: Path) -> None:
    """Launches of a fixture count for its test, not for the test before."""
    (tmp_path / "test_it.py").write_text(
        """
import pytest
from exl_kernels import _native
counts = {"norm": 0, "rope": 0}
_native.cuda_launches = lambda: dict(counts)

@pytest.fixture
def launched():
    counts["rope"] += 1
    pytest.skip("nothing for this one")

def test_a():
    counts["norm"] += 2

def test_b(launched): ...
"""
    )
    environment = {
        **os.environ,
        "EXL_KERNELS_LOG": str(tmp_path / "log"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path]),
    }
    command = ["-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", "-p", "kernels_plugin"]
    done = preloaded.run([*command, str(tmp_path / "test_it.py")], folder=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout
    (log,) = (tmp_path / "log").iterdir()
    module, *cases = [json.loads(line) for line in log.read_text().splitlines()]
    assert module == {"module": ["norm", "rope"]}
    assert [(case["outcome"], case["launches"]) for case in cases] == [
        ("passed", {"norm": 2}),
        ("skipped", {"rope": 1}),
    ]


@pytest.mark.full
def test_the_cases_chosen_for_the_tools_are_tests() -> None:
    """One that is renamed would leave a kernel out, which only a GPU's run would find."""
    root = SCRIPT.parents[2]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/kernels"], cwd=root, capture_output=True, text=True, check=True, timeout=250
    )
    cases = [line.split(" ", 1)[1] for line in SCRIPT.with_name("sanitize_cases.txt").read_text().splitlines()]
    assert cases
    assert not set(cases) - set(done.stdout.splitlines())


PYTHON = """#!/usr/bin/env bash
# Tests that pass at once, and leave what was recorded in the place of what they launched.
[ "$1 $2" = "-m pytest" ] || exec {python} "$@"
mkdir -p "$EXL_KERNELS_LOG"
cp "$RECORDED/${{EXL_SANITIZER:-tests}}.jsonl" "$EXL_KERNELS_LOG/kernels-$$.jsonl"
[ -z "${{EXL_SUBSET_LOG:-}}" ] || echo "passed 1.0 t.py::a" > "$EXL_SUBSET_LOG"
echo "2 passed in 0.1s"
"""
SANITIZER = """#!/usr/bin/env bash
# Of the probe of racecheck forms 1 and 3 are right; all else is pytest.
case ${@: -1} in 1 | 3) exit 0 ;; 5 | 6) exit 99 ;; esac
while [ "$1" != python3 ]; do shift; done
exec "$@"
"""
PARTS = ("tests", "memcheck", "racecheck")


def run_all(folder: Path, parts: str, seconds: int = 240) -> subprocess.CompletedProcess[str]:
    """test_all.sh on one GPU that is not there, with what `folder` has in bin and recorded."""
    settings = {
        "CUDA_VISIBLE_DEVICES": "0",
        "TEST_PARTS": parts,
        "EXL_COMMIT": "here",
        "EXL_NATIVE": os.devnull,
        "EXL_CUDA_IMAGES": str(folder),
        "RECORDED": str(folder),
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    return subprocess.run(
        ["bash", SCRIPT.with_name("test_all.sh"), folder / "out", str(seconds)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )


@pytest.mark.parametrize("missed", [None, *PARTS])
def test_a_kernel_that_was_never_launched_fails_its_part_by_name(missed: str | None, tmp_path: Path) -> None:
    programs = {"python3": PYTHON.format(python=sys.executable), "compute-sanitizer": SANITIZER, "nvcc": "#!/bin/sh\n"}
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    for part in PARTS:
        launches = {"few": 2} if part == missed else {"few": 2, "whole_64x3": 1}
        lines: list[dict[str, Any]] = [{"module": ["few", "whole_64x3"]}]
        lines.append({"case": "t.py::a", "outcome": "passed", "seconds": 1.0, "launches": launches})
        # The last line is incomplete, as a killed process leaves it.
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"case": "t.p')

    done = run_all(tmp_path, "kernels memcheck racecheck")
    table = done.stdout[done.stdout.index("\npart ") :]
    rows = {row.split()[0]: row for row in table.splitlines()[2:]}
    assert set(rows) == {"kernels", "launched", "memcheck", "racecheck"}
    assert done.returncode == (0 if missed is None else 1), done.stdout + done.stderr
    for part, row in (("tests", "launched"), ("memcheck", "memcheck"), ("racecheck", "racecheck")):
        assert ("FAILED" in rows[row]) == (part == missed), rows[row]
        assert ("never launched: whole_64x3" in rows[row]) == (part == missed), rows[row]
        assert f"{1 if part == missed else 2} of 2 kernels launched" in rows[row]


def test_a_run_without_parts_fails(tmp_path: Path) -> None:
    assert run_all(tmp_path, "kernel", 10).returncode == 1
    assert (tmp_path / "out" / "parts" / "kernel").read_text().endswith("did not run\n")


def test_every_planted_race_has_its_place_in_the_kernels() -> None:
    """Else `racecheck_planted.py` ends on the GPU before it has shown that the tool reports races."""
    script = runpy.run_path(str(SCRIPT.with_name("racecheck_planted.py")))
    kernels = SCRIPT.parents[2] / "rust" / "exl-cuda" / "kernels"
    for race in script["RACES"]:
        assert script["planted"](race, kernels) != (kernels / race.file).read_text(), race.name


def test_racecheck_gets_images_of_the_code_that_the_module_runs() -> None:
    """A card runs older code only as PTX. There only the teams of attention have barriers of a part of a block."""
    script = runpy.run_path(str(SCRIPT.with_name("racecheck_images.py")))
    kernels = SCRIPT.parents[2] / "rust" / "exl-cuda" / "kernels"
    assert script["target"]("90a") == "-gencode=arch=compute_90a,code=sm_90a"
    assert script["target"]("80") == "-gencode=arch=compute_80,code=compute_80"
    older = {source.stem for source in script["sources"](kernels, "80")}
    assert older == {f"attention_teams_{kind}" for kind in ("fp16", "fp8", "q8", "q6", "q4")}
    assert older | {"ring", "few", "attention_wide"} <= {source.stem for source in script["sources"](kernels, "90a")}
