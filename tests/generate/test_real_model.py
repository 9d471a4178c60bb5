"""The whole way of a request on models that exllamav2 itself converted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from effort import trials

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_TP,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
)
from exl_filters import ExLlamaV2SelectFilter
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.bundled import default_model_dir, draft_model_dir
from exl_generate.testing import AsAsked, drain, streamed_text, streamed_tokens

DATA = Path(__file__).parents[1] / "golden" / "data"
GOLDEN = json.loads((DATA / "golden.json").read_text())
NAMES = {"tiny": "pylib-4m-fp16", "exl2-3.5": "pylib-4m-exl2-3.5", "exl2-4.5": "pylib-4m-exl2-4.5"}
Settings = ExLlamaV2Sampler.Settings


def load(name: str, matmul: str = "exact") -> ExLlamaV2DynamicGenerator:
    config = ExLlamaV2Config(str(DATA / name))
    config.cpu_matmul = matmul
    model = ExLlamaV2(config)
    model.load()
    return ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=1024), ExLlamaV2Tokenizer(config))


@pytest.fixture(scope="module")
def generator() -> ExLlamaV2DynamicGenerator:
    return load("pylib-4m-exl2-4.5", "int8")


@pytest.mark.parametrize("key", sorted(NAMES))
def test_greedy_continuation_equals_the_reference(key: str) -> None:
    """exllamav2's own greedy continuation: at least 24 tokens of it, all 96 where its margins are clear."""
    generator = load(NAMES[key])
    new = 35 if key == "tiny" else 96
    text = generator.generate(GOLDEN["greedy_prompt"], new, gen_settings=Settings.greedy(), add_bos=True)
    assert GOLDEN["greedy_96_tokens"][key].startswith(text)
    assert key == "tiny" or GOLDEN["greedy_96_tokens"][key] == text


def test_streamed_text_is_the_one_shot_text_and_the_tokenizers(generator: ExLlamaV2DynamicGenerator) -> None:
    tokenizer = generator.tokenizer
    for seed in range(trials(8, 3)):
        job = ExLlamaV2DynamicJob(tokenizer.encode("import", add_bos=True), 60, seed=seed, stop_conditions=["\n\n\n"])
        generator.enqueue(job)
        results = drain(generator)[job]
        text = streamed_text(results)
        once = generator.generate(
            "import", 60, seed=seed, add_bos=True, stop_conditions=["\n\n\n"], completion_only=True
        )
        assert text == once == results[-1]["full_completion"]
        if results[-1]["eos_reason"] == "max_new_tokens":
            table = tokenizer.get_id_to_bytes_list()
            assert text == b"".join(table[t] for t in streamed_tokens(results)).decode(errors="replace")


@pytest.mark.covers("generators: filter-prefix")
def test_select_filter(generator: ExLlamaV2DynamicGenerator) -> None:
    options = ["return True", "return None", "raise ValueError"]
    filters = [ExLlamaV2SelectFilter(generator.model, generator.tokenizer, options)]
    flat = Settings(temperature=3.0, top_p=0, top_k=0)
    prompts = ["def f(x):\n    "] * 6
    texts = generator.generate(prompts, 20, seed=1, gen_settings=flat, filters=[filters] * 6, completion_only=True)
    assert set(texts) <= set(options)
    assert len(set(texts)) > 1


@pytest.mark.covers("core: tensor-parallel")
@pytest.mark.parametrize("base", [ExLlamaV2Cache, ExLlamaV2Cache_Q4])
def test_a_model_split_over_devices_gives_the_same_text(monkeypatch: pytest.MonkeyPatch, base: Any) -> None:
    """Several prompts with a common beginning, pages shared and copied, over three logical devices and over one."""
    prompts = [f"import os\n\ndef f{i}(" for i in (1, 12, 123)]
    texts = []
    for shares in (None, [3.0, 8.0, 5.0]):
        monkeypatch.setenv("EXL_DEVICE", "cpu:0,cpu:1,cpu:2")
        model = ExLlamaV2(ExLlamaV2Config(str(DATA / "pylib-4m-exl2-3.5")))
        model.load() if shares is None else model.load_tp(shares)
        cache = base(model, max_seq_len=1024) if shares is None else ExLlamaV2Cache_TP(model, base, max_seq_len=1024)
        generator = ExLlamaV2DynamicGenerator(model, cache, ExLlamaV2Tokenizer(model.config))
        once = generator.generate(prompts, 24, seed=7)
        texts.append((once, generator.generate(prompts[1], 40, seed=7)))
        if shares is not None:
            assert model.tp_context is not None
    assert texts[0] == texts[1]


def test_many_prompts_in_a_small_cache(generator: ExLlamaV2DynamicGenerator) -> None:
    prompts = [f"x = {i}\ndef f{i}(" for i in range(12)]
    greedy = Settings.greedy()
    together = generator.generate(prompts, 16, gen_settings=greedy)
    assert together == [generator.generate(prompt, 16, gen_settings=greedy) for prompt in prompts]


@pytest.fixture(scope="module")
def bundled() -> dict[str, ExLlamaV2DynamicGenerator]:
    """The bundled model without guesses, with its draft model, and with n-grams."""

    def read(folder: Path) -> ExLlamaV2:
        model = ExLlamaV2(ExLlamaV2Config(folder))
        model.load()
        return model

    model, draft = read(default_model_dir()), read(draft_model_dir())
    tokenizer = ExLlamaV2Tokenizer(model.config)
    kinds: dict[str, dict[str, Any]] = {
        "none": {},
        "model": {"draft_model": draft, "draft_cache": ExLlamaV2Cache(draft, max_seq_len=2048)},
        "ngram": {"use_ngram_draft": True},
    }
    generators = {
        name: ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=2048), tokenizer, **kw)
        for name, kw in kinds.items()
    }
    for generator in generators.values():  # also where guesses cost more time than they save
        generator.drafter.length = AsAsked(generator.num_draft_tokens)
    return generators


@pytest.mark.parametrize("style", ["greedy", "default"])
@pytest.mark.covers("generators: draft-model", "generators: ngram-drafts")
def test_speculation_on_the_bundled_model_changes_nothing_but_the_number_of_passes(
    bundled: dict[str, ExLlamaV2DynamicGenerator], style: str
) -> None:
    prompts = ["Once upon a time, a small fox", "One rainy day,", "The old bear"]
    settings = Settings.greedy() if style == "greedy" else Settings()
    told = {}
    for kind, generator in bundled.items():
        texts, last = generator.generate(
            prompts, 80, seed=5, gen_settings=settings, add_bos=True, stop_conditions=["\n"], return_last_results=True
        )
        told[kind] = texts
        if kind != "none":
            accepted = sum(r["accepted_draft_tokens"] for r in last)
            assert accepted > (0.3 if kind == "model" else 0.02) * sum(r["new_tokens"] for r in last)
    assert told["none"] == told["model"] == told["ngram"]
