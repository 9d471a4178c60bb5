"""How many tokens are drafted: as many as give the most tokens per second. The tokens stay the same."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl_core.contracts import ForwardResult
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.dynamic.draft_length import DraftLength, geometric
from exl_generate.testing import (
    ScriptedCache,
    ScriptedConfig,
    ScriptedModel,
    check_pages,
    drain,
    streamed_tokens,
)
from exl_generate.testing.small import PAGE, TOKENIZER, VOCAB, ids, job

Settings = ExLlamaV2Sampler.Settings
MOST = 4


class Clock:
    """Seconds that pass only where a script says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def simulate(
    cost: Callable[[int, int], float],
    rate: Callable[[int], float],
    steps: int,
    review: float | None = None,
    jobs: int = 1,
) -> tuple[list[int], float, float]:
    """Steps with `cost(step, guesses)` seconds, in which guesses hold at `rate(step)`. `review`: seconds of one, None:
    there are none. Returns the guesses of each step, all seconds and those of reviews."""
    rng = random.Random(1)
    length = DraftLength(MOST, Clock())
    acceptances = [length.acceptance() for _ in range(jobs)]
    taken, seconds, reviewed = [], 0.0, 0.0
    for step in range(steps):
        k = length.plan([geometric(acceptance.rate, MOST) for acceptance in acceptances])
        taken.append(k)
        if k == 0 and review is not None and length.review_due():
            held = sum(rng.random() < rate(step) for _ in range(48))
            acceptances[0].review(48, held)
            length.reviewed(review)
            reviewed += review
        seconds += cost(step, k)
        length.record(jobs, k, cost(step, k))
        for acceptance in acceptances if k else []:
            held = next((i for i in range(k) if rng.random() >= rate(step)), k)
            acceptance.learn(k, held)
    return taken, seconds + reviewed, reviewed


def test_a_slow_draft_is_left_out() -> None:
    taken, seconds, _ = simulate(lambda _, k: 1.0 + k, lambda _: 0.8, 1000, review=6.0)
    assert sum(map(bool, taken[20:])) <= 10
    assert seconds < 1.08 * 1000  # 0.04 of it in the first comparison


def test_a_fast_draft_that_holds_is_as_long_as_allowed() -> None:
    taken, _, _ = simulate(lambda _, k: 1.0 + 0.1 * k, lambda _: 0.97, 1000)
    assert taken[20:].count(MOST) > 0.95 * len(taken[20:])


def test_the_best_length_lies_between() -> None:
    """Expected speeds of 0 to 4 guesses: 1, 1.28, 1.31, 1.24, 1.15."""
    taken, _, _ = simulate(lambda _, k: 1.0 + 0.25 * k, lambda _: 0.6, 1000)
    assert sum(taken.count(k) for k in (1, 2, 3)) > 0.85 * len(taken)
    assert sum(taken.count(k) for k in (1, 2)) > 0.6 * len(taken)


def test_wide_steps_that_are_dear_are_avoided_where_narrow_ones_are_not() -> None:
    """The cost is that of a GPU whose kernels take few rows for the price of one."""
    taken, _, _ = simulate(lambda _, k: 1.05 if k == 1 else 1.0 if k == 0 else 3.0, lambda _: 0.9, 2000)
    assert taken[-100:].count(1) > 90


def test_drafting_resumes_when_guesses_begin_to_hold() -> None:
    taken, _, _ = simulate(lambda _, k: 1.0 + 0.2 * k, lambda step: 0.05 if step < 600 else 0.95, 1500, review=2.0)
    assert taken[300:600].count(0) > 280
    assert taken[-500:].count(MOST) > 450


def test_drafting_resumes_when_it_gets_cheap() -> None:
    taken, _, _ = simulate(lambda step, k: 1.0 + k * (2.0 if step < 500 else 0.05), lambda _: 0.95, 8000, review=2.0)
    assert taken[200:500].count(0) > 290
    assert taken[-500:].count(MOST) > 450


@pytest.mark.parametrize("fast", [False, True])
def test_spikes_of_a_busy_machine_do_not_decide(fast: bool) -> None:
    rng = random.Random(7)

    def cost(_: int, k: int) -> float:
        return (1.0 + k * (0.1 if fast else 1.0)) * (
            rng.uniform(5, 30) if rng.random() < 0.1 else rng.uniform(0.9, 1.1)
        )

    taken, _, _ = simulate(cost, lambda _: 0.9, 2000, review=3.0)
    assert sum(k >= 2 if fast else k == 0 for k in taken[50:]) > 0.9 * len(taken[50:])


def test_reviews_cost_a_fixed_share_of_the_time() -> None:
    _, seconds, reviewed = simulate(lambda _, k: 1.0 + k, lambda _: 0.1, 5000, review=10.0)
    assert 0 < reviewed < 0.03 * seconds


def test_a_stopped_clock_leaves_the_length_as_asked_for() -> None:
    taken, _, _ = simulate(lambda *_: 0.0, lambda _: 0.5, 200)
    assert taken[20:].count(MOST) > 170


