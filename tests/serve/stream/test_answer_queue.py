"""Waiting for events of one answer: a timer that serves many waits."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from exl_serve.engine.events import TokenLogprob, Usage
from exl_serve.stream.answer_queue import HIGH_WATER, AnswerQueue
from exl_serve.stream.events import AnswerEvent, Begun, Content, Error, Finish, Reasoning, ToolArgs, ToolBegin

SOON, NEVER = 0.01, 1000.0


def test_a_wait_gives_up() -> None:
    async def run() -> None:
        queue = AnswerQueue()
        assert await queue.take(SOON) == []
        assert await queue.take(SOON) == []
        queue.put(Content(0, "a"))
        assert [event.text for event in await queue.take(SOON) if isinstance(event, Content)] == ["a"]
        queue.release()

    asyncio.run(run())


def test_an_earlier_wait_does_not_end_a_later_one() -> None:
    async def run() -> None:
        queue = AnswerQueue()
        for first, second in ((SOON, NEVER), (NEVER, SOON), (SOON, None)):
            waiting = asyncio.create_task(queue.take(first))
            await asyncio.sleep(0)
            queue.put(Content(0, "a"))
            assert await waiting
            later = asyncio.create_task(queue.take(second))
            await asyncio.sleep(5 * SOON)
            if second == SOON:
                assert await later == []
                continue
            assert not later.done()
            queue.put(Content(0, "b"))
            assert await later
        queue.release()

    asyncio.run(run())


def test_a_box_that_is_closed_keeps_no_timer() -> None:
    async def run() -> None:
        queue = AnswerQueue()
        waiting = asyncio.create_task(queue.take(NEVER))
        await asyncio.sleep(0)
        queue.close()
        assert await waiting == []
        assert await queue.take(NEVER) == []
        kept = weakref.ref(queue)
        del queue, waiting
        gc.collect()
        assert kept() is None, "a timer of the event loop holds it"

    asyncio.run(run())


def test_each_choice_waits_for_its_own_tokens() -> None:
    async def run() -> None:
        queue = AnswerQueue()

        def put(choice: int, tokens: int) -> None:
            for _ in range(tokens):
                queue.put(Content(choice, "a", (1,)))

        def sizes(events: list[AnswerEvent]) -> dict[int, int]:
            return {one.choice: len(one.ids) for one in events if isinstance(one, Content)}

        put(0, 3)
        put(1, 2)
        queue.set_interval(4)
        assert sizes(await queue.take(SOON)) == {0: 3, 1: 2}, "it has waited long enough"
        put(0, 3)
        put(1, 2)
        waiting = asyncio.create_task(queue.take(NEVER))
        await asyncio.sleep(0)
        assert not waiting.done()
        put(0, 1)
        assert sizes(await waiting) == {0: 4}
        alone = AnswerQueue()
        alone.put(Content(1, "aa", (1, 1)))
        assert queue.size == alone.size, "only the other choice waits"
        queue.put(Finish(0, "stop", None, Usage(prompt_tokens=1, completion_tokens=7)))
        assert [type(one) for one in await queue.take(NEVER)] == [Finish]
        put(1, 2)
        assert sizes(await queue.take(NEVER)) == {1: 4}
        put(1, 1)
        put(2, 1)
        queue.put(Error(0, 500, "server_error", "engine_error", "failed"))
        assert sizes(await queue.take(NEVER)) == {1: 1, 2: 1}
        queue.release()

    asyncio.run(run())


SCORED = TokenLogprob(1, -1.0, tuple((i, -2.0) for i in range(20)))
SCORE_BYTES = 2000
"""The JSON text of a token with 20 others takes about as many."""
USAGE = Usage(prompt_tokens=1, completion_tokens=1)


@pytest.mark.parametrize(
    ("event", "held"),
    [
        (Content(0, "a" * 1000), 1000),
        (Content(0, "\U0001f98a" * 1000), 4000),
        (Content(0, "a", (1,), (SCORED,)), SCORE_BYTES),
        (Reasoning(0, "a", (1,), (SCORED,)), SCORE_BYTES),
        (Content(0, "a", (1,) * 100, hidden=(2,) * 100), 1600),
        (ToolArgs(0, 0, "a", (2,) * 100), 800),
        (ToolBegin(0, 0, "id", "name"), 200),
        (Finish(0, "stop", None, USAGE, 0, (1,), (SCORED,)), SCORE_BYTES),
        (Begun(0, 10, 0, (SCORED,) * 10), 10 * SCORE_BYTES),
    ],
)
@pytest.mark.parametrize("choices", [1, 2])
def test_events_of_all_kinds_pause_a_request_that_nobody_reads(event: AnswerEvent, held: int, choices: int) -> None:
    """Two choices: no event joins the one before."""

    async def run() -> None:
        calls: list[str] = []
        queue = AnswerQueue(lambda: calls.append("pause"), lambda: calls.append("resume"))
        most = 2 * HIGH_WATER // held
        for i in range(most):
            event.choice = i % choices
            queue.put(event)
        assert calls == ["pause"]
        await queue.take()
        queue.written()
        assert calls == ["pause", "resume"]

    asyncio.run(run())


def test_each_choice_has_events_of_its_own_that_count() -> None:
    async def run() -> None:
        calls: list[str] = []
        queue = AnswerQueue(lambda: calls.append("pause"))
        for i in range(HIGH_WATER // 100):
            queue.put(Content(i % 2, "a", (1,)))
        assert calls == ["pause"]

    asyncio.run(run())
