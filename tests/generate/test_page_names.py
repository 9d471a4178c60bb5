"""Labels of cached pages mean the same in every process, and another thing for all that computes other K/V."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Cache_Q4, ExLlamaV2Cache_TP, ExLlamaV2Config, Intervention
from exl_core import ExLlamaV2Tokenizer as Tokenizer
from exl_generate import ExLlamaV2DynamicGenerator
from exl_generate.testing import ScriptedCache, ScriptedConfig, ScriptedLora, ScriptedModel
from exl_generate.testing.small import PAGE, TOKENIZER, VOCAB, job, make, run

FOLDER = Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5"
PROMPT = "def main(argv):\n    import os, sys\n    return the number of lines in a file\n" * 2

REPORT = f"""
import json, os
os.environ["EXL_DEVICE"] = "cpu"
from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.testing import small
model = ExLlamaV2(ExLlamaV2Config({str(FOLDER)!r}))
model.load()
tokenizer = ExLlamaV2Tokenizer(model.config)
def labels(made, ids, salt=b""):
    style = ExLlamaV2Sampler.Settings.greedy()
    made.enqueue(ExLlamaV2DynamicJob(ids, 2, gen_settings=style, cache_salt=salt))
    while made.num_remaining_jobs():
        made.iterate()
    return sorted(page.label.hex() for page in made.all_pages if page.label)
def real(salt=b""):
    made = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=512), tokenizer, page_size=16)
    return labels(made, tokenizer.encode({PROMPT!r}), salt)
found = [real(), real(b"one"), labels(small.make(), small.ids("abcdefgh" * 6))]
print(json.dumps(found))
"""


def report() -> list[list[str]]:
    done = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, check=True)
    found: list[list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.full
def test_two_processes_name_their_pages_alike() -> None:
    first, second = report(), report()
    assert first == second
    assert all(len(labels) >= 2 for labels in first)
    assert len({label for labels in first for label in labels}) == sum(map(len, first)), "by model and by salt"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ExLlamaV2:
    monkeypatch.setenv("EXL_DEVICE", "cpu")
    model = ExLlamaV2(ExLlamaV2Config(FOLDER))
    model.load()
    return model


def namespace(model: ExLlamaV2, cache: Any) -> bytes:
    return ExLlamaV2DynamicGenerator(model, cache, Tokenizer(model.config), page_size=16).namespace_of(())


def test_the_format_of_the_cache_counts(model: ExLlamaV2) -> None:
    caches = [
        ExLlamaV2Cache(model, max_seq_len=64),
        ExLlamaV2Cache_Q4(model, max_seq_len=64),
        ExLlamaV2Cache_TP(model, max_seq_len=64),
        ExLlamaV2Cache_TP(model, base=ExLlamaV2Cache_Q4, max_seq_len=64),
    ]
    assert len({namespace(model, cache) for cache in caches}) == len(caches)
    assert namespace(model, caches[0]) == namespace(model, ExLlamaV2Cache(model, max_seq_len=128))


def test_a_hook_that_was_there_before_the_generator_counts(model: ExLlamaV2) -> None:
    plain, inner = namespace(model, ExLlamaV2Cache(model, max_seq_len=64)), model.modules[3]
    found = {plain}
    for by in (1, 7):
        model.modules[3] = Intervention(inner, post_forward=lambda state, step, by=by: state.roll(by, -1))  # type: ignore[misc]
        found.add(namespace(model, ExLlamaV2Cache(model, max_seq_len=64)))
    assert len(found) == 3
    model.modules[3] = inner
    assert namespace(model, ExLlamaV2Cache(model, max_seq_len=64)) == plain


def test_names_after_a_change_of_modules_are_the_generators_own() -> None:
    """Both have met one change, and neither knows which the other's was."""
    plain = make().namespace_of(())
    found = {plain}
    for _ in range(2):
        made: Any = make()
        assert made.namespace_of(()) == plain
        made.model.arrangement = []
        run(made, job("abc", 2))
        found.add(made.namespace_of(()))
    assert len(found) == 3


def test_adapters_are_named_by_content_order_and_scale() -> None:
    made = make()
    sets = [[], [ScriptedLora(1)], [ScriptedLora(2)], [ScriptedLora(1), ScriptedLora(2)]]
    sets += [[ScriptedLora(2), ScriptedLora(1)], [ScriptedLora(1, 0.5)]]
    assert len({made.namespace_of(loras) for loras in sets}) == len(sets)
    assert made.namespace_of([ScriptedLora(1)]) == made.namespace_of(sets[1])


def test_an_adapter_that_is_loaded_again_finds_its_pages() -> None:
    made = make()
    found = [run(made, job("abcdefgh" * 6, 4, loras=[ScriptedLora(seed)])) for seed in (1, 2, 1)]
    assert [results[-1]["cached_tokens"] for results in found] == [0, 0, 47]


def test_the_config_of_a_scripted_model_counts() -> None:
    def root(**sizes: Any) -> bytes:
        model = ScriptedModel(ScriptedConfig(vocab_size=VOCAB, **sizes))
        cache = ScriptedCache(model, max_seq_len=64)
        return ExLlamaV2DynamicGenerator(model, cache, TOKENIZER, page_size=PAGE).namespace_of(())

    assert root() == root()
    assert root() != root(max_seq_len=256)
