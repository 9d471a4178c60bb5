"""benchmarks/bench_features.py with the bundled model: it checks tokens, and prints lines and a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from preloaded import run

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_features.py"
KEYS = {
    "ms_p50",
    "ms_p10",
    "ms_p90",
    "tok_s",
    "bytes_per_step",
    "gbps",
    "host_us",
    "nodes",
    "ctx",
    "bs",
    "cache",
    "bpw",
}


def measure(folder: Path, *words: str) -> tuple[list[dict[str, Any]], str]:
    done = run([str(SCRIPT), "--shape", "bundled", "--quick", "--folder", str(folder), *words])
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    lines = [json.loads(line) for line in said if line.startswith("{")]
    return lines, "\n".join(said[len(lines) :])


def test_features_are_measured_with_greedy_steps(tmp_path: Path) -> None:
    lines, table = measure(tmp_path, "--batch", "2", "--feature", "chat", "cfg", "lora-half", "ngram")
    found = {line["feature"]: line for line in lines}
    assert list(found) == ["greedy", "chat", "greedy-twice", "cfg", "lora-half", "ngram"]
    assert all(line["bench"] == "features" and line.keys() >= KEYS for line in lines)
    assert all(line["us"] > 0 and line["share_of_greedy"] > 0 for line in lines)
    assert found["cfg"]["reference_name"] == "greedy-twice"
    assert found["chat"]["candidates"] > found["chat"]["candidates_peaked"]
    assert found["lora-half"]["bytes_per_step"] > found["greedy"]["bytes_per_step"]
    assert all(name in table for name in found)


@pytest.mark.full
def test_every_feature_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="extra `grammar`")
    lines, _ = measure(tmp_path, "--batch", "1", "4")
    assert {"draft-model", "q4", "top-20", "strings", "lora-four", "regex"} <= {line["feature"] for line in lines}
    assert {line["feature"] for line in lines if line["batch"] == 1}.isdisjoint({"lora-four", "lora-half"})
