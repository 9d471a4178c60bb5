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
    """A row: options, seconds of the run that other programs disturbed least, and GiB."""
    runs = [one for one in lines("convert") if (one["shape"], one["options"]) == (line["shape"], line["options"])]
    seconds, peak = min(one["seconds"] for one in runs), max(one.get("peak_gib", 0) for one in runs)
    return f"| `{line['options']}` | {seconds:.0f} | {peak:.1f} |"


def test_the_table_of_quality_has_the_measured_figures() -> None:
    assert table("| conversion |") == [quality(line) for line in lines("convert_quality")]


def test_the_table_of_time_and_memory_has_the_measured_figures() -> None:
    tiny = {line["options"]: cost(line) for line in lines("convert") if line["shape"] == "tinyllama"}
    assert table("| TinyLlama |") == list(tiny.values())


def test_the_memory_for_a_large_head_is_the_measured_one() -> None:
    (line,) = [line for line in lines("convert") if line["shape"] == "8b"]
    assert f"{line['peak_gib']:.1f} GiB for two layers and the head of Llama 3.1 8B" in GUIDE
