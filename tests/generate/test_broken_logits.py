"""Jobs whose logits are not finite, from whatever cause: how they end, and that none of their K/V is used again."""

from __future__ import annotations

from typing import Any

import pytest

from exl_generate import (
    ExLlamaV2Sampler,
    NoCandidatesError,
    NonFiniteLogitsError,
)
from exl_generate.testing import (
    check_pages,
    drain,
    streamed_tokens,
)
from exl_generate.testing.small import (
    PAGE,
    TOKENIZER,
    VOCAB,
    ids,
    job,
    make,
    naive,
    run,
    speculate,
)
from exl_kernels.errors import DeviceError

Settings = ExLlamaV2Sampler.Settings


def lose_peers(monkeypatch: Any, model: Any, first: int = 0, explained: bool = True) -> list[bool]:
    """Let K/V and logits of a model be NaN, as after devices lost one another, from pass `first` with logits on.

    It ends when `check_peers` has raised the error or, unless `explained`, when the returned list is cleared.
    """
    whole, lost, passes = model.forward_chunk, [True], [0]

    def forward_chunk(given: Any, cache: Any = None, attn_params: Any = None, **kw: Any) -> Any:
        found = whole(given, cache, attn_params, **kw)
        if "logits" in found:
            passes[0] += 1
        if lost and "logits" in found and passes[0] > first:
            found["logits"].fill_(float("nan"))
            for row, past in zip(attn_params.block_index.tolist(), attn_params.cache_seqlens.tolist(), strict=True):
                for at in range(past, past + given.shape[1]):
                    cache.chain[row[at // PAGE] * PAGE + at % PAGE] = 0  # a pass that reads it raises an error
        return found

    def check_peers() -> None:
        if explained and lost:
            lost.clear()
            raise DeviceError("cuda:0 waited in vain")

    monkeypatch.setattr(model, "forward_chunk", forward_chunk)
    monkeypatch.setattr(model, "check_peers", check_peers)
    return lost


@pytest.mark.parametrize("explained", [True, False], ids=["devices", "unknown cause"])
def test_jobs_end_with_the_error_of_devices_that_lost_one_another(explained: bool, monkeypatch: Any) -> None:
    """No later request uses the K/V of that step. Once the devices work again, so does the generator."""
    generator = make()
    lost = lose_peers(monkeypatch, generator.model, explained=explained)
    prompts = ["a quick brown fo", "abcdefghijklmnopqrstuv"]
    jobs = [job(prompt, 9) for prompt in prompts]
    lengths = [one.sequence.prompt_length for one in jobs]
    assert lengths[0] == PAGE, "the step fills its page"
    generator.enqueue(jobs)
    results = drain(generator)
    expected = DeviceError if explained else NonFiniteLogitsError
    assert [type(results[one][-1]["exception"]) for one in jobs] == [expected] * 2
    lost.clear()
    assert not any(page.valid for page in generator.page_table.pages)
    check_pages(generator)
    for prompt in prompts:
        later = job(prompt + "xyz", 9)
        assert len(streamed_tokens(run(generator, later))) == 9
        assert later.cached_tokens == 0


def test_a_prompt_is_computed_again_after_its_logits_were_not_finite(monkeypatch: Any) -> None:
    """K/V of the prompt may be NaN: a later request must not find them. Jobs that share pages go on."""
    generator = make()
    model, head = generator.model, "abcdefghijklmnopqrstuvwx"  # a full page and half of another
    whole = model.forward_chunk
    broken: list[int] = []

    def forward_chunk(given: Any, cache: Any = None, attn_params: Any = None, **kw: Any) -> Any:
        found = whole(given, cache=cache, attn_params=attn_params, **kw)
        for row, block in enumerate(attn_params.block_index.tolist()):
            if broken and block[-1] == broken[0] and "logits" in found:
                found["logits"][row].fill_(float("nan"))
                cache.chain[PAGE * block[-1] : PAGE * (block[-1] + 1)] = 0  # a pass that reads it raises an error
                broken.clear()
        return found

    monkeypatch.setattr(model, "forward_chunk", forward_chunk)
    other, bad = job(head[:17] + "other", 40), job(head + "z", 5)
    generator.enqueue(other)
    generator.iterate()
    generator.enqueue(bad)
    generator.iterate()
    broken.append(int(bad.sequence.block[-1]))
    results = drain(generator)
    assert isinstance(results[bad][-1]["exception"], NonFiniteLogitsError)
    assert streamed_tokens(results[other])[-3:] == naive(generator, ids(head[:17] + "other")[0].tolist(), 40)[-3:]
    check_pages(generator)
    again = job(head + "z", 5)
    assert streamed_tokens(run(generator, again)) == naive(generator, ids(head + "z")[0].tolist(), 5)
    assert again.cached_tokens == 0


def test_pages_of_a_broken_job_are_not_found_again_through_another_user(monkeypatch: Any) -> None:
    """The other job that shares them is cancelled before its own logits could show it."""
    generator = make()
    whole, broken = generator.model.forward_chunk, [True]

    def forward_chunk(given: Any, **kw: Any) -> Any:
        found = whole(given, **kw)
        if broken and "logits" in found:
            found["logits"].fill_(float("nan"))
        return found

    monkeypatch.setattr(generator.model, "forward_chunk", forward_chunk)
    bad, other = job("z" * 40, 5), job("z" * 40, 5)
    generator.enqueue([bad, other])
    other.pause()
    while not bad.is_finished:
        results = generator.iterate()
    assert isinstance(results[-1]["exception"], NonFiniteLogitsError)
    assert other.sequence.allocated_pages, "it shares the pages of the prompt"
    generator.cancel(other)
    broken.clear()
    check_pages(generator)
    again = job("z" * 40, 5)
    assert len(streamed_tokens(run(generator, again))) == 5
    assert again.cached_tokens == 0


def test_the_cache_keeps_a_prompt_whose_tokens_were_all_banned() -> None:
    generator = make()
    none_left = Settings.greedy()
    none_left.disallow_tokens(TOKENIZER, list(range(VOCAB)))
    one = job("z" * 20, 5, stop_conditions=[], gen_settings=none_left)
    assert isinstance(run(generator, one)[-1]["exception"], NoCandidatesError)
    later = job("z" * 20, 5)
    run(generator, later)
    assert later.cached_tokens == 19


@pytest.mark.parametrize("first", range(7))
def test_a_draft_model_drafts_again_after_its_devices_lost_one_another(first: int, monkeypatch: Any) -> None:
    """In whichever pass: the jobs go on, and drafts resume from K/V that are not NaN."""
    generator = speculate("model")
    lost = lose_peers(monkeypatch, generator.draft_model, first)
    one = job("hello, this is a", 40)
    assert streamed_tokens(run(generator, one)) == naive(generator, ids("hello, this is a")[0].tolist(), 40)
    assert not lost
    assert one.accepted_draft_tokens >= 20
    check_pages(generator)
