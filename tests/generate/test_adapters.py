"""Adapters per job: the right one for every token and page, batches by set, switches while the queue is busy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from exl_generate import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
    RequestError,
)
from exl_generate.testing import (
    ScriptedCache,
    ScriptedConfig,
    ScriptedLora,
    ScriptedModel,
    check_pages,
    drain,
    streamed_tokens,
)
from exl_generate.testing.small import TOKENIZER, VOCAB, ids, job, make, naive, run, speculate

Settings = ExLlamaV2Sampler.Settings
A, B = ScriptedLora(1), ScriptedLora(2)
SETS: list[list[ScriptedLora]] = [[], [A], [B], [A, B], [B, A]]
PROMPT = "abcdefgh" * 6


@pytest.mark.covers("generators: adapters-per-job", "generators: page-names", "core: lora")
def test_each_job_runs_under_its_own_adapters() -> None:
    generator = make(cache_tokens=1024)
    jobs = [job(PROMPT, 12, loras=loras) for loras in SETS * 2]
    generator.enqueue(jobs)
    results = drain(generator)
    check_pages(generator)
    outputs = [tuple(streamed_tokens(results[one])) for one in jobs]
    assert outputs == [tuple(naive(generator, ids(PROMPT)[0].tolist(), 12, loras)) for loras in SETS * 2]
    assert len(set(outputs)) == len(SETS), "the order of adapters counts"


@pytest.mark.parametrize("mixable", [True, False])
def test_jobs_share_a_pass(mixable: bool) -> None:
    """All, where rows may have adapters of their own; else those with the same."""
    generator = make(cache_tokens=1024)
    adapters = ScriptedLora(1), ScriptedLora(2)
    for adapter in adapters:
        adapter.mixable = mixable
    jobs = [job("abc", 6, loras=[adapters[i % 2]]) for i in range(6)]
    generator.enqueue(jobs)
    generator.iterate()
    model: Any = generator.model
    model.calls.clear()
    generator.iterate()
    assert [(batch, q) for batch, q, _ in model.calls] == ([(6, 1)] if mixable else [(3, 1), (3, 1)])


@pytest.mark.parametrize(("alike", "passes"), [(None, [(6, 1)]), (6, [(6, 1)]), (5, [(3, 1), (3, 1)])])
def test_jobs_with_other_adapters_share_no_pass_that_depends_on_its_size(
    alike: int | None, passes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = make(cache_tokens=1024)
    adapters = ScriptedLora(1), ScriptedLora(2)
    for adapter in adapters:
        adapter.mixable = True
    generator.enqueue([job("abc", 6, loras=[adapters[i % 2]]) for i in range(6)])
    generator.iterate()
    model: Any = generator.model
    monkeypatch.setattr(model, "invariant_tokens", lambda: alike)
    model.calls.clear()
    generator.iterate()
    assert [(batch, q) for batch, q, _ in model.calls] == passes


@pytest.mark.covers("generators: dynamic-warmup-reset", "generators: adapters-per-job")
def test_a_change_of_adapters_never_finds_the_pages_of_others() -> None:
    """Pages made under one adapter are not used under another."""
    generator = make()
    for loras, cached in (([], 0), ([A], 0), ([B], 0), ([A], 47), ([], 47), ([A, B], 0)):
        generator.set_loras(loras)
        results = run(generator, job(PROMPT, 5))
        assert results[-1]["cached_tokens"] == cached
        assert streamed_tokens(results) == naive(generator, ids(PROMPT)[0].tolist(), 5, loras)


@pytest.mark.covers("generators: adapters-per-job")
def test_the_generators_adapters_may_change_while_jobs_run() -> None:
    generator = make(max_batch_size=2)
    prompt = ids(PROMPT)[0].tolist()
    jobs: list[ExLlamaV2DynamicJob] = []
    for loras in (None, A, [B], [A, B]):
        generator.set_loras(loras)
        jobs.append(job(PROMPT, 7))
        generator.enqueue(jobs[-1])
        generator.iterate()
    results = drain(generator)
    for one, loras in zip(jobs, ([], [A], [B], [A, B]), strict=True):
        tail = naive(generator, prompt, 7, loras)
        assert tail[-len(streamed_tokens(results[one])) :] == streamed_tokens(results[one])
        assert one.full_completion == "".join(one.piece(token) for token in tail)


@pytest.mark.parametrize("how", ["ngram", "model"])
def test_guesses_do_not_see_adapters_and_do_not_matter(how: str) -> None:
    generator = speculate(how)
    results = run(generator, job(PROMPT, 30, loras=[A]))
    assert streamed_tokens(results) == naive(generator, ids(PROMPT)[0].tolist(), 30, [A])


def test_a_value_that_is_no_adapter_is_refused() -> None:
    for wrong in ("folder", ["folder"], [None], [3], [A, A], object()):
        with pytest.raises(RequestError, match="loras"):
            job("abc", loras=wrong)
        with pytest.raises(RequestError, match="loras"):
            make().set_loras(wrong)


@pytest.mark.covers("generators: adapters-per-job")
def test_scaled_adapters_are_different_ones() -> None:
    generator = make()
    one, other = ScriptedLora(1, 1.0), ScriptedLora(1, 0.5)
    assert generator.namespace_of([one]) != generator.namespace_of([other])
    assert generator.namespace_of([one]) == generator.namespace_of([one])


# ---- base and streaming generator ----


@pytest.mark.covers("generators: adapters-one-or-list", "generators: stream-prefix-reuse")
def test_base_and_streaming_generators_take_one_adapter_or_a_list() -> None:
    model = ScriptedModel(ScriptedConfig(vocab_size=VOCAB, max_seq_len=256))
    parts = (model, ScriptedCache(model, max_seq_len=256), TOKENIZER)
    base, stream = ExLlamaV2BaseGenerator(*parts), ExLlamaV2StreamingGenerator(*parts)
    prompt = ids(PROMPT)[0].tolist()
    pieces = TOKENIZER.get_id_to_bytes_list()
    for given, meant in ((None, []), (A, [A]), ([A], [A]), ([A, B], [A, B]), ([], [])):
        context = list(prompt)
        for _ in range(8):
            context.append(int(model.logits(np.array(context), meant).argmax()))
        text = b"".join(pieces[i] for i in context[len(prompt) :]).decode(errors="replace")
        assert base.generate_simple(PROMPT, Settings.greedy(), 8, loras=given, completion_only=True) == text
        stream.begin_stream_ex(ids(PROMPT), Settings.greedy(), loras=given)
        got = [int(i) for _ in range(8) for i in stream.stream_ex()["chunk_token_ids"][0]]
        assert got == context[len(prompt) : len(prompt) + len(got)]
        assert len(got) >= 5  # ids of characters that are not complete yet come later
