"""The CPU figures of the documents are those of benchmarks/results."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLED = {
    "default (penalty, temperature, top-k 50, top-p)": "default",
    "every transform, top-k 50": "all",
    "every transform but top-k": "all but top-k",
    "top-p 0.9": "top-p",
    "min-p 0.05, temperature last": "min-p",
}
FILTERED = {
    "mask of a JSON schema": "ours: mask",
    "the same by llguidance alone": "llguidance: mask",
    "feeding a token to it": "ours: feed",
    "Prefix": "prefix next()",
    "Prefix, first time in a state": "prefix next(), first time in a state",
    "Select": "select next()",
    "applying a mask to float32 logits": "apply a mask of 70 % to logits",
    "one step of 64 grammar filters": "one step of 64 filters",
}


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "benchmarks" / "results" / name).read_text().splitlines()]


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without those of its head."""
    text = (ROOT / page).read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    table = re.findall(r"^\| (.*) \|$", text.partition("\n\n|")[2].partition("\n\n")[0], re.MULTILINE)
    return [row.split(" | ") for row in table]


def test_microseconds_of_sampling() -> None:
    us = {(line["settings"], line["logits"]): math.floor(line["us"] + 0.5) for line in lines("sampling-cpu.jsonl")}
    shown = rows("docs/design/sampling.md", "CPU")
    assert len(shown) == 8
    for name, *columns in shown:
        settings = SAMPLED.get(name, name)
        if settings != "typical / TFS":
            assert columns[:2] == [str(us[settings, "model"]), str(us[settings, "flat"])], name


def test_microseconds_of_filters() -> None:
    found = {line["bench"]: line for line in lines("filters-cpu.jsonl") if "bench" in line}
    shown = rows("packages/exl-filters/README.md", "What it costs")
    assert len(shown) == 9
    for name, mean, median in shown:
        line = found[FILTERED.get(name, name)]
        assert (mean, median) == (f"{line['mean']:,}", f"{line['p50']:,}"), name


def test_seconds_of_loading() -> None:
    (line,) = lines("load-cpu.jsonl")
    text = (ROOT / "docs" / "design" / "cpu.md").read_text(encoding="utf-8")
    assert f"in {line['load_s']:.1f} s ({line['gb_per_s']} GB/s)" in text
    assert f"sequential stream takes {line['read_s']:.1f} s" in text
    assert f"weights is {line['peak_rss_beyond_weights_gb']:.2f} GB" in text


@pytest.mark.parametrize("streams", [64, 32])
def test_milliseconds_through_http(streams: int) -> None:
    usual = [d for d in lines("http-h200.jsonl") if not d.keys() & {"prompt_wait_ms", "strict"}]
    (line,) = [d for d in usual if (d["engine"], d["streams"]) == ("8b", streams)]
    text = (ROOT / "docs" / "guides" / "serving.md").read_text(encoding="utf-8")
    steps = [f"{line[key]['median']:.2f}" for key in ("step_ms", "alone_step_ms")]
    assert (f"{steps[0]} instead of {steps[1]} ms" if steps[0] != steps[1] else f"both took {steps[0]} ms") in text
    if line["load"]:
        paced = line["load"]["0.5"]
        http, alone = (paced[way]["first_token_ms_p50"] for way in ("http", "alone"))
        assert f"the median is {http:.0f} ms, and {alone:.0f} ms from the engine alone" in text
