"""The laws on a real model: bitwise the same alone, in company, in any chunks, warm or cold, on any threads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import exl_core
import exl_kernels.device
import exl_kernels.threads
from exl_core import ExLlamaV2, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.testing import check_pages, streamed_tokens

DATA = Path(__file__).parents[1] / "golden" / "data"
CACHES = ["ExLlamaV2Cache", "ExLlamaV2Cache_8bit", "ExLlamaV2Cache_Q8", "ExLlamaV2Cache_Q6", "ExLlamaV2Cache_Q4"]
TEXT = 'def main(argv):\n    """Read the file and return the number of lines in it, or raise."""\n    import os, sys\n'
Settings = ExLlamaV2Sampler.Settings


@lru_cache(maxsize=6)
def load(name: str, matmul: str, device: str = "cpu") -> tuple[ExLlamaV2, ExLlamaV2Tokenizer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXL_DEVICE", device)
        config = ExLlamaV2Config(str(DATA / name))
        config.cpu_matmul = matmul
        model = ExLlamaV2(config)
        model.load()
    return model, ExLlamaV2Tokenizer(config)


def generator_for(
    name: str, cache: str, chunk: int, matmul: str = "int8", draft: str = "none", device: str = "cpu"
) -> ExLlamaV2DynamicGenerator:
    model, tokenizer = load(name, matmul, device)
    kind = getattr(exl_core, cache)
    kw: dict[str, Any] = {"use_ngram_draft": True} if draft == "ngram" else {}
    if draft == "model":
        other = load("pylib-4m-exl2-3.5", "int8", device)[0]
        kw = {"draft_model": other, "draft_cache": kind(other, max_seq_len=1024)}
    return ExLlamaV2DynamicGenerator(
        model, kind(model, max_seq_len=1024), tokenizer, page_size=16, max_chunk_size=chunk, max_batch_size=6, **kw
    )


requests = st.tuples(
    st.integers(1, 160), st.integers(1, 24), st.sampled_from(["greedy", "seeded"]), st.integers(0, 3), st.integers(0, 6)
)


def play(
    generator: ExLlamaV2DynamicGenerator, asks: list[tuple[int, int, str, int, int]]
) -> list[tuple[list[int], bytes]]:
    """Tokens and logits of each request (prompt length, new tokens, style, seed, step of arrival)."""
    ids = generator.tokenizer.encode(TEXT * 3)
    jobs = [
        ExLlamaV2DynamicJob(
            ids[:, start : start + n],
            new,
            gen_settings=Settings.greedy() if style == "greedy" else Settings(),
            seed=start,
            return_logits=True,
        )
        for n, new, style, start, _ in asks
    ]
    results: dict[Any, list[dict[str, Any]]] = {job: [] for job in jobs}
    for round_ in range(400):
        for job, ask in zip(jobs, asks, strict=True):
            if ask[4] == round_:
                generator.enqueue(job)
        for result in generator.iterate():
            results[result["job"]].append(result)
        if round_ > 6 and generator.num_remaining_jobs() == 0:
            break
    check_pages(generator)
    logits = [torch.cat([r["logits"] for r in results[j] if "logits" in r], dim=1).numpy().tobytes() for j in jobs]
    return [(streamed_tokens(results[job]), raw) for job, raw in zip(jobs, logits, strict=True)]


@pytest.mark.parametrize("cache", CACHES)
@examples(15, 2, list(HealthCheck))
@given(
    st.sampled_from(["pylib-4m-exl2-4.5", "pylib-4m-fp16"]),
    st.lists(requests, min_size=1, max_size=6),
    st.sampled_from([16, 32, 64, 512]),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from(["int8", "exact"]),
    st.sampled_from(["none", "ngram", "model"]),
)
@pytest.mark.covers("generators: prompt-chunks", "generators: random-numbers")
def test_output_is_bitwise_the_same(
    cache: str,
    name: str,
    asks: list[tuple[int, int, str, int, int]],
    chunk: int,
    warm: bool,
    threads: int,
    matmul: str,
    draft: str,
) -> None:
    before = exl_kernels.threads.num_threads()
    try:
        exl_kernels.threads.set_num_threads(threads)
        generator = generator_for(name, cache, chunk, matmul, draft)
        if warm:
            play(generator, asks[::-1])
        together = play(generator, asks)
        exl_kernels.threads.set_num_threads(1)
        for ask, got in zip(asks, together, strict=True):
            assert play(generator_for(name, cache, 512, matmul), [(*ask[:4], 0)])[0] == got
    finally:
        exl_kernels.threads.set_num_threads(before)


@pytest.fixture(scope="module")
def strict() -> Iterator[None]:
    """Make GPU matmuls batch-invariant for any number of rows, so that chunks and cache hits change no bit."""
    exl_kernels.device.set_row_invariant(True)
    yield
    exl_kernels.device.set_row_invariant(False)


@pytest.mark.cuda
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.usefixtures("strict")
@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from(["pylib-4m-exl2-4.5", "pylib-4m-exl2-3.5"]),
    st.lists(requests, min_size=2, max_size=6),
    st.sampled_from([16, 32, 64, 512]),
    st.booleans(),
    st.sampled_from(["none", "ngram", "model"]),
)
@pytest.mark.covers("generators: prompt-chunks", "generators: random-numbers")
def test_output_is_bitwise_the_same_on_a_gpu(
    cache: str, name: str, asks: list[tuple[int, int, str, int, int]], chunk: int, warm: bool, draft: str
) -> None:
    """Tokens and logits alone and in company, in any chunks, cold and warm, with any guesses; pages are checked."""
    generator = generator_for(name, cache, chunk, draft=draft, device="cuda:0")
    if warm:
        play(generator, asks[::-1])
    for ask, got in zip(asks, play(generator, asks), strict=True):
        assert play(generator_for(name, cache, 512, device="cuda:0"), [(*ask[:4], 0)])[0] == got


@pytest.mark.cuda
@settings(max_examples=8, deadline=None)
@given(st.lists(requests, min_size=2, max_size=6), st.sampled_from(["none", "ngram", "model"]))
@pytest.mark.covers("generators: random-numbers")
def test_company_and_guesses_show_in_no_bit_without_strict_mode(
    asks: list[tuple[int, int, str, int, int]], draft: str
) -> None:
    """A generator with defaults runs prompts at once and of their own, up to the length (64 tokens before the last)
    that goes through kernels whose rows do not depend on each other, and steps of up to 64 rows."""
    generator = generator_for("pylib-4m-exl2-4.5", "ExLlamaV2Cache", 512, draft=draft, device="cuda:0")
    each = {ask[3]: ask for ask in asks}.values()
    apart = [(min(ask[0], 65), ask[1], ask[2], ask[3], ask[3]) for ask in each]
    for ask, got in zip(apart, play(generator, apart), strict=True):
        fresh = generator_for("pylib-4m-exl2-4.5", "ExLlamaV2Cache", 512, device="cuda:0")
        assert play(fresh, [(*ask[:4], 0)])[0] == got
