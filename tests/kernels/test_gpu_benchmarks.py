"""`scripts/gpu/bench_all.sh` and `tables.py`: what is measured is kept and shown, whatever happens to a part of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parents[2] / "scripts" / "gpu"
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
    assert "| 4 bits | 11.3 us, 85 % |" in text
    assert "| 5+4 bits | **wrong** |" in text
    assert "no whole line" in said


def test_the_last_run_of_a_case_counts_and_another_engines_speed_stays(tmp_path: Path) -> None:
    step = {**ABOUT, "bench": "step", "model_shape": "8b", "bpw": "4.0", "cache": "fp16", "ctx": 256, "bs": 1}
    step |= {"p50_us": 2000.0, "tok_s": 500.0, "pct_of_read_roof": 50.0, "host_us": 40.0, "memory_over_mb": 200.0}
    first = write(tmp_path / "b.jsonl", {**step, "reference_name": "other 1.0, 250 tok/s"})
    later = {**step, "date": "2026-11-23", "commit": "feed5", "tok_s": 600.0}
    second = write(tmp_path / "a.jsonl", later, {**later, "apart": True, "tok_s": 1.0})
    text, _ = tables(first, second)
    assert "| Llama 8B, 4.0 bpw, 1 sequence | 2,000 | 600 |  | 50 % | 40 | 200 | 250 (other 1.0), 2.4 x |" in text
    evening = write(tmp_path / "0.jsonl", {**later, "time": "20:15:00", "commit": "beef6", "tok_s": 700.0})
    text, _ = tables(first, second, evening)
    assert "| Llama 8B, 4.0 bpw, 1 sequence | 2,000 | 700 |" in text
    morning = write(tmp_path / "c.jsonl", {**later, "time": "06:15:00", "commit": "cafe7", "tok_s": 650.0})
    text, _ = tables(evening, morning)
    assert "| Llama 8B, 4.0 bpw, 1 sequence | 2,000 | 700 |" in text


def test_a_feature_measured_by_several_commits_names_the_commit_of_each_batch(tmp_path: Path) -> None:
    line = {**ABOUT, "bench": "features", "model_shape": "8b", "feature": "schema", "about": "JSON schema", "batch": 1}
    line |= {"us": 1700.0, "share_of_greedy": 0.98}
    later = {**line, "commit": "feed5"}
    wide = {**line, "batch": 32, "us": 5000.0, "share_of_greedy": 0.71}
    text, _ = tables(write(tmp_path / "a.jsonl", wide, later))
    assert "| 8b: JSON schema (feed5 at 1, c0ffee at 32) |  | 1,700 | 0.98 |  | 5,000 | 0.71 |  |" in text
    text, _ = tables(write(tmp_path / "b.jsonl", wide, line))
    assert "| 8b: JSON schema |  | 1,700 |" in text


def test_the_tables_in_the_docs_are_those_of_the_results() -> None:
    """After a new run: `python scripts/gpu/tables.py --into docs/performance.md`."""
    page = (SCRIPTS.parents[1] / "docs" / "performance.md").read_text()
    shown = page.split("<!-- scripts/gpu/tables.py writes from here -->")[1].split("<!-- to here -->")[0]
    assert tables()[0].strip() == shown.strip()


def test_features_are_shown_beside_what_they_are_compared_with(tmp_path: Path) -> None:
    line = {**ABOUT, "bench": "features", "model_shape": "8b", "feature": "cfg", "about": "CFG", "batch": 1}
    line |= {"us": 2000.4, "share_of_greedy": 0.75, "ratio_vs_reference": 0.9, "reference_name": "greedy-twice"}
    more = {**line, "batch": 32, "us": 4000.0, "ratio_vs_reference": None, "must": 0.85}
    text, _ = tables(write(tmp_path / "features.jsonl", {**line, "must": 0.85}, more, {**line, "gpu": None, "us": 1.0}))
    assert "| 8b: CFG | greedy-twice | 2,000 | 0.75 | 0.90 (target 0.85) | 4,000 | 0.75 |  (target 0.85) |" in text
