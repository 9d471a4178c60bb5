"""`generate()` and `Settings` reject wrong arguments by name, and the generator continues to work."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_generate import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)
from exl_generate.bundled import draft_model_dir
from exl_generate.errors import RequestError


@pytest.fixture(scope="module")
def generator() -> ExLlamaV2DynamicGenerator:
    config = ExLlamaV2Config(str(draft_model_dir()))
    model = ExLlamaV2(config)
    cache = ExLlamaV2Cache(model, max_seq_len=512, lazy=True)
    model.load_autosplit(cache)
    return ExLlamaV2DynamicGenerator(model, cache, ExLlamaV2Tokenizer(config))


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": "x"},
        {"seed": 1.5},
        {"gen_settings": {"top_k": 3}},
        {"gen_settings": [3]},
        {"stop_conditions": 3},
        {"stop_conditions": 3.5},
        {"stop_conditions": b"ab"},
        {"stop_conditions": "text"},
        {"banned_strings": 3},
        {"filters": 3},
        {"abort_event": 3},
        {"prompt": "\ud800"},
        {"prompt": ["fine", 3]},
        {"max_new_tokens": 1.5},
        {"min_new_tokens": 5},
        {"stop_conditions": [10**6]},
    ],
    ids=str,
)
@pytest.mark.covers("generators: generate-prompts", "generators: job-checks")
def test_generate_refuses_by_name(generator: ExLlamaV2DynamicGenerator, wrong: dict[str, Any]) -> None:
    arguments = {"prompt": ["Once"] if wrong.get("gen_settings") == [3] else "Once", "max_new_tokens": 4} | wrong
    with pytest.raises(RequestError):
        generator.generate(**arguments)
    assert generator.num_remaining_jobs() == 0
    assert generator.generate("Once upon", max_new_tokens=2, seed=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 2.5},
        {"token_repetition_range": 1.5},
        {"token_repetition_decay": 0.5},
        {"dry_allowed_length": 2.5},
        {"mirostat": "yes"},
        {"temperature_last": 3},
        {"post_sampling_hooks": [3]},
        {"temperature": float("nan")},
    ],
    ids=str,
)
def test_settings_refuse_by_name(generator: ExLlamaV2DynamicGenerator, wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        generator.generate("Once", max_new_tokens=2, gen_settings=ExLlamaV2Sampler.Settings(**wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        {"cache": None},
        {"model": None},
        {"tokenizer": None},
        {"page_size": 0},
        {"page_size": 2.5},
        {"max_q_size": "a"},
        {"max_q_size": 0},
        {"max_batch_size": "many"},
        {"max_seq_len": 0},
        {"max_chunk_size": 0.5},
        {"use_ngram_draft": True, "num_draft_tokens": "4"},
        {"use_ngram_draft": True, "max_ngram": None},
        {"max_sampling_threads": -1},
        {"min_sampling_threads": "x"},
        {"draft_cache": 4, "draft_model": 3},
    ],
    ids=str,
)
@pytest.mark.covers("generators: dynamic-construction")
def test_generators_refuse_by_name(generator: ExLlamaV2DynamicGenerator, wrong: dict[str, Any]) -> None:
    parts: dict[str, Any] = {"model": generator.model, "cache": generator.cache, "tokenizer": generator.tokenizer}
    with pytest.raises(RequestError, match=next(iter(reversed(wrong)))):
        ExLlamaV2DynamicGenerator(**(parts | wrong))
    for kind in (ExLlamaV2BaseGenerator, ExLlamaV2StreamingGenerator):
        with pytest.raises(RequestError, match="cache"):
            kind(generator.model, None, generator.tokenizer)  # type: ignore[arg-type]


@pytest.mark.covers("generators: generate-results")
def test_an_abort_after_the_last_token_removes_nothing(generator: ExLlamaV2DynamicGenerator) -> None:
    event = threading.Event()

    def hook(result: Any) -> None:
        seen.append(int(result.sampled_token))
        if len(seen) == 3:
            event.set()

    for new, whole in ((3, True), (4, False)):
        seen: list[int] = []
        event.clear()
        settings = ExLlamaV2Sampler.Settings(post_sampling_hooks=[hook])
        text = generator.generate("Once upon", new, gen_settings=settings, abort_event=event)
        assert (text is not None) == whole


class NoPieces:
    """A tokenizer without the text of its ids."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        if name == "get_id_to_piece_list":
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


def test_parts_without_a_member_of_their_protocol_are_refused(generator: ExLlamaV2DynamicGenerator) -> None:
    model, cache, tokenizer = generator.model, generator.cache, generator.tokenizer
    with pytest.raises(RequestError, match="tokenizer is a NoPieces, which has no get_id_to_piece_list"):
        ExLlamaV2DynamicGenerator(model, cache, NoPieces(tokenizer))
    with pytest.raises(RequestError, match="tokenizer is None"):
        ExLlamaV2DynamicGenerator(model, cache, None)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="cache is a ExLlamaV2Tokenizer, which has no"):
        ExLlamaV2DynamicGenerator(model, tokenizer, tokenizer)  # type: ignore[arg-type]
    for wrong in (None, 3, model):
        with pytest.raises(RequestError, match="cache is"):
            ExLlamaV2BaseGenerator(model, wrong, tokenizer)  # type: ignore[arg-type]
