"""`scripts/gpu/bench_all.sh` and `tables.py`: what is measured is kept and shown, whatever happens to a part of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parents[2] / "scripts" / "gpu"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ABOUT = {"gpu": "NVIDIA H100 80GB HBM3", "commit": "c0ffee", "date": "2026-11-22"}
DOWN = {**ABOUT, "bench": "gemv", "shape": "down", "bits": "4", "m": 1}

PYTHON = """#!/usr/bin/env bash
# Benchmarks that print a line and end as the part of this name is to; all else is Python's.
case $1 in benchmarks/*) ;; *) exec {python} "$@" ;; esac
name=${{1##*bench_}} && name=${{name%.py}}
echo '{{"bench": "'$name'", "commit": "'$EXL_COMMIT'", "shape": "one", "p50_us": 7.0}}'
case $name in
  gemv) echo 'no memory left' >&2; exit 3 ;;
  attn) printf '{{"bench": "at'; kill -9 $$ ;;
esac
"""


def bench(folder: Path, script: str, *parts: str, **settings: str) -> subprocess.CompletedProcess[str]:
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").write_text(PYTHON.format(python=sys.executable))
    (folder / "bin" / "python3").chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", SCRIPTS / script, folder / "out", *parts],
        env={**os.environ, "PATH": path, "EXL_COMMIT": "c0ffee", "EXL_NATIVE": os.devnull, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )


def test_what_was_measured_is_kept_when_parts_fail_or_are_cut_off(tmp_path: Path) -> None:
    packed = tmp_path / "packed.tgz"
    done = bench(tmp_path, "bench_all.sh", "gemv", "attn", "roof", PACKED=str(packed))
    assert done.returncode == 1
    assert "gemv: exit code 3, 1 lines\nno memory left" in done.stdout
    assert "attn: exit code 137, 1 lines" in done.stdout
    assert 'no whole line: {"bench": "at\n' in done.stderr
    assert "roof: exit code 0, 1 lines" in done.stdout
    assert done.stdout.count("shape one, p50_us 7.0") == 3, "the summary has what each had printed"
    with tarfile.open(packed) as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert {"gemv.jsonl", "gemv.log", "roof.jsonl", "attn.jsonl"} <= names


def test_no_part_is_begun_without_time_for_it(tmp_path: Path) -> None:
    done = bench(tmp_path, "bench_all.sh", "roof", "serve", BENCH_SECONDS="9")
    assert done.returncode == 1
    assert [line.split(":")[0] for line in done.stdout.splitlines() if "left out" in line] == ["roof", "serve"]
    assert not list((tmp_path / "out").iterdir())


def test_a_short_lease_begins_with_what_has_bars(tmp_path: Path) -> None:
    done = bench(tmp_path, "bench_h100.sh", BENCH_SECONDS="240")
    assert done.returncode == 1  # gemv, as above
    parts = [line.split("] ")[1].split(":")[0] for line in done.stdout.splitlines() if " s] " in line]
    assert parts == ["step", "gemv", "batches", "others", "roof", "prefill"]


def tables(*files: Path) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "tables.py", *files], capture_output=True, text=True, check=True, timeout=250
    )
    return done.stdout, done.stderr


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_tables_have_every_whole_line_and_name_wrong_results(tmp_path: Path) -> None:
    right = {**DOWN, "us_pdl": 11.3, "pct_of_read_roof": 84.9}
    tuned = {**ABOUT, "bench": "gemv", "shape": "down", "slots_window": [8, 2], "us_pdl": 11.0}
    file = write(tmp_path / "gemv.jsonl", right, tuned, {**DOWN, "bits": "5+4", "wrong": True})
    file.write_text(file.read_text() + '{"bench": "gemv", "sha')
    text, said = tables(file)
    assert "| 4 bits | 11.3 us, 85 % (must 90: **missed**) |" in text
    assert "| 5+4 bits | **wrong** |" in text
    assert "no whole line" in said


def test_the_tables_in_the_docs_are_what_was_measured() -> None:
    """Their headings name the files: kind of GPU, days, commits."""
    page = (SCRIPTS.parents[1] / "docs" / "performance.md").read_text()
    shown = page.split("<!-- scripts/gpu/tables.py writes from here -->")[1].split("<!-- to here -->")[0]
    files = [
        RESULTS / f"{kind.lower()}-{date}-{commit}.jsonl"
        for kind, made in re.findall(r"^NVIDIA (\w+).*?, (\d.*)\.$", shown, re.MULTILINE)
        for date, commit in re.findall(r"([\d-]+), commit (\w+)", made)
    ]
    assert files
    assert tables(*files)[0].strip() == shown.strip()
