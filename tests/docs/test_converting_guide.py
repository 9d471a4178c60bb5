"""The figures of the guide to conversions are those of benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "guides" / "converting.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results" / "convert-cpu.jsonl"
CALIBRATED = {
    "pylib-4m-exl2-3.5": "EXL2, 3.5 bits, calibrated by exllamav2",
    "pylib-4m-exl2-4.5": "EXL2, 4.5 bits, calibrated by exllamav2",
}
SHAPES = {"tinyllama": "TinyLlama", "8b": "Llama 3.1 8B"}


def lines(bench: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return [line for line in found if line["bench"] == bench]


def table(head: str) -> list[str]:
    """The rows of the table of the guide whose head begins so."""
    return [line for line in GUIDE.partition(head)[2].partition("\n\n")[0].splitlines() if line.startswith("| ")]


def quality(line: dict[str, Any]) -> str:
    """A row: the conversion, KL divergence, perplexity and equal choices."""
    name = CALIBRATED.get(line["model"], "the float model" if not line["kl"] else f"`{line['model']}`")
    return f"| {name} | {line['kl']:.4f} | {line['perplexity']:.2f} | {line['same_choice']:.1%} |"


def cost(line: dict[str, Any]) -> str:
    """A row: shape and options, seconds of the processor and of the clock, and GiB."""
    figures = f"{line['processor_seconds']:.0f} | {line['seconds']:.0f} | {line['peak_gib']:.1f}"
    return f"| {SHAPES[line['shape']]}, `{line['options']}` | {figures} |"


def test_the_table_of_quality_has_the_measured_figures() -> None:
    assert table("| conversion |") == [quality(line) for line in lines("convert_quality")]


def test_the_table_of_time_and_memory_has_the_measured_figures() -> None:
    assert table("| model, options |") == [cost(line) for line in lines("convert")]


def test_a_case_has_one_line_and_the_page_names_its_machine_and_load() -> None:
    measured = lines("convert")
    assert len({(line["shape"], line["layers"], line["options"]) for line in measured}) == len(measured)
    assert {(line["machine"], line["cores"], line["date"]) for line in measured} == {
        ("Intel(R) Xeon(R) Processor", 2, "2026-11-30")
    }
    (commit,) = {line["commit"] for line in measured}
    assert f"Intel Xeon with AVX-512, 2 cores, 30 November 2026, commit {commit} " in GUIDE
    loads = [line["load"] for line in measured]
    assert f"(load average {min(loads):.1f} to {max(loads):.1f})" in GUIDE
    for line in measured:
        assert f"{line['quantized_weights'] / 1e9:.2f} billion" in GUIDE
