"""Interventions and the prefix cache: nothing that was computed without a hook is used with it, nor the other way."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer, Intervention
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.dynamic import sequence
from exl_generate.dynamic.pages import page_hash
from exl_generate.dynamic.sequence import Sequence
from exl_generate.testing import check_pages, drain, small, streamed_tokens

FOLDER = Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5"
TEXT = 'def main(argv):\n    """Read the file and return the number of lines in it, or raise."""\n    import os, sys\n'


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ExLlamaV2:
    monkeypatch.setenv("EXL_DEVICE", "cpu")
    model = ExLlamaV2(ExLlamaV2Config(FOLDER))
    model.load()
    return model


def generator(model: ExLlamaV2) -> ExLlamaV2DynamicGenerator:
    cache = ExLlamaV2Cache(model, max_seq_len=512)
    return ExLlamaV2DynamicGenerator(model, cache, ExLlamaV2Tokenizer(model.config), page_size=16, max_batch_size=1)


def job(made: ExLlamaV2DynamicGenerator, new: int = 8) -> ExLlamaV2DynamicJob:
    style = ExLlamaV2Sampler.Settings.greedy()
    return ExLlamaV2DynamicJob(made.tokenizer.encode(TEXT), new, gen_settings=style, return_logits=True)


def said(made: ExLlamaV2DynamicGenerator) -> tuple[list[int], int]:
    """Return the text, and how many of its prompt's tokens were found in the cache."""
    one = job(made)
    made.enqueue(one)
    results = drain(made)[one]
    check_pages(made)
    return streamed_tokens(results), results[-1]["cached_tokens"]


def test_pages_computed_without_a_hook_are_not_used_with_it(model: ExLlamaV2) -> None:
    inner = model.modules[3]
    hooks = [Intervention(inner, post_forward=lambda state, step, by=by: state.roll(by, -1)) for by in (1, 7)]  # type: ignore[misc]
    expected = []
    for module in (inner, *hooks):
        model.modules[3] = module
        expected.append(said(generator(model)))
    assert len({tuple(tokens) for tokens, _ in expected}) == 3
    made = generator(model)
    for which in (0, 1, 2, 0, 1):
        model.modules[3] = (inner, *hooks)[which]
        assert said(made) == expected[which]
        tokens, cached = said(made)
        assert tokens == expected[which][0]
        assert cached > 16, "nothing was found though nothing has changed"


def test_jobs_that_wait_begin_as_the_model_is_then(model: ExLlamaV2) -> None:
    """One job runs, another waits with the same prompt, and both go on after a change; a third comes when the change
    has been taken back."""
    inner = model.modules[3]
    hook = Intervention(inner, post_forward=lambda state, step: state.roll(1, -1))
    plain = said(generator(model))
    model.modules[3] = hook
    hooked = said(generator(model))
    model.modules[3] = inner
    made = generator(model)
    first, second = job(made, 40), job(made)
    made.enqueue([first, second])
    for _ in range(3):
        made.iterate()
    assert made.num_pending_jobs() == 1
    model.modules[3] = hook
    results = drain(made)
    assert streamed_tokens(results[second]) == hooked[0]
    model.modules[3] = inner
    assert said(made) == plain


@pytest.mark.parametrize("at", [3, 4, 6])
def test_a_job_that_has_begun_takes_no_page_of_before(model: ExLlamaV2, at: int) -> None:
    """The text is the same whether or not another job left pages of the same ids, computed without the hook."""
    inner = model.modules[3]
    hook = Intervention(inner, post_forward=lambda state, step: state.roll(1, -1))
    spoken = []
    for first in (False, True):
        model.modules[3] = inner
        made = generator(model)
        jobs = [
            ExLlamaV2DynamicJob(
                made.tokenizer.encode(TEXT)[:, :12], 24, gen_settings=ExLlamaV2Sampler.Settings.greedy()
            )
            for _ in range(1 + first)
        ]
        if first:
            made.enqueue(jobs[0])
            drain(made)
        made.enqueue(jobs[-1])
        results = []
        for _ in range(at):
            results += made.iterate()
        model.modules[3] = hook
        results += drain(made)[jobs[-1]]
        check_pages(made)
        spoken.append(streamed_tokens(results))
    assert spoken[0] == spoken[1]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))])