def test_other_batch_sizes_begin_with_what_is_known() -> None:
    length = DraftLength(MOST, Clock())
    for size in (1, 2, 3, 9):
        rates = [geometric(0.5, MOST)] * size
        for _ in range(100):
            k = length.plan(rates)
            length.record(size, k, size * (1.0 + k))
        assert [length.plan(rates) for _ in range(5)] == [0] * 5
    assert DraftLength(0).plan([geometric(0.9, 0)]) == 0


# ---- in a generator ------------------------------------------------------------------------------------------------


class Timed(ScriptedModel):
    """A pass takes `base` seconds, and `row` more for each id."""

    def __init__(self, clock: Clock, base: float, row: float, script: Any = None) -> None:
        super().__init__(ScriptedConfig(vocab_size=VOCAB, max_seq_len=1024), script)
        self.clock, self.base, self.row = clock, base, row

    def forward_chunk(self, input_ids: torch.Tensor, cache: Any = None, **kw: Any) -> ForwardResult:  # type: ignore[override]
        self.clock.now += self.base + self.row * input_ids.numel()
        return super().forward_chunk(input_ids, cache, **kw)


def timed(base: float, row: float, draft: float, draft_script: Any = None, script: Any = None, **kw: Any) -> Any:
    """A generator with a draft model, and its clock."""
    clock = Clock()
    model, small = Timed(clock, base, row, script), Timed(clock, draft, draft * 0.05, draft_script)
    caches = [ScriptedCache(one, max_seq_len=1024) for one in (model, small)]
    generator = ExLlamaV2DynamicGenerator(
        *(model, caches[0], TOKENIZER), page_size=PAGE, draft_model=small, draft_cache=caches[1], **kw
    )
    generator.drafter.length.clock = clock
    return generator, clock


def speed(generator: Any, clock: Clock, new: int = 600) -> tuple[list[int], float, dict[str, Any]]:
    one = job("the abc", new)
    generator.enqueue(one)
    began = clock.now
    results = drain(generator)[one]
    check_pages(generator)
    return streamed_tokens(results), new / (clock.now - began), results[-1]


def test_a_draft_model_that_costs_more_than_it_saves_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """A CPU: a pass over 5 rows costs 5 times as much as one over 1."""
    generator, clock = timed(0.0, 1.0, 0.3)
    tokens, fast, last = speed(generator, clock)
    model = Timed(clock, 0.0, 1.0)
    plain = ExLlamaV2DynamicGenerator(model, ScriptedCache(model, max_seq_len=1024), TOKENIZER, page_size=PAGE)
    expected, most, _ = speed(plain, clock)
    assert tokens == expected
    assert fast > 0.93 * most
    assert last["accepted_draft_tokens"] + last["rejected_draft_tokens"] < 60
    assert last["rejected_draft_tokens"] == 0  # the models are the same
    assert "draft model failed" not in caplog.text


def test_a_draft_model_that_pays_is_used(caplog: pytest.LogCaptureFixture) -> None:
    generator, clock = timed(1.0, 0.02, 0.1)
    _, fast, last = speed(generator, clock)
    assert fast > 2.5
    assert last["accepted_draft_tokens"] > 400
    assert "draft model failed" not in caplog.text


def test_a_draft_model_comes_back_when_the_text_gets_predictable(caplog: pytest.LogCaptureFixture) -> None:
    """After 300 ids a token follows from the one before it, as the draft model has thought from the start."""
    follows = lambda context: 3 + (context[-1] - 2) % 20  # noqa: E731
    generator, clock = timed(1.0, 0.02, 0.1, follows, lambda context: follows(context) if len(context) > 300 else None)
    first, second = job("the abc", 280), job("the abc", 900)
    generator.enqueue(first)
    drain(generator)
    assert first.drafted_tokens < 120
    began = clock.now
    generator.enqueue(second)
    drain(generator)
    assert second.accepted_draft_tokens > 350
    assert 900 / (clock.now - began) > 1.3
    assert "draft model failed" not in caplog.text


def test_ngram_guesses_are_chosen_by_gain_too() -> None:
    clock = Clock()
    found = []
    for base, row in ((0.0, 1.0), (1.0, 0.01)):
        model = Timed(clock, base, row, lambda context: 3 + len(context) % 7 if len(context) % 3 else 12)
        generator = ExLlamaV2DynamicGenerator(
            model, ScriptedCache(model, max_seq_len=1024), TOKENIZER, page_size=PAGE, use_ngram_draft=True
        )
        generator.drafter.length.clock = clock
        found.append(speed(generator, clock))
    (dear, slow, dear_last), (cheap, fast, cheap_last) = found
    assert dear == cheap
    assert slow > 0.93
    assert fast > 2.5
    assert cheap_last["accepted_draft_tokens"] > 400 > dear_last["accepted_draft_tokens"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("row", "least"), [(0.01, 0.97), (1.0, 0.9)], ids=["cheap rows", "dear rows"])
