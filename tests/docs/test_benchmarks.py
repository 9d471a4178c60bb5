"""Every benchmark that needs no GPU still runs: at its smallest size, and without a look at its speeds."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from preloaded import run

from exl_kernels.device import cuda_status

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TESTS = FOLDER.parent / "tests"
NEED_A_GPU = {"attn", "devices", "families", "gemv", "lora", "prefill", "roof", "serve", "step"}


class Case(NamedTuple):
    """A run of a benchmark: its command, and what its lines have.

    figures: the first is of its first line, the last of its last line; each is a number above 0.
    bars: how many it reports on standard error.
    """

    command: str
    lines: int
    figures: tuple[str, ...]
    bars: int = 0


HTTP = "bench_http --paced --streams 2 --requests 4 --new 4 --prompt 80 --rounds 1"
BARS = "bench_bars --share 0.02 --seconds 2"
QUICK = (
    Case(HTTP, 1, ("tok_s", "host_ms_p50"), bars=6),
    Case(f"{HTTP} --load --prompt-cost --prompt-wait-ms 20", 1, ("tok_s", "prompt_wait_ms"), bars=4),
    Case("bench_long_prompt --paced --streams 2 --tokens 2500 --quiet 0.1", 1, ("first_token_s", "prefill_tok_s"), 1),
    Case("bench_draft --new 4 --rounds 1", 5, ("tokens_per_s", "tokens_per_s")),
    Case("soak_generate --requests 12", 1, ("computed_tokens",)),
    Case("bench_http --host --streams 2 --new 8 --rounds 1", 1, ("host_us", "decode_us")),
    Case("bench_worker --streams 2 --tokens 4 --rounds 1", 1, ("bytes_per_token",)),
    Case("bench_prompt_wait --streams 6 --wait-ms 0 20 --requests 2", 2, ("tok_s", "prompt_wait_ms")),
    Case(f"{BARS} wire queue", 4, ("figure", "figure"), bars=4),
)
LONG = (
    Case("bench_host --active 2 --queued 0 --cached-pages 2 --steps 3 --vocab 300", 6, ("us",)),
    Case("bench_sampling --width 300 --rows 1", 22, ("us", "us")),
    Case(f"{BARS} streams start lag hostile health", 9, ("figure",), bars=9),
    Case("bench_cpu --quick --bits --threads 1", 8, ("gb_s", "gb_s")),
    Case("bench_cpu_ops --quick", 32, ("roof_gb_s", "us")),
    Case("bench_convert --shape tiny --option=--fast", 1, ("seconds", "peak_gib")),
    Case(
        f"bench_convert_quality {TESTS}/golden/data/pylib-4m-fp16 --text {FOLDER}/bench_gemv.py --option=--fast",
        2,
        ("perplexity", "kl"),
    ),
    Case("bench_load --gigabytes 0.01 --runs 1", 1, ("load_s",)),
    Case("bench_ngram --files 2 --most 4 --max-ngram 4", 18, ("append_ns", "speed")),
    Case("bench_queueing --family llama3-8b --tokens 16 --layers 2 --rounds 2", 1, ("us_per_pass",)),
)


def check(case: Case) -> None:
    name, *given = case.command.split()
    if name == "bench_queueing" and (shutil.which("cc") is None or not cuda_status().built_with_cuda):
        pytest.skip("needs a C compiler, and a build with CUDA kernels to plan launches for")
    done = run([str(FOLDER / f"{name}.py"), *given])
    text = done.stdout + done.stderr
    # A missed bar is 1, as is an error: speeds mean nothing here.
    assert done.returncode in ((0, 1) if case.bars else (0,)), text
    assert "Traceback" not in text, text
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == case.lines, text
    assert lines[0][case.figures[0]] > 0, text
    assert lines[-1][case.figures[-1]] > 0, text
    assert len(re.findall(r": (?:met|MISSED)$", done.stderr, re.MULTILINE)) == case.bars, text


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.command)
def test_a_quick_benchmark_prints_its_lines(case: Case) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.command)
def test_a_benchmark_prints_its_lines(case: Case) -> None:
    check(case)


def test_every_benchmark_is_run_by_a_test() -> None:
    run_here = {case.command.split()[0] for case in (*QUICK, *LONG)}
    elsewhere = "".join(path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__))
    for path in sorted((*FOLDER.glob("bench_*.py"), *FOLDER.glob("soak_*.py"))):
        on_gpus = path.stem.removeprefix("bench_") in NEED_A_GPU
        assert on_gpus or path.stem in run_here or f"{path.stem}.py" in elsewhere, f"no test runs {path.name}"