def test_changes_while_jobs_take_turns_lose_nothing(seed: int) -> None:
    """The model says the same after each change, so a job that used K/V of another context would differ."""
    dice = random.Random(seed)
    made: Any = small.make(cache_tokens=128, max_batch_size=4)
    prompts = ["abcdefgh" * n for n in (1, 2, 3, 1, 4, 2)]
    jobs = [small.job(text, 60, max_rq_tokens=dice.choice((1, 5, 16, 40))) for text in prompts]
    made.enqueue(jobs)
    results: dict[Any, list[Any]] = {one: [] for one in jobs}
    while made.num_remaining_jobs():
        if dice.random() < 0.1:
            made.model.arrangement = []
        for result in made.iterate():
            results[result["job"]].append(result)
        check_pages(made)
    assert sum(one.requeues for one in jobs) > 0
    assert made.arrangements > 10
    for one, text in zip(jobs, prompts, strict=True):
        assert streamed_tokens(results[one]) == small.naive(made, small.ids(text)[0].tolist(), 60)


def test_unpublished_pages_stay_unnamed_after_a_change() -> None:
    """A job gives way, and meets a change, while most of a page of its tokens may yet turn out to be banned."""
    word = "abcdefghijklmnopqrstuv"
    made: Any = small.make(small.says(word, after=4), cache_tokens=64, max_batch_size=2)
    one = small.job("wxyz", 26, max_rq_tokens=12, banned_strings=[word])
    others = [small.job("no" * n, 12, max_rq_tokens=12) for n in (9, 10, 11)]
    made.enqueue([one, *others])
    results = []
    while made.num_remaining_jobs():
        if one.requeues and not made.arrangements:
            assert not one.sequence.labels
            assert one.sequence.prefill_end == 16, "all of a page"
            made.model.arrangement = []
        results += made.iterate()
        check_pages(made)
    assert made.arrangements == 1
    said = [result for result in results if result["job"] is one]
    assert any(result.get("suppressed_text") == word for result in said)
    alone: Any = small.make(small.says(word, after=4))
    assert streamed_tokens(said) == streamed_tokens(small.run(alone, small.job("wxyz", 26, banned_strings=[word])))


