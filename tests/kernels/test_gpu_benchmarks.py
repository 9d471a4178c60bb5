"""Scripts of GPU benchmarks: `bench_all.sh` measures, `keep.py` stores lines, `tables.py` shows them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import keep
import tables as tables_script
from gpu_bars import BARS, PREFILL_BARS, alone_keys

SCRIPTS = Path(__file__).parents[2] / "scripts" / "gpu"
RESULTS = SCRIPTS.parents[1] / "benchmarks" / "results"
ABOUT = {"gpu": "NVIDIA H100 80GB HBM3", "commit": "c0ffee", "date": "2026-11-22"}
SM_80 = "NVIDIA H100 80GB HBM3, code for sm_80"

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


def test_measurements_are_kept_when_parts_fail_or_are_cut_off(tmp_path: Path) -> None:
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


STEP = {**ABOUT, "bench": "step", "model_shape": "8b", "bpw": "4.0", "cache": "fp16", "ctx": 256, "bs": 1}
STEP |= {"p50_us": 2000.0, "tok_s": 500.0, "generator_tok_s": 490.0, "pct_of_read_roof": 50.0, "memory_over_mb": 200.0}


def test_tables_have_every_whole_line_and_report_cut_ones(tmp_path: Path) -> None:
    tuned = {**ABOUT, "bench": "step", "p50_us": 1.0}
    file = write(tmp_path / "step.jsonl", STEP, tuned)
    file.write_text(file.read_text() + '{"bench": "step", "sha')
    text, said = tables(file)
    assert "| 8B, 1 sequence | 2,000 / 490 / 50 % |  |" in text
    assert "no whole line" in said


def test_the_last_run_of_a_case_counts_and_another_engines_speed_stays(tmp_path: Path) -> None:
    first = write(tmp_path / "b.jsonl", {**STEP, "reference_name": "other 1.0, 250 tok/s"})
    later = {**STEP, "date": "2026-11-23", "commit": "feed5", "generator_tok_s": 600.0}
    second = write(tmp_path / "a.jsonl", later, {**later, "apart": True, "generator_tok_s": 1.0})
    text, _ = tables(first, second)
    assert "| 8B, 1 sequence | 2,000 / 600 / 50 % | 250 (other 1.0) |" in text
    evening = write(tmp_path / "0.jsonl", {**later, "time": "20:15:00", "commit": "beef6", "generator_tok_s": 700.0})
    text, _ = tables(first, second, evening)
    assert "| 8B, 1 sequence | 2,000 / 700 / 50 % |" in text
    morning = write(tmp_path / "c.jsonl", {**later, "time": "06:15:00", "commit": "cafe7", "generator_tok_s": 650.0})
    text, _ = tables(evening, morning)
    assert "| 8B, 1 sequence | 2,000 / 700 / 50 % |" in text


def test_a_table_ends_with_the_dates_of_its_runs(tmp_path: Path) -> None:
    eight = {**STEP, "bs": 8, "date": "2026-11-23", "commit": "feed5" * 8}
    older = {**eight, "date": "2026-11-22", "commit": "0ld"}
    other = {**STEP, "gpu": "NVIDIA H200"}
    text, _ = tables(write(tmp_path / "a.jsonl", STEP, eight, older, other))
    assert "| step | H200: us / tok/s / bandwidth | H100: us / tok/s / bandwidth | fastest" in text
    assert "| 8B, 1 sequence | 2,000 / 490 / 50 % | 2,000 / 490 / 50 % |" in text
    assert "| 8B, 8 sequences |  | 2,000 / 490 / 50 % |" in text
    assert "Measured: H200 2026-11-22; H100 2026-11-22 to 2026-11-23." in text


def test_families_with_steps_and_a_prompt_have_a_row_on_the_fastest_card(tmp_path: Path) -> None:
    line = {**ABOUT, "bench": "families", "family": "gemma2-9b", "layers": 8, "batch": 1, "p50_us": 600.0}
    prompt = {**ABOUT, "bench": "families", "family": "gemma2-9b", "layers": 8, "prompt": 2048, "prompt_tok_s": 9e4}
    guess = {**line, "family": "mixtral-8x7b", "extrapolated": True}
    twin = {**line, "batch": 32, "p50_us": 900.0, "share_of_twin": 0.955}
    step_alone = {**line, "family": "qwen3-14b"}
    lines = (line, {**line, "batch": 8, "p50_us": 800.0}, twin, prompt, guess, step_alone)
    text, _ = tables(write(tmp_path / "a.jsonl", *lines, {**prompt, "gpu": "NVIDIA H200", "prompt_tok_s": 9.5e4}))
    assert "| gemma2-9b, 8 |  |  | 95,000 |" in text
    text, _ = tables(write(tmp_path / "a.jsonl", *lines))
    assert "| gemma2-9b, 8 | 600 / 800 / 900 | - / - / 0.95 | 90,000 |" in text
    assert "mixtral" not in text
    assert "qwen3" not in text


def test_cards_that_were_not_measured_are_predicted_from_the_last_step_of_the_code_for_sm_80(tmp_path: Path) -> None:
    """1.4 GB at 0.93 of 3,352 GB/s take 449 us, which leaves 200 launches of 1 us."""
    old = {**STEP, "gpu": f"{STEP['gpu']}, code for sm_80", "bytes_per_step": 14e8, "roof_gb_s": 3352.0, "nodes": 200}
    step = {**old, "p50_us": 14e8 / (0.93 * 3352e3) + 200, "date": "2026-11-24"}
    text, _ = tables(write(tmp_path / "a.jsonl", step, old))
    assert "and 1.0 us a launch" in text
    for card, bandwidth in (("RTX 3090", 936), ("A100 80 GB", 2039)):
        ms = 14e8 / (0.93 * bandwidth * 1e6) + 0.2
        assert f"| {card} | {bandwidth:,} | {ms:.1f} | {1e3 / ms:,.0f} |" in text
    text, _ = tables(write(tmp_path / "b.jsonl", STEP))
    assert "Predicted" not in text


def test_both_pages_have_the_tables_of_the_results() -> None:
    """After a new run: `python scripts/gpu/keep.py FILE.jsonl` and `python scripts/gpu/tables.py --write`."""
    files = sorted(RESULTS.glob("*.jsonl"))
    pages = {"docs/performance.md": tables_script.text_of(files), "README.md": tables_script.headline(files)}
    for page, text in pages.items():
        shown = (SCRIPTS.parents[1] / page).read_text().split("<!-- scripts/gpu/tables.py writes from here -->")[1]
        assert shown.split("<!-- to here -->")[0].strip() == text.strip(), page


def test_the_speeds_of_the_installation_page_are_those_of_the_tables() -> None:
    docs = SCRIPTS.parents[1] / "docs"
    text = (docs / "performance.md").read_text()
    predicted = dict(re.findall(r"^\| (?:RTX )?([\w ]+) \| [\d,]+ \| [\d.]+ \| (\d+) \|$", text, re.MULTILINE))
    (h200, h100) = re.findall(r"^\| 8B, 1 sequence \|[^|/]*/ (\d+) /[^|]*\|[^|/]*/ (\d+) /", text, re.MULTILINE)[0]
    page = (docs / "install.md").read_text()
    assert f"| {h100}, {h200} measured |" in page
    for card in ("2080 Ti", "3060", "3090", "4090", "5090", "L4", "L40S"):
        assert f"{predicted[card]} ({card})" in page
    assert f"{predicted['A100 80 GB']} predicted (80 GB)" in page


def test_results_have_the_last_line_of_each_case_in_the_file_of_its_card() -> None:
    for file in RESULTS.glob("*.jsonl"):
        lines = [json.loads(text) for text in file.read_text().splitlines()]
        measured = [line for line in lines if line.get("gpu")]
        assert keep.last_of_each(measured) == measured, file.name
        assert {keep.file_name(line) for line in measured} <= {file.name}


def test_a_new_run_replaces_the_older_lines_of_its_cases(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    eight = {**STEP, "bs": 8}
    unshown = {**STEP, "bench": "attn"}
    keep.into(results, [write(tmp_path / "a.jsonl", STEP, eight, unshown, {**STEP, "gpu": "NVIDIA H200"})])
    later = {**STEP, "date": "2026-11-23", "p50_us": 1900.0}
    keep.into(results, [write(tmp_path / "b.jsonl", later)])
    assert {file.name for file in results.iterdir()} == {"step-h100.jsonl", "step-h200.jsonl"}
    assert [json.loads(text) for text in (results / "step-h100.jsonl").read_text().splitlines()] == [eight, later]


def test_features_are_a_share_of_the_speed_of_what_they_are_compared_with(tmp_path: Path) -> None:
    line = {**ABOUT, "bench": "features", "model_shape": "8b", "batch": 1, "us": 2000.4, "share_of_greedy": 0.75}
    greedy = {**line, "feature": "greedy", "about": "greedy", "us": 1500.0}
    twice = {**line, "feature": "greedy-twice", "about": "greedy, twice the sequences", "ratio_vs_reference": 0.8}
    cfg = {**line, "feature": "cfg", "about": "CFG", "ratio_vs_reference": 0.9, "reference_name": "greedy-twice"}
    other_card = {**cfg, "gpu": None, "ratio_vs_reference": 0.1}
    wide = {**cfg, "batch": 32, "ratio_vs_reference": 0.7, "target": 0.85, "target_met": False}
    text, _ = tables(write(tmp_path / "features.jsonl", cfg, wide, twice, greedy, other_card))
    assert "| greedy |  | 1,500 us |  |\n| CFG | greedy, twice the sequences | 0.90 | 0.70 (target: 0.85) |" in text
    assert "| greedy, twice the sequences |" not in text.replace("| CFG | greedy, twice the sequences |", "")


def test_http_and_several_gpus_are_compared_with_the_same_run(tmp_path: Path) -> None:
    served = {**ABOUT, "bench": "http", "engine": "8b", "streams": 64, "requests": 256, "new_tokens": 128, "workers": 1}
    served |= {"tok_s": 4414.2, "alone_tok_s": 4480.9, "ratio_median": 0.985, "first_token_ms_p50": 53.4}
    about = {**ABOUT, "bench": "devices", "model_shape": "8b", "batch": 1}
    one = {**about, "topology": "1", "ctx": 256, "tok_s": 585.0, "share_of_one": 1.0}
    two = {**one, "topology": "tp 2", "tok_s": 710.0, "share_of_one": 1.2136}
    large = {**two, "model_shape": "70b", "tok_s": 145.0, "share_of_one": 1.51}
    prompt = {**about, "topology": "split 2", "tokens": 2048, "tok_s": 36e3, "share_of_one": 1.0}
    short = {**prompt, "tokens": 512, "tok_s": 22e3}
    waiting = {**served, "prompt_wait_ms": 50.0, "strict": False, "tok_s": 6000.0}
    text, _ = tables(write(tmp_path / "a.jsonl", served, waiting, one, large, two, prompt, short))
    assert "| H100, 8b, 64, 256, 128 | 4,414 | 4,481 | 0.98 | 53 |" in text
    assert "| H100, 8b, not strict, prompts wait 50 ms, 64, 256, 128 | 6,000 | 4,481 | 0.98 | 53 |" in text
    assert "| card, Llama at 4.0 bpw | split 2: tok/s / of one card | tp 2: tok/s / of one card |" in text
    rows = (
        "8B, 1 sequence |  | 710 / 1.21",
        "8B, prompt of 512 | 22,000 / 1.00 | ",
        "8B, prompt of 2,048 | 36,000 / 1.00 | ",
    )
    assert "\n".join(f"| H100, {row} |" for row in (*rows, "70B, 1 sequence |  | 145 / 1.51 (target: 1.60)")) in text


def test_matmuls_alone_are_kept_and_shown_by_shape(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    line = {**ABOUT, "gpu": SM_80, "bench": "gemv", "bits": "4", "m": 1, "us_plain": 29.0, "us_pdl": 29.0}
    up = {**line, "shape": "gateup", "us_packed": 27.12, "pct_of_read_roof": 71.0}
    up |= alone_keys(SM_80, "gateup", "4", 1, 0.71)
    head = {**line, "shape": "head", "pct_of_read_roof": 86.0, **alone_keys(SM_80, "head", "4", 1, 0.86)}
    wide, eight = {**up, "shape": "gateup", "bits": "5"}, {**up, "m": 8}
    roof = {**ABOUT, "gpu": SM_80, "bench": "roof", "gbps": 3000.0}
    keep.into(results, [write(tmp_path / "a.jsonl", up, head, wide, eight, roof)])
    kept = results / "gemv-h100-code-for-sm_80.jsonl"
    assert [json.loads(text) for text in kept.read_text().splitlines()] == [up, head, wide, eight]
    assert list(results.iterdir()) == [kept]
    text, _ = tables(kept)
    assert "| gate+up | 27.1 / 71 % (target: 80 %) |\n| head | 29.0 / 86 % |" in text
    assert alone_keys(SM_80, "down", "4", 1, 0.1) == alone_keys(SM_80, "head", "4", 2, 0.1) == {}
    assert alone_keys("NVIDIA H100", "head", "4", 1, 0.1) == {}


def test_the_code_for_sm_80_has_targets_of_its_own() -> None:
    found = {case: bar.keys(SM_80, 2999.0, 0.5199) for case, bar in BARS.items()}
    tiny = found.pop(("tinyllama", "4.0", "fp16", 256, 1))
    assert tiny == {}, "no target was set for it"
    assert not any(keys["target_met"] for keys in found.values())
    shares = {case[1:4]: keys["target_share"] for case, keys in found.items() if "target_share" in keys}
    assert shares == {
        ("4.0", "fp16", 256): 0.62,
        ("gptq4", "fp16", 256): 0.62,
        ("3.0", "fp16", 256): 0.52,
        ("4.0", "fp16", 16384): 0.62,
        ("4.0", "q4", 16384): 0.52,
    }
    speeds = {case[4]: keys["target_tok_s"] for case, keys in found.items() if "target_tok_s" in keys}
    assert speeds == {8: 3000, 32: 7000, 64: 9000}
    one, eight = (BARS["8b", "4.0", "fp16", 256, count] for count in (1, 8))
    assert one.keys(SM_80, 0.0, 0.62) == {"target_share": 0.62, "target_met": True}
    assert eight.keys(SM_80, 3000.0, 0.1) == {"target_tok_s": 3000, "target_met": True}
    assert one.keys("NVIDIA H200, code for sm_80", 0.0, 0.1) == {}
    assert {tokens: bar.keys(SM_80, 3e4)["target_met"] for tokens, bar in PREFILL_BARS.items()} == {
        2048: False,
        8192: True,
    }
    assert PREFILL_BARS[8192].keys("NVIDIA H200", 1.0) == {}


def test_kept_lines_have_the_targets_of_the_bars() -> None:
    """A bar that changes also changes in the lines: the page shows which targets they miss."""
    for file in RESULTS.glob("*-code-for-sm_80.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            if line["bench"] == "step" and not line.get("apart"):
                bar = BARS.get(tuple(line[key] for key in ("model_shape", "bpw", "cache", "ctx", "bs")))
                speed = line.get("generator_tok_s", line["tok_s"])
                share = speed / line["bs"] * line["bytes_per_step"] / (line["roof_gb_s"] * 1e9)
            elif line["bench"] == "prefill" and not line.get("strict") and not line.get("past"):
                bar, speed, share = PREFILL_BARS.get(line["tokens"]), line["tok_s"], None
            else:
                continue
            told = {key: line[key] for key in ("target_share", "target_tok_s", "target_met") if key in line}
            assert told == ({} if bar is None else bar.keys(line["gpu"], speed, share)), line


def test_targets_that_a_step_misses_are_shown(tmp_path: Path) -> None:
    share = {**STEP, "target_met": False, "target_share": 0.68}
    speed = {**STEP, "bs": 8, "target_met": False, "target_tok_s": 4000, "target_share": 0.4}
    text, _ = tables(write(tmp_path / "a.jsonl", share, speed, {**STEP, "bs": 32, "target_met": True}))
    assert "| 8B, 1 sequence | 2,000 / 490 / 50 % (target: 68 %) |" in text
    assert "| 8B, 8 sequences | 2,000 / 490 / 50 % (target: 4,000 tok/s) |" in text
    assert "| 8B, 32 sequences | 2,000 / 490 / 50 % |" in text
