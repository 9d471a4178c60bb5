"""Steps compute fewer prompt tokens while other jobs decode, so that these do not wait longer than asked."""

from __future__ import annotations

from typing import Any

import pytest

from exl_generate import ExLlamaV2DynamicGenerator
from exl_generate.dynamic import prompt_pace
from exl_generate.errors import RequestError
from exl_generate.testing import ScriptedModel, drain, streamed_tokens
from exl_generate.testing.small import ids, job, make

CHUNK, TOKEN_SECONDS = 64, 0.001
LONG = "the quick brown fox jumps over a lazy dog; " * 9


class Clock:
    """A clock that only the test moves, in place of that of the pace."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(prompt_pace, "perf_counter", lambda: self.now)

    def tokens(self, pace: prompt_pace.PromptPace, decoding: float, page: float, steps: int, pause: float = 0.0) -> int:
        """Run steps that each compute all the tokens they may; return those of the last one."""
        tokens = 0
        for _ in range(steps):
            tokens = pace.begin(True)
            pace.spent(tokens)
            self.now += decoding + page * tokens / 256
            pace.end()
            self.now += pause
        return tokens

    def decode(self, pace: prompt_pace.PromptPace, seconds: float) -> None:
        for _ in range(5):
            pace.begin(True)
            pace.spent(0)
            self.now += seconds
            pace.end()


def paced(monkeypatch: pytest.MonkeyPatch, target: float | None) -> ExLlamaV2DynamicGenerator:
    """A generator whose model takes a millisecond for each token of a prompt."""
    clock = Clock(monkeypatch)
    generator = make(model_len=512, cache_tokens=1024, max_chunk_size=CHUNK, target_step_seconds=target)
    compute = generator.model.forward_chunk

    def computing(input_ids: Any, *given: Any, **named: Any) -> Any:
        if input_ids.shape[-1] > 1:
            clock.now += TOKEN_SECONDS * input_ids.numel()
        return compute(input_ids, *given, **named)

    generator.model.forward_chunk = computing  # type: ignore[method-assign]
    return generator


def during_a_stream(generator: ExLlamaV2DynamicGenerator) -> tuple[list[int], list[list[int]]]:
    """Prompt tokens of each step that computes the long prompt while another job decodes, and the tokens of both."""
    stream, long = job("hello there", 120), job(LONG, 4)
    generator.enqueue(stream)
    results: dict[Any, list[dict[str, Any]]] = {stream: [], long: []}
    while not any(result["stage"] == "streaming" for result in results[stream]):
        for result in generator.iterate():
            results[result["job"]].append(result)
    generator.enqueue(long)
    before = generator.snapshot().prefilled_tokens
    steps = []
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            results[result["job"]].append(result)
        now = generator.snapshot().prefilled_tokens
        steps += [now - before] if now > before else []
        before = now
    return steps, [streamed_tokens(results[one]) for one in (stream, long)]


def test_a_step_with_running_streams_is_as_short_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, tokens = during_a_stream(paced(monkeypatch, 0.025))
    assert max(steps[4:]) <= 0.025 / TOKEN_SECONDS, steps
    usual, expected = during_a_stream(paced(monkeypatch, None))
    assert max(usual) == CHUNK
    assert tokens == expected


def test_prompts_alone_are_computed_in_whole_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = paced(monkeypatch, 0.001)
    alone = job(LONG, 2)
    generator.enqueue(alone)
    generator.iterate()
    assert generator.snapshot().prefilled_tokens == CHUNK
    drain(generator)


def test_a_step_computes_at_least_a_quarter_of_a_page_and_at_most_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, _ = during_a_stream(paced(monkeypatch, 1e-6))
    assert min(steps[4:-1]) == max(steps[4:-1]) == make().page_size // 4
    steps, _ = during_a_stream(paced(monkeypatch, 60.0))
    assert max(steps) == CHUNK
    assert sum(steps) == ids(LONG).shape[1] - 1


@pytest.mark.parametrize("bad", [0, -1.0, True, float("inf"), float("nan"), "1"])
def test_seconds_that_are_none_are_rejected(bad: Any) -> None:
    with pytest.raises(RequestError, match=r"target_step_seconds is .*positive number of seconds"):
        make(target_step_seconds=bad)


def test_a_model_in_lockstep_takes_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedModel, "in_lockstep", True)
    with pytest.raises(RequestError, match=r"target_step_seconds is 0\.05.*pass None"):
        make(target_step_seconds=0.05)
    make()


@pytest.mark.parametrize(
    ("decoding", "page", "fit"),
    [
        (0.03, 0.005, 1024),
        (0.026, 0.003, 2048),
        (0.02, 0.005, 1536),
        (0.015, 0.012, 512),
        (0.04, 0.009, 256),
        (0.04, 0.012, 128),
        (0.04, 0.03, 64),
        (0.06, 0.005, 256),
        (0.06, 0.1, 64),
    ],
)
def test_prompts_fill_the_time_that_decoding_leaves(
    monkeypatch: pytest.MonkeyPatch, decoding: float, page: float, fit: int
) -> None:
    clock, pace = Clock(monkeypatch), prompt_pace.PromptPace(0.05, 2048, 256)
    clock.decode(pace, decoding)
    assert fit - 256 <= clock.tokens(pace, decoding, page, 100) <= fit
    if fit <= 256:
        assert clock.tokens(pace, decoding, page, 1) == fit


def test_steps_of_equal_cost_get_equal_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), prompt_pace.PromptPace(0.05, 1536, 256)
    clock.decode(pace, 0.004)
    clock.tokens(pace, 0.004, 0.00691, 40)
    assert {clock.tokens(pace, 0.004, 0.00691, 1) for _ in range(40)} == {1536}  # which take 45.5 ms


def test_a_slow_first_step_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a second, which captured something, makes no later step of a prompt too long."""
    clock, pace = Clock(monkeypatch), prompt_pace.PromptPace(0.05, 2048, 256)
    pace.begin(True)
    pace.spent(0)
    clock.now += 1.0
    pace.end()
    for _ in range(40):
        before = clock.now
        clock.tokens(pace, 0.01, 0.0128, 1)
        assert clock.now - before < 0.055
    clock.decode(pace, 0.01)
    for _ in range(40):
        before = clock.now
        clock.tokens(pace, 0.01, 0.0128, 1)
        assert clock.now - before < 0.055


