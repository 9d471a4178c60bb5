"""Several generators on one cache: one at a time, each with right tokens, or a typed error from `enqueue`."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from internals import has_redirects

from exl_core import (
    AttentionParams,
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_TP,
    ExLlamaV2CacheBase,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
)
from exl_generate import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
    JobStateError,
)
from exl_generate.bundled import draft_model_dir
from exl_generate.testing import check_pages, drain, streamed_tokens
from exl_generate.testing.scripted import ScriptedCache, ScriptedConfig, ScriptedModel
from exl_generate.testing.small import PAGE, TOKENIZER, VOCAB, ids, job, naive, speculate

Settings = ExLlamaV2Sampler.Settings
GREEDY = Settings.greedy()


def parts() -> tuple[ScriptedModel, ScriptedCache]:
    model = ScriptedModel(ScriptedConfig(vocab_size=VOCAB, max_seq_len=128))
    return model, ScriptedCache(model, max_seq_len=128)


def on(model: ScriptedModel, cache: ScriptedCache, **kw: Any) -> ExLlamaV2DynamicGenerator:
    return ExLlamaV2DynamicGenerator(model, cache, TOKENIZER, page_size=PAGE, **kw)


def tokens(generator: ExLlamaV2DynamicGenerator, text: str, new: int = 12) -> list[int]:
    one = job(text, new)
    generator.enqueue(one)
    results = drain(generator)[one]
    check_pages(generator)
    assert results[-1]["eos_reason"] == "max_new_tokens", results[-1].get("exception")
    return streamed_tokens(results)


@pytest.mark.covers("generators: page-counts", "generators: page-reuse")
def test_taking_turns_is_safe() -> None:
    """The scripted cache fails where K/V of another context is used: a page that another generator has overwritten."""
    model, cache = parts()
    first, second = on(model, cache), on(model, cache)
    long, other = "the quick fox and the lazy dog. " * 2, "some other words, that fill pages " * 2
    for _ in range(3):
        assert tokens(first, long) == naive(first, ids(long)[0].tolist(), 12)
        assert tokens(second, other) == naive(second, ids(other)[0].tolist(), 12)
    assert tokens(second, other) == naive(second, ids(other)[0].tolist(), 12)
    again = job(other, 2)
    second.enqueue(again)
    drain(second)
    assert again.cached_tokens > 30, "a generator that keeps its turn keeps its pages"


@pytest.mark.covers("generators: dynamic-construction", "generators: dynamic-queue")
def test_jobs_of_another_are_a_refusal_that_leaves_nothing() -> None:
    model, cache = parts()
    first, second = on(model, cache), on(model, cache)
    running, refused = job("the fox", 9), job("no", 4)
    first.enqueue(running)
    for _ in range(3):
        with pytest.raises(JobStateError, match="another generator has 1 jobs"):
            second.enqueue(refused)
        with pytest.raises(JobStateError, match="another generator has 1 jobs"):
            second.generate("no", 4)
        assert second.num_remaining_jobs() == 0
        assert refused.serial_number is None
        assert not has_redirects(second)
        first.iterate()
    drain(first)
    assert streamed_tokens_of(second, refused) == naive(second, ids("no")[0].tolist(), 4)
    check_pages(first)


def streamed_tokens_of(generator: ExLlamaV2DynamicGenerator, one: ExLlamaV2DynamicJob) -> list[int]:
    generator.enqueue(one)
    return streamed_tokens(drain(generator)[one])


def test_cancelled_cleared_and_forgotten_generators_block_no_other() -> None:
    model, cache = parts()
    first, second, third = on(model, cache), on(model, cache), on(model, cache)
    one = job("the fox", 9)
    first.enqueue(one)
    first.iterate()
    first.cancel(one)
    second.enqueue(job("abc", 9))
    second.iterate()
    second.clear_queue()
    third.enqueue(job("xyz", 9))
    third.iterate()
    del third
    gc.collect()
    assert tokens(first, "the fox") == naive(first, ids("the fox")[0].tolist(), 12)


def test_a_generator_that_nobody_uses_is_gone_without_a_garbage_collection() -> None:
    model, cache = parts()
    second = on(model, cache)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            first = on(model, cache)
            first.enqueue(job("the quick", 50))
            first.iterate()
            del first
            assert tokens(second, "the fox") == naive(second, ids("the fox")[0].tolist(), 12)
        first = on(model, cache)
        first.enqueue(job("the quick", 50))
        for _ in range(20):  # this one is still referenced
            with pytest.raises(JobStateError, match="another generator has 1 jobs"):
                second.enqueue(job("abc", 3))
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["ngram", "model"])
def test_a_drafting_generator_that_nobody_uses_is_gone_without_a_garbage_collection(how: str) -> None:
    gc.collect()
    gc.disable()
    try:
        first = speculate(how)
        gone = weakref.ref(first)
        first.enqueue(job("abcabcabc", 50))
        for _ in range(5):
            first.iterate()
        del first
        assert gone() is None
    finally:
        gc.enable()


def test_a_held_cache_refuses_also_after_one_that_is_not_held() -> None:
    (model, cache), (draft, draft_cache) = parts(), parts()
    lost, held = on(model, cache), on(draft, draft_cache)
    both = on(model, cache, draft_model=draft, draft_cache=draft_cache)
    for generator in (lost, held):
        generator.enqueue(job("the quick", 9))
    del lost, generator
    for _ in range(2):
        with pytest.raises(JobStateError, match="another generator has 1 jobs"):
            both.enqueue(job("abc", 3))
    drain(held)
    assert tokens(both, "the fox") == naive(both, ids("the fox")[0].tolist(), 12)


@pytest.mark.covers("generators: stream-prefix-reuse")
def test_the_three_kinds_share_a_cache() -> None:
    """The newest call goes ahead, as scripts for exllamav2 expect; a stream left unfinished keeps nobody out."""
    model, cache = parts()
    dynamic = on(model, cache)
    base = ExLlamaV2BaseGenerator(model, cache, TOKENIZER)
    stream = ExLlamaV2StreamingGenerator(model, cache, TOKENIZER)
    prompt = "the fox and the "
    said = torch.tensor(naive(dynamic, ids(prompt)[0].tolist(), 10))
    want = prompt + TOKENIZER.decode(said)
    for _ in range(2):
        stream.begin_stream_ex(ids(prompt), GREEDY)
        told = [int(stream.stream_ex()["chunk_token_ids"][0, -1]) for _ in range(4)]
        assert told == naive(dynamic, ids(prompt)[0].tolist(), 4)
        assert base.generate_simple(prompt, GREEDY, 10, stop_token=None) == want
        with pytest.raises(JobStateError, match="taken the cache"):
            stream.stream_ex()
        assert tokens(dynamic, prompt, 10) == naive(dynamic, ids(prompt)[0].tolist(), 10)
        assert base.generate_simple(prompt, GREEDY, 10, stop_token=None) == want
    assert stream.generate_simple(prompt, GREEDY, 10, stop_token=None) == want


def test_a_draft_cache_has_one_owner_too() -> None:
    model, cache = parts()
    draft, draft_cache = parts()
    first = on(model, cache, draft_model=draft, draft_cache=draft_cache)
    second = on(draft, draft_cache)
    first.enqueue(job("the fox", 9))
    first.iterate()
    with pytest.raises(JobStateError, match="another generator"):
        second.enqueue(job("abc", 3))
    drain(first)
    assert tokens(second, "abc") == naive(second, ids("abc")[0].tolist(), 12)
    assert tokens(first, "the fox and the fox and") == naive(first, ids("the fox and the fox and")[0].tolist(), 12)


def test_a_hook_of_a_stream_cannot_take_the_cache_from_under_it() -> None:
    model, cache = parts()
    other, refusals = on(model, cache), []

    def hook(_: Any) -> None:
        try:
            other.enqueue(job("abc", 3))
        except JobStateError as error:
            refusals.append(str(error))

    stream = ExLlamaV2StreamingGenerator(model, cache, TOKENIZER)
    stream.begin_stream_ex(ids("the fox"), Settings.greedy(post_sampling_hooks=[hook]))
    told = [int(stream.stream_ex()["chunk_token_ids"][0, -1]) for _ in range(5)]
    assert told == naive(other, ids("the fox")[0].tolist(), 5)
    assert len(refusals) >= 5


def test_two_threads_never_have_jobs_in_one_cache() -> None:
    """A thread that is refused tries again; every completion is right."""
    model, cache = parts()
    wrong: list[str] = []
    counts = [0, 0]

    def work(which: int, generator: ExLlamaV2DynamicGenerator) -> None:
        prompt = "abc the fox " if which else "some words here "
        want = naive(generator, ids(prompt)[0].tolist(), 6)
        while counts[which] < 25:
            one = job(prompt, 6)
            try:
                generator.enqueue(one)
            except JobStateError:
                time.sleep(1e-4)
                continue
            results = drain(generator)[one]
            counts[which] += 1
            if "exception" in results[-1] or streamed_tokens(results) != want:
                wrong.append(repr(results[-1]))

    threads = [threading.Thread(target=work, args=(i, on(model, cache)), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=250)  # only a hang takes that long: a busy machine may take many seconds
    assert not wrong
    assert counts == [25, 25]


TEXT, OTHER = "Once upon a time there was a little fox who lived in a deep wood", "The bread is in the oven. " * 4


@pytest.fixture(scope="module")
def fable() -> tuple[ExLlamaV2, ExLlamaV2Tokenizer]:
    config = ExLlamaV2Config(str(draft_model_dir()))
    model = ExLlamaV2(config)
    model.load()
    return model, ExLlamaV2Tokenizer(config)


def complete(kind: type[Any], generator: Any, prompt: str) -> str:
    if kind is ExLlamaV2StreamingGenerator:
        generator.begin_stream_ex(generator.tokenizer.encode(prompt), GREEDY)
        return prompt + "".join(generator.stream_ex()["chunk"] for _ in range(12))
    if kind is ExLlamaV2BaseGenerator:
        return str(generator.generate_simple(prompt, GREEDY, 12))
    return str(generator.generate(prompt, 12, gen_settings=GREEDY))


@pytest.mark.covers("generators: page-reuse")
@pytest.mark.parametrize("write", ["forward", "forward_chunk", "copy_states", "copy_inside", "roll_left"])
@pytest.mark.parametrize("kind", [ExLlamaV2BaseGenerator, ExLlamaV2StreamingGenerator, ExLlamaV2DynamicGenerator])
def test_a_write_of_the_caller_drops_cached_prefixes(
    fable: tuple[ExLlamaV2, ExLlamaV2Tokenizer], kind: type[Any], write: str
) -> None:
    """Programs measure perplexity and then generate with the same cache."""
    model, tokenizer = fable
    cache, others = ExLlamaV2Cache(model, max_seq_len=256), ExLlamaV2Cache(model, max_seq_len=256)
    generator = kind(model, cache, tokenizer)
    expected = complete(kind, generator, TEXT)
    if write == "forward":
        model.forward(tokenizer.encode(OTHER), cache)
    elif write == "forward_chunk":
        model.forward_chunk(tokenizer.encode(OTHER), cache, attn_params=AttentionParams(1, past_len=0))
    elif write == "copy_states":
        model.forward(tokenizer.encode(OTHER), others)
        others.copy_states(cache, 0, 16, 0, 16, 0, 1, 0, 1)
    elif write == "copy_inside":
        cache.copy_states(cache, 128, 16, 0, 16, 0, 1, 0, 1)
    else:
        cache.roll_left()
    assert complete(kind, generator, TEXT) == expected


@pytest.mark.covers("generators: page-reuse")
@pytest.mark.parametrize("write", ["store_kv_state", "create_state_tensors"])
@pytest.mark.parametrize("shape", ["fp16", "q4", "tp"])
def test_a_write_into_the_tensors_of_a_cache_drops_cached_prefixes(
    fable: tuple[ExLlamaV2, ExLlamaV2Tokenizer], shape: str, write: str
) -> None:
    model, tokenizer = fable

    def made() -> ExLlamaV2CacheBase:
        base = ExLlamaV2Cache_Q4 if shape == "q4" else ExLlamaV2Cache
        return ExLlamaV2Cache_TP(model, base, max_seq_len=256) if shape == "tp" else base(model, max_seq_len=256)

    cache, others = made(), made()
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    expected = complete(ExLlamaV2DynamicGenerator, generator, TEXT)
    if write == "create_state_tensors":
        cache.create_state_tensors(others)
    else:
        for layer in range(model.config.num_hidden_layers):
            found = cache.get_kv_state(layer, 1, 0, 16)
            for one in found:
                for tensor in one if isinstance(one, list) else [one]:
                    tensor[:, :16].zero_()
            cache.store_kv_state(layer, 1, 0, 16)
    assert complete(ExLlamaV2DynamicGenerator, generator, TEXT) == expected


@pytest.mark.covers("generators: failing-jobs")
def test_a_write_of_the_caller_ends_running_jobs(fable: tuple[ExLlamaV2, ExLlamaV2Tokenizer]) -> None:
    model, tokenizer = fable
    cache = ExLlamaV2Cache(model, max_seq_len=512)
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer, max_batch_size=1)
    running, waiting = (
        ExLlamaV2DynamicJob(tokenizer.encode(TEXT), 12, gen_settings=GREEDY, stop_conditions=[]) for _ in range(2)
    )
    generator.enqueue([running, waiting])
    generator.iterate()
    model.forward(tokenizer.encode(OTHER), cache)
    results = drain(generator)
    check_pages(generator)
    assert isinstance(results[running][-1]["exception"], JobStateError)
    assert TEXT + results[waiting][-1]["full_completion"] == complete(ExLlamaV2DynamicGenerator, generator, TEXT)


@pytest.mark.covers("generators: page-reuse")
def test_passes_without_the_cache_keep_cached_prefixes(fable: tuple[ExLlamaV2, ExLlamaV2Tokenizer]) -> None:
    model, tokenizer = fable
    cache, others = ExLlamaV2Cache(model, max_seq_len=256), ExLlamaV2Cache(model, max_seq_len=256)
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    jobs = [ExLlamaV2DynamicJob(tokenizer.encode(TEXT), 4, gen_settings=GREEDY) for _ in range(2)]
    for one in jobs:
        generator.enqueue(one)
        drain(generator)
        model.forward(tokenizer.encode(OTHER), others)
        model.forward(tokenizer.encode(OTHER))
        cache.copy_states(others, 0, 16, 0, 16, 0, 1, 0, 1)
    assert jobs[1].cached_tokens == len(tokenizer.encode(TEXT)[0]) - 1
