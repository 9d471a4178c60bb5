"""Shares of the benchmarks: random generations judged one by one; the speed bench runs, is right and knows its bars."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from effort import trials

pytest.importorskip("llguidance", reason="extra `grammar`")
pytest.importorskip("jsonschema")
SOURCE = Path(__file__).parents[2] / "benchmarks" / "soak_filters.py"


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak_filters", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak_filters"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["soak_filters"]


@pytest.mark.covers("filters: grammars", "filters: combinators")
def test_no_text_leaves_its_language_and_what_is_cut_is_counted(soak):
    lines = list(soak.run(trials(570, 190), seed=1))
    assert sum(line["generations"] for line in lines) == trials(570, 190)
    assert all(line["complete"] + line["cut"] == line["generations"] for line in lines)
    assert all(line["complete"] > 0 for line in lines)
    assert sum(line["cut"] for line in lines) > 0


def test_a_violation_is_noticed(soak):
    v = soak.from_tokenizer_json(str(soak.TOKENIZER))
    f = soak.ExLlamaV2SelectFilter(None, v, ["yes", "no"])
    with pytest.raises(soak.Violation):
        soak.soak("wrong judge", [f], {"yes"}.__contains__, v, 50, soak.np.random.default_rng(0))


@pytest.mark.full
@pytest.mark.covers("filters: costs")
def test_the_speed_bench_checks_itself_and_holds_the_bars(soak):
    """The benchmark states its targets; nothing is timed here."""
    pytest.importorskip("tokenizers")
    done = subprocess.run(
        [sys.executable, SOURCE.with_name("bench_filters.py"), "--tokenizer", soak.TOKENIZER, "--rounds", "1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    bars = {line["bench"]: line["bar"] for line in lines if "bar" in line}
    assert bars["ours: mask"] == "mean <= 60"
    assert bars["ours: mask, 99 of 100"] == "p99 <= 250"
    assert bars["our mask / llguidance's"] == "1.2"
    assert bars["intersection of two masks"] == "mean <= 10"
    assert bars["one step of 64 filters"] == "mean <= 5120"
    assert {"llguidance: mask", "tables of a tokenizer, ms"} <= {line["bench"] for line in lines}