@pytest.mark.parametrize("max_ngram", [4, 32])
def test_a_text_that_never_agrees_loses_little(row: float, least: float, max_ngram: int) -> None:
    """Each pair of tokens comes once: short contexts match, and what followed them never follows again."""
    order = [3 + (a * b) % 37 for b in range(1, 37) for a in range(37)]
    clock = Clock()
    model = Timed(clock, 1.0 - row, row, lambda context: order[len(context) % len(order)])
    generator = ExLlamaV2DynamicGenerator(
        *(model, ScriptedCache(model, max_seq_len=1024), TOKENIZER),
        page_size=PAGE,
        use_ngram_draft=True,
        max_ngram=max_ngram,
    )
    generator.drafter.length.clock = clock
    _, fast, last = speed(generator, clock, 900)
    assert fast > least
    assert last["accepted_draft_tokens"] < 90


# ---- tokens --------------------------------------------------------------------------------------------------------


class Whim(DraftLength):
    """Any length in any step, and a review whenever it likes."""

    def __init__(self, most: int, seed: int) -> None:
        super().__init__(most)
        self._rng = random.Random(seed)

    def plan(self, jobs: Sequence[Sequence[float]], overhead: Callable[[], float] = lambda: 0.0) -> int:
        overhead()
        if self._rng.random() < 0.1:
            self.current = self._rng.choice((0, self.most))  # decides whether prompts are computed
        return self._rng.choice((0, 0, 0, *range(self.most + 1)))

    def review_due(self) -> bool:
        return self._rng.random() < 0.3


ASKS = st.fixed_dictionaries(
    {
        "prompt": st.text("abc .", min_size=1, max_size=50),
        "new": st.integers(0, 60),
        "style": st.sampled_from(["greedy", "plain", "pair", "bans", "share", "hook", "state"]),
        "arrives": st.integers(0, 12),
        "cancelled": st.sampled_from([None, None, None, 9]),
    }
)


def asked(ask: dict[str, Any], seed: int) -> ExLlamaV2DynamicJob:
    style = ask["style"]
    given = Settings.greedy() if style in ("greedy", "bans") else Settings(temperature=1.0, top_k=3)
    prompts: Any = ids(ask["prompt"])
    if style == "pair":
        given.cfg_scale = 1.5
        prompts = [prompts, ids("ab" + ask["prompt"])]
    if style == "hook":
        given.post_sampling_hooks = [lambda result: None]
    return ExLlamaV2DynamicJob(
        prompts,
        ask["new"],
        gen_settings=given,
        seed=seed,
        banned_strings=["ab", "ca", "b "] if style == "bans" else None,
        max_rq_tokens=5 if style == "share" else None,
        return_hidden_state=style == "state",
    )


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(
    st.lists(ASKS, min_size=1, max_size=6),
    st.integers(0, 10**6),
    st.sampled_from(["model", "bad model", "ngram"]),
    st.sampled_from([10, 24]),
)
def test_tokens_are_the_same_with_any_drafts_at_any_step(
    asks: list[dict[str, Any]], seed: int, how: str, pages: int
) -> None:
    """Also where the draft cache has gaps: K/V of another text would be an error of the scripted draft model."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("exl_generate.dynamic")
    logger.addHandler(handler)
    try:
        told = []
        for drafting in (False, True):
            config = ScriptedConfig(vocab_size=VOCAB, max_seq_len=160)
            script = lambda context: 3 + len(context) % 3 if len(context) % 4 else None  # noqa: E731
            model = ScriptedModel(config, script)
            draft = ScriptedModel(config, script if how == "model" else None)
            caches = [ScriptedCache(one, max_seq_len=16 * pages) for one in (model, draft)]
            kw: dict[str, Any] = {"use_ngram_draft": True}
            if how != "ngram":
                kw = {"draft_model": draft, "draft_cache": caches[1]}
            generator = ExLlamaV2DynamicGenerator(
                *(model, caches[0], TOKENIZER), page_size=16, max_batch_size=4, **(kw if drafting else {})
            )
            if drafting:
                generator.drafter.length = Whim(generator.num_draft_tokens, seed)
            jobs = [asked(ask, at) for at, ask in enumerate(asks)]
            for at in range(2000):
                for one, ask in zip(jobs, asks, strict=True):
                    if ask["arrives"] == at:
                        generator.enqueue(one)
                    if ask["cancelled"] == at:
                        generator.cancel(one)
                generator.iterate()
                check_pages(generator)
                if at > 12 and not generator.num_remaining_jobs():
                    break
            assert all(one.is_finished and not one.has_failed for one in jobs)
            told.append(
                [one.sequence.ids.tolist() for one, ask in zip(jobs, asks, strict=True) if not ask["cancelled"]]
            )
        assert told[0] == told[1]
        assert heard == []
    finally:
        logger.removeHandler(handler)
