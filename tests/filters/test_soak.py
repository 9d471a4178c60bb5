"""A share of `benchmarks/soak_filters.py`: random generations on the bundled model's tokenizer, judged one by one."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("llguidance", reason="extra `grammar`")
pytest.importorskip("jsonschema")
SOURCE = Path(__file__).parents[2] / "benchmarks" / "soak_filters.py"


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak_filters", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak_filters"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["soak_filters"]


def test_no_text_leaves_its_language_and_what_is_cut_is_counted(soak):
    lines = list(soak.run(570, seed=1))
    assert sum(line["generations"] for line in lines) == 570
    assert all(line["complete"] + line["cut"] == line["generations"] for line in lines)
    assert all(line["complete"] > 0 for line in lines)
    assert sum(line["cut"] for line in lines) > 0


def test_a_violation_is_noticed(soak):
    v = soak.from_tokenizer_json(str(soak.TOKENIZER))
    f = soak.ExLlamaV2SelectFilter(None, v, ["yes", "no"])
    with pytest.raises(soak.Violation):
        soak.soak("wrong judge", [f], {"yes"}.__contains__, v, 50, soak.np.random.default_rng(0))
