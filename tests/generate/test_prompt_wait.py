"""New prompts wait for others while jobs decode, so that one pass computes several of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exl_generate.dynamic import prompt_pace, prompt_wait
from exl_generate.dynamic.runner import Chunk, Runner
from exl_generate.errors import RequestError
from exl_generate.sampling import Settings
from exl_generate.testing import ScriptedLora, ScriptedModel, check_pages, drain, streamed_tokens
from exl_generate.testing.small import VOCAB, ids, job, make, naive, speculate

LIMIT = 0.0625
"""A power of two, so that sums of times are exact."""
STREAMS = 20
CHUNK = 64
"""Most tokens of a pass: the `max_input_len` of the scripted model."""
Results = dict[ExLlamaV2DynamicJob, list[dict[str, Any]]]


class Clock:
    """A clock that only the test moves, in place of that of the waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(prompt_wait, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def prompt(number: int, length: int) -> torch.Tensor:
    """`length` ids; different numbers have nothing in common."""
    return torch.tensor([[3 + (number * 7 + i * (1 + number % 5)) % (VOCAB - 3) for i in range(length)]])


def asking(number: int, length: int, new: int = 4, **kw: Any) -> ExLlamaV2DynamicJob:
    return ExLlamaV2DynamicJob(prompt(number, length), new, gen_settings=Settings.greedy(), **kw)


def decoding(streams: int = STREAMS, seconds: float = LIMIT, new: int = 120, **kw: Any) -> ExLlamaV2DynamicGenerator:
    """A generator in which so many streams decode. Their prompts are one token: nothing to compute."""
    kw = {"cache_tokens": 8192, "max_batch_size": 40, "prompt_wait_seconds": seconds} | kw
    generator = make(**kw)
    generator.enqueue([asking(number, 1, new) for number in range(streams)])
    step(generator, 3)
    assert passes(generator) == []
    return generator


def step(generator: ExLlamaV2DynamicGenerator, count: int = 1) -> None:
    for _ in range(count):
        generator.iterate()
        check_pages(generator)


def passes(generator: ExLlamaV2DynamicGenerator) -> list[int]:
    """Tokens of each pass over prompts so far."""
    return [q for _, q, preprocess in generator.model.calls if preprocess]  # type: ignore[attr-defined]


@pytest.mark.covers("generators: prompt-chunks")
def test_prompts_wait_until_they_fill_a_pass(clock: Clock) -> None:
    generator = decoding()
    for number, length in ((30, 31), (31, 21)):
        generator.enqueue(asking(number, length))
        step(generator, 2)
        assert passes(generator) == []
    generator.enqueue(asking(32, 21))
    step(generator)
    assert passes(generator) == [31 + 21]  # the third one does not fit, and goes on waiting
    step(generator, 3)
    assert passes(generator) == [52]
    clock.now += LIMIT
    step(generator)
    assert passes(generator) == [52, 21]


def test_a_prompt_as_long_as_a_pass_does_not_wait(clock: Clock) -> None:
    generator = decoding()
    generator.enqueue(asking(30, 150))
    step(generator, 3)
    assert passes(generator) == [64, 64, 22]


def test_prompts_join_the_last_chunk_of_a_long_one(clock: Clock) -> None:
    generator = decoding()
    generator.enqueue([asking(30, 90), asking(31, 20)])
    step(generator, 2)
    assert passes(generator) == [64, 26 + 20]


@pytest.mark.parametrize("streams", [0, STREAMS])
@pytest.mark.parametrize("options", [{}, {"prompt_logprobs": 0}])
def test_a_generator_holds_no_jobs_that_have_ended(clock: Clock, streams: int, options: dict[str, Any]) -> None:
    """Neither a job that ends with its prompt's step nor one that is removed while it waits."""
    generator = decoding(streams)
    one = asking(30, 31, new=1, **options)
    ended = weakref.ref(one)
    generator.enqueue(one)
    step(generator)
    assert one.is_finished == (not streams or bool(options))
    generator.clear_queue()
    del one
    gc.collect()
    assert ended() is None


def test_the_limit_counts_from_a_prompts_own_start(clock: Clock) -> None:
    generator = decoding()
    generator.enqueue(asking(30, 11))
    step(generator)
    clock.now += LIMIT / 2
    generator.enqueue(asking(31, 12))
    step(generator)
    assert passes(generator) == []
    clock.now += LIMIT / 2
    step(generator)
    assert passes(generator) == [11 + 12]  # the second one joins the pass of the first


def test_a_prompt_without_streams_does_not_wait(clock: Clock) -> None:
    generator = make(prompt_wait_seconds=LIMIT)
    one = asking(30, 20)
    generator.enqueue(one)
    step(generator)
    assert passes(generator) == [20]
    drain(generator)


def test_prompts_are_computed_when_the_last_stream_ends(clock: Clock) -> None:
    """No call of `iterate` comes back without having done something."""
    generator = decoding(new=5)
    for stream in generator.active_jobs[1:]:
        generator.cancel(stream)
    one = asking(30, 20)
    generator.enqueue(one)
    results = drain(generator, limit=12)
    assert streamed_tokens(results[one]) == naive(generator, prompt(30, 20)[0].tolist(), 4)


def test_paused_streams_keep_no_prompt_waiting(clock: Clock) -> None:
    generator = decoding()
    for stream in generator.active_jobs:
        stream.pause()
    generator.enqueue(asking(30, 20))
    step(generator)
    assert passes(generator) == [20]


@pytest.mark.parametrize(("waiting", "computed"), [(4, 0), (5, 5)])
def test_prompts_that_would_leave_a_fifth_of_the_places_idle_do_not_wait(
    clock: Clock, waiting: int, computed: int
) -> None:
    generator = decoding(STREAMS)
    generator.enqueue([asking(30 + number, 5) for number in range(waiting)])
    step(generator)
    assert sum(passes(generator)) == 5 * computed


@pytest.mark.covers("generators: page-sharing")
def test_a_prompt_that_is_in_the_cache_does_not_wait(clock: Clock) -> None:
    generator = decoding()
    first = asking(30, 33)
    generator.enqueue(first)
    step(generator)
    clock.now += LIMIT
    while not first.is_finished:
        step(generator)
    assert passes(generator) == [33]
    again, longer = asking(30, 33), ExLlamaV2DynamicJob(torch.cat([prompt(30, 33), prompt(31, 20)], dim=1), 4)
    generator.enqueue([again, longer])
    step(generator, 2)
    assert again.times.first_token is not None
    assert longer.times.first_token is None
    assert passes(generator) == [33]


@pytest.mark.covers("generators: page-sharing")
def test_a_common_beginning_of_prompts_that_wait_is_computed_once(clock: Clock) -> None:
    generator = decoding()
    texts = ["abcdefgh" * 4 + tail for tail in ("xyz", "uvw")]
    jobs = [job(text, 3) for text in texts]
    generator.enqueue(jobs)
    said = [r for r in generator.iterate() if r["job"] is jobs[0]]
    assert passes(generator) == [34]  # together more than a pass: the first one goes, and the other goes on waiting
    clock.now += LIMIT
    results = drain(generator)
    assert sum(passes(generator)) == 34 + 3
    expected = [naive(generator, ids(text)[0].tolist(), 3) for text in texts]
    assert [streamed_tokens(said + results[jobs[0]]), streamed_tokens(results[jobs[1]])] == expected


@pytest.mark.covers("generators: cfg-pairs")
def test_both_prompts_of_a_pair_wait_together(clock: Clock) -> None:
    generator = decoding()
    settings = Settings(temperature=0.0)
    settings.cfg_scale = 1.5
    generator.enqueue(ExLlamaV2DynamicJob([prompt(30, 11), prompt(31, 14)], 4, gen_settings=settings))
    step(generator, 2)
    assert passes(generator) == []
    clock.now += LIMIT
    step(generator)
    assert passes(generator) == [11 + 14]


def test_short_and_long_prompts_wait_for_their_own_kind(clock: Clock) -> None:
    """Short ones share a pass of up to so many tokens, whose results do not depend on its length, as on a GPU."""
    generator = decoding(30)
    generator.model.invariant_tokens = lambda: 12  # type: ignore[method-assign]
    generator.enqueue([asking(30, 21), asking(31, 6)])
    step(generator)
    assert passes(generator) == []
    generator.enqueue([asking(32, 7), asking(33, 4)])
    step(generator)
    assert passes(generator) == [6 + 6]  # half of the tokens are enough; there is room for one prompt's last token
    clock.now += LIMIT
    step(generator)
    assert sorted(passes(generator)[1:]) == [4, 20], "a long prompt's last token has a step of its own"


def test_adapters_keep_prompts_apart(clock: Clock) -> None:
    generator = decoding(30)
    generator.enqueue([asking(30, 41), asking(31, 41, loras=[ScriptedLora(3)])])
    step(generator, 2)
    assert passes(generator) == []


def test_hooks_let_no_prompt_wait(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt has its own pass then, so that nothing is gained."""
    generator = decoding()
    monkeypatch.setattr(ScriptedModel, "hooked", True)
    generator.enqueue([asking(30, 11), asking(31, 8)])
    step(generator)
    assert passes(generator) == [10, 7]


def test_a_pass_is_full_with_the_tokens_of_a_paced_step(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_pace, "perf_counter", lambda: clock.now)
    generator = decoding(target_step_seconds=0.05)  # two pages, before any step is measured
    generator.enqueue(asking(30, 21))
    step(generator, 2)
    assert passes(generator) == []
    generator.enqueue(asking(31, 14))
    step(generator)
    assert passes(generator) == [21]


@pytest.mark.covers("generators: dynamic-queue")
def test_a_prompt_that_waits_can_be_cancelled(clock: Clock) -> None:
    generator = decoding()
    waiting, other = asking(30, 20), asking(31, 20)
    generator.enqueue([waiting, other])
    step(generator)
    generator.cancel(waiting)
    results = [result for result in generator.iterate() if result["job"] is waiting]
    assert [result["eos_reason"] for result in results] == ["cancelled"]
    check_pages(generator)
    clock.now += LIMIT
    results = drain(generator)[other]
    assert streamed_tokens(results) == naive(generator, prompt(31, 20)[0].tolist(), 4)
    assert passes(generator) == [20]


@pytest.mark.covers("generators: failing-jobs")
def test_a_prompt_that_fails_fails_alone(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, kind_of = decoding(), Runner.kind_of

    def failing(self: Runner, chunk: Chunk) -> tuple[object, int]:
        if chunk.sequence.loras:
            raise MemoryError("no room")
        return kind_of(self, chunk)

    monkeypatch.setattr(Runner, "kind_of", failing)
    bad, good = asking(30, 20, loras=[ScriptedLora(3)]), asking(31, 20)
    generator.enqueue([bad, good])
    results = generator.iterate()
    assert [type(result["exception"]) for result in results if result["job"] is bad and result["eos"]] == [MemoryError]
    assert passes(generator) == []
    clock.now += LIMIT
    assert streamed_tokens(drain(generator)[good]) == naive(generator, prompt(31, 20)[0].tolist(), 4)


@pytest.mark.parametrize("bad", [-1, -0.001, True, None, float("inf"), float("nan"), "0.05"])
def test_waits_that_are_none_are_rejected(bad: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt_wait_seconds is .*at least 0: 0 lets no prompt wait"):
        make(prompt_wait_seconds=bad)


def test_a_model_in_lockstep_takes_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedModel, "in_lockstep", True)
    with pytest.raises(RequestError, match=r"prompt_wait_seconds is 0\.05.*pass 0"):
        make(prompt_wait_seconds=0.05)
    make(prompt_wait_seconds=0)


def test_without_the_option_no_clock_is_read_and_passes_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_wait, "monotonic", lambda: pytest.fail("the clock was read"))
    generator = make(cache_tokens=8192, max_batch_size=6)
    steps: list[list[int]] = []
    arriving = [(0, 30, 40), (0, 31, 50), (1, 32, 21), (2, 33, 6), (2, 33, 30), (3, 34, 70), (3, 35, 9), (9, 36, 64)]
    for number in range(60):
        generator.enqueue([asking(name, length, 5) for at, name, length in arriving if at == number])
        before = len(passes(generator))
        step(generator)
        steps.append(passes(generator)[before:])
    assert generator.num_remaining_jobs() == 0
    assert [one for one in steps if one] == [[56], [55], [6, 25], [64], [6], [9], [64]]


@dataclass
class Ask:
    """A request as data, so that it can be made twice."""

    arrives: int
    words: list[int]
    length: int
    new: int
    pair: bool = False
    cancelled_after: int | None = None

    def job(self) -> ExLlamaV2DynamicJob:
        rows = [torch.cat([prompt(word, 18) for word in self.words], dim=1)[:, : self.length]]
        chosen = Settings(temperature=1.0, top_k=0, top_p=0)
        if self.pair:
            rows.append(prompt(9, 7))
            chosen.cfg_scale = 1.5
        return ExLlamaV2DynamicJob(rows, self.new, gen_settings=chosen, seed=self.length)


asks = st.builds(
    Ask,
    arrives=st.integers(0, 25),
    words=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    length=st.integers(1, 72),
    new=st.integers(1, 30),
    pair=st.sampled_from([False, False, False, True]),
    cancelled_after=st.sampled_from([None, None, None, None, 1, 3, 8]),
)


def play(
    generator: ExLlamaV2DynamicGenerator, requests: list[Ask], after: Callable[[Results, list[dict[str, Any]]], None]
) -> list[list[int]]:
    """Run requests as they arrive; the tokens of those that were not cancelled. `after` is called after each step."""
    jobs = [ask.job() for ask in requests]
    results: Results = {one: [] for one in jobs}
    for number in range(3000):
        for ask, one in zip(requests, jobs, strict=True):
            if ask.arrives == number:
                generator.enqueue(one)
            if ask.cancelled_after is not None and ask.arrives + ask.cancelled_after == number:
                generator.cancel(one)
        found = generator.iterate()
        for result in found:
            results[result["job"]].append(result)
        check_pages(generator)
        after(results, found)
        if number > 40 and not generator.num_remaining_jobs():
            break
    assert all(found[-1]["eos"] for found in results.values())
    reasons = [results[one][-1]["eos_reason"] for one in jobs]
    return [
        [] if reason == "cancelled" else streamed_tokens(results[one])
        for one, reason in zip(jobs, reasons, strict=True)
    ]


@examples(200, 6)
@given(
    st.lists(asks, min_size=12, max_size=26),
    st.lists(st.floats(0.0, 0.03), min_size=1, max_size=20),
    st.sampled_from([0.0, 0.004, LIMIT, 3600.0]),
    st.sampled_from([None, 12]),
    st.sampled_from(["none", "ngram", "model"]),
    st.integers(6, 24),
)
@pytest.mark.covers("generators: prompt-chunks", "generators: failing-jobs")
def test_waiting_changes_no_token_and_ends_in_time(
    requests: list[Ask], took: list[float], seconds: float, kinds: int | None, drafts: str, batch: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        started: dict[ExLlamaV2DynamicJob, float] = {}
        known = 0

        def looked(results: Results, found: list[dict[str, Any]]) -> None:
            nonlocal known
            began = clock.now
            computed = passes(generator)[known:]
            known += len(computed)
            for result in found:
                if result["stage"] == "started":
                    started[result["job"]] = began
            full = sum(computed) > CHUNK - generator.page_size
            for one, since in list(started.items()):
                if one.times.first_prefill is not None or one.is_finished:
                    del started[one]
                else:
                    assert began - since < seconds or full
            clock.now += took[len(generator.model.calls) % len(took)]  # type: ignore[attr-defined]

        def made(seconds: float) -> ExLlamaV2DynamicGenerator:
            one = speculate(drafts, cache_tokens=4096, max_batch_size=batch, prompt_wait_seconds=seconds)
            one.model.invariant_tokens = lambda: kinds  # type: ignore[method-assign]
            return one

        generator = made(seconds)
        waited = play(generator, requests, looked)
        plain = play(made(0.0), requests, lambda *_: None)
        # A cancelled job may have ended before in one of the runs.
        assert all(a == b or ask.cancelled_after for a, b, ask in zip(waited, plain, requests, strict=True))