def test_a_job_named_while_the_model_changes_finds_nothing_of_before(
    model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread queues a job and is still naming its pages when a step in another meets a hook."""
    inner = model.modules[3]
    hook = Intervention(inner, post_forward=lambda state, step: state.roll(1, -1))
    model.modules[3] = hook
    hooked = said(generator(model))
    model.modules[3] = inner
    made = generator(model)
    said(made)
    late = job(made)
    naming, met = threading.Event(), threading.Event()

    def slow(*of: Any) -> bytes:
        if threading.current_thread() is not threading.main_thread():
            naming.set()
            assert met.wait(250)
        return page_hash(*of)

    monkeypatch.setattr(sequence, "page_hash", slow)
    thread = threading.Thread(target=made.enqueue, args=(late,))
    thread.start()
    try:
        assert naming.wait(250)
        model.modules[3] = hook
        made.iterate()
    finally:
        met.set()
        thread.join()
    results = drain(made)[late]
    check_pages(made)
    assert (streamed_tokens(results), results[-1]["cached_tokens"]) == hooked


def test_a_job_that_waits_again_takes_nothing_of_while_it_waited(model: ExLlamaV2) -> None:
    """The job never runs under a hook, though another job of its prompt does while it waits for the second time, and
    fills pages that had got their names before."""
    inner = model.modules[3]
    hook = Intervention(inner, post_forward=lambda state, step: state.roll(1, -1))
    spoken = []
    for hooked in (False, True):
        cache = ExLlamaV2Cache(model, max_seq_len=8 * 16)
        tokenizer = ExLlamaV2Tokenizer(model.config)
        made = ExLlamaV2DynamicGenerator(model, cache, tokenizer, page_size=16, max_batch_size=1, max_chunk_size=16)
        ids, style = tokenizer.encode(TEXT * 3)[:, :90], ExLlamaV2Sampler.Settings.greedy()
        first = ExLlamaV2DynamicJob(ids, 16, gen_settings=style, max_rq_tokens=4, return_logits=True)
        other = ExLlamaV2DynamicJob(ids.flip(-1), 8 * 16 - 90, gen_settings=style)  # leaves nothing of the first one's
        third = ExLlamaV2DynamicJob(ids, 1, gen_settings=style)
        made.enqueue([first, other, third])
        results = []
        while not third.sequence.kv_position:
            results += made.iterate()
        assert first.requeues == 1
        assert not third.prefilled
        if hooked:
            model.modules[3] = hook
        while not third.is_finished:
            results += made.iterate()
        assert not first.sequence.allocated_pages
        model.modules[3] = inner
        results += drain(made)[first]
        check_pages(made)
        spoken.append([result for result in results if result["job"] is first])
    assert len(streamed_tokens(spoken[0])) == 16
    assert streamed_tokens(spoken[0]) == streamed_tokens(spoken[1])
    plain, met = ([result["logits"] for result in said if "logits" in result] for said in spoken)
    assert all(torch.equal(a, b) for a, b in zip(plain, met, strict=True))


def test_a_resumed_job_does_not_depend_on_the_pages_left_of_it(model: ExLlamaV2) -> None:
    """The job yields to a hook that was put in while it ran, and its pages stay there or are taken by others."""
    inner = model.modules[3]
    hook = Intervention(inner, post_forward=lambda state, step: state.roll(1, -1))
    spoken = []
    for pages in (8, 24):
        model.modules[3] = inner
        cache, tokenizer = ExLlamaV2Cache(model, max_seq_len=pages * 16), ExLlamaV2Tokenizer(model.config)
        made = ExLlamaV2DynamicGenerator(model, cache, tokenizer, page_size=16, max_batch_size=1)
        ids, style = tokenizer.encode(TEXT * 3)[:, :90], ExLlamaV2Sampler.Settings.greedy()
        one = ExLlamaV2DynamicJob(ids, 16, gen_settings=style, max_rq_tokens=4)
        other = ExLlamaV2DynamicJob(ids.flip(-1), 8 * 16 - 90, gen_settings=style)
        made.enqueue([one, other])
        results = made.iterate()
        while one.new_tokens < 2:
            results += made.iterate()
        model.modules[3] = hook
        results += drain(made)[one]
        assert one.requeues == 1
        check_pages(made)
        spoken.append(streamed_tokens([result for result in results if result["job"] is one]))
    assert spoken[0] == spoken[1]


def test_pages_of_a_job_whose_model_has_changed_begin_no_other_prompt() -> None:
    """A prompt equal to a page's that got its name after the change: the page's keys are of another context."""
    made: Any = small.make(max_batch_size=2)
    one = small.job("abcdefghijklmnop", 40)
    made.enqueue(one)
    while not one.new_tokens:
        made.iterate()
    made.model.arrangement = []
    drain(made)
    assert len(one.sequence.labels) == 3
    for start in (16, 32):
        ids = one.sequence.ids[start : start + 20].copy()
        other = ExLlamaV2DynamicJob(torch.from_numpy(ids)[None], 6, gen_settings=ExLlamaV2Sampler.Settings.greedy())
        results = small.run(made, other)
        assert results[-1]["cached_tokens"] == 0
        assert streamed_tokens(results) == small.naive(made, ids.tolist(), 6)


def test_names_after_a_change_are_one_sequences_own_until_it_starts_again() -> None:
    """Two prompts of one job go on alike; started again, names are those of anybody with this context."""
    made: Any = small.make(max_batch_size=2)
    pair = [small.ids("abcdefghijklmnop"), small.ids("ponmlkjihgfedcba")]
    one = ExLlamaV2DynamicJob(pair, 40, gen_settings=ExLlamaV2Sampler.Settings(top_k=1, cfg_scale=1.5))
    made.enqueue(one)
    while not one.new_tokens:
        made.iterate()
    made.model.arrangement = []
    while one.new_tokens < 36:
        made.iterate()
    after = [sequence.labels[1:] for sequence in one.sequences]
    assert [len(labels) for labels in after] == [2, 2]
    assert not set(after[0]) & set(after[1])
    one.give_way()
    one.pages.refresh_names(made)
    for again in one.sequences:
        fresh = Sequence(again.ids)
        fresh.prepare(made.page_table, made.namespace_of(()))
        assert again.labels == fresh.labels