@pytest.mark.parametrize("own", [0.045, 0.1])
def test_parts_of_a_page_that_shorten_no_step_are_not_taken(monkeypatch: pytest.MonkeyPatch, own: float) -> None:
    """A pass may take nearly as long for few tokens as for a page: parts would only delay the prompt's end."""
    clock, pace = Clock(monkeypatch), prompt_pace.PromptPace(0.05, 2048, 256)
    for _ in range(2):
        clock.decode(pace, 0.01)
        found = [clock.tokens(pace, 0.01 + own, 0.0077, 1) for _ in range(400)]
        assert found.count(256) > 380


def test_steps_of_parts_of_a_page_cost_more_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit settles where each pass costs some time of its own."""
    clock, pace = Clock(monkeypatch), prompt_pace.PromptPace(0.05, 2048, 256)
    clock.decode(pace, 0.005)
    found = {clock.tokens(pace, 0.025, 0.04, 1) for _ in range(200)}
    assert {clock.tokens(pace, 0.025, 0.04, 1) for _ in range(50)} == {128}
    assert found <= {64, 128, 256, 512}


@pytest.mark.parametrize("page", [1, 2, 3, 8])
def test_pages_of_few_tokens(monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    clock, pace = Clock(monkeypatch), prompt_pace.PromptPace(0.05, 2048, page)
    clock.decode(pace, 0.06)
    assert clock.tokens(pace, 0.06, 100.0, 50) == max(1, page // 4 or page // 2)


def test_a_pause_of_the_caller_is_no_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), prompt_pace.PromptPace(0.05, 2048, 256)
    clock.decode(pace, 0.01)
    before = clock.tokens(pace, 0.01, 0.01, 50)
    assert before in (768, 1024)
    clock.tokens(pace, 0.01, 0.01, 1, pause=3.0)
    assert clock.tokens(pace, 0.01, 0.01, 1) == before


@pytest.mark.parametrize("target", [1e308, 5e-324])
def test_extreme_targets(monkeypatch: pytest.MonkeyPatch, target: float) -> None:
    clock, pace = Clock(monkeypatch), prompt_pace.PromptPace(target, 2048, 256)
    assert clock.tokens(pace, 0.0, 1e-3, 9) == (2048 if target > 1 else 64)
