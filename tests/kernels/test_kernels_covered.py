"""`scripts/gpu/kernels_covered.py`: what a run launched, and the cases it chooses for the tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
    lines = [{"module": ["few", "never", "norm", "ring", "rope"]}]
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
    """What its fixture launched was none of the test's before it."""
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
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path]),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", "-p", "kernels_plugin"]
    subprocess.run(
        [*command, str(tmp_path / "test_it.py")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        check=True,
        timeout=250,
    )
    (log,) = (tmp_path / "log").iterdir()
    module, *cases = [json.loads(line) for line in log.read_text().splitlines()]
    assert module == {"module": ["norm", "rope"]}
    assert [(case["outcome"], case["launches"]) for case in cases] == [
        ("passed", {"norm": 2}),
        ("skipped", {"rope": 1}),
    ]


def test_nothing_is_proven_when_no_part_ran(tmp_path: Path) -> None:
    settings = {"CUDA_VISIBLE_DEVICES": "0", "PROVE_PARTS": "kernel", "EXL_COMMIT": "here", "EXL_NATIVE": os.devnull}
    done = subprocess.run(
        ["bash", SCRIPT.with_name("prove_all.sh"), tmp_path, "10"],
        env={**os.environ, **settings},
        capture_output=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 1
    assert (tmp_path / "parts" / "kernel").read_text().endswith("did not run\n")
