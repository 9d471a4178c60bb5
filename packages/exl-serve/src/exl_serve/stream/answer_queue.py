"""Events that wait to be written to one client; consecutive pieces of a kind are joined."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence

from exl_serve.engine.events import TokenLogprob
from exl_serve.stream.events import AnswerEvent, Begun, Content, Error, Finish, Reasoning, ToolArgs

__all__ = ["HIGH_WATER", "LOW_WATER", "AnswerQueue"]

HIGH_WATER, LOW_WATER = 64 << 10, 16 << 10
"""Bytes that wait: above the first number the request is paused, below the second it continues."""
EVENT_BYTES, ID_BYTES, LOGPROB_BYTES = 256, 36, 120
"""About what an event, a token's id, and a log-probability with its token take in memory; in a stream it is similar."""

Piece = Content | Reasoning | ToolArgs


class AnswerQueue:
    """Events of one answer, in order. `put` never blocks; `take` waits for events and returns them."""

    def __init__(self, pause: Callable[[], None] | None = None, resume: Callable[[], None] | None = None) -> None:
        self._events: list[AnswerEvent] = []
        #: tokens that a choice must have in the queue, or another event, before `take` returns its events
        self.interval = 1
        #: tokens of the waiting pieces, by choice
        self._tokens: dict[int, int] = {}
        #: choices whose events `take` may return
        self._ready: set[int] = set()
        #: whether `take` can return at once
        self._enough = False
        #: future on which a `take` waits
        self._waiter: asyncio.Future[None] | None = None
        self._pause, self._resume = pause, resume
        self._paused = False
        #: bytes in the queue
        self.size = 0
        self.closed = False
        #: time at which a waiting `take` returns what there is; a timer of an earlier `take` is set again
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def put(self, event: AnswerEvent) -> None:
        """Add an event; pauses the request when too much waits."""
        events = self._events
        self.size += _size(event)
        if isinstance(event, Piece):
            at = -1 if self.interval == 1 else _last_of(events, event.choice)
            last = events[at] if events else None
            if type(last) is type(event) and isinstance(last, Piece) and _joins(last, event):
                events[at] = _joined(last, event)
                self.size -= EVENT_BYTES
            else:
                events.append(event)
            if self.interval > 1:
                self._count(event)
            self._enough = self._enough or self.interval == 1 or bool(self._ready)
        else:
            events.append(event)
            # An error ends all choices.
            self._ready.update(one.choice for one in ([event] if not isinstance(event, Error) else events))
            self._enough = True
        if self.size > HIGH_WATER and not self._paused and self._pause is not None:
            self._paused = True
            self._pause()
        self._enough = self._enough or self._paused
        if self._waiter is not None and self._enough:
            self._wake()

    def _count(self, event: Piece) -> None:
        """Count the tokens of a waiting piece for its choice."""
        tokens = 1 if isinstance(event, ToolArgs) else max(1, len(event.ids))
        self._tokens[event.choice] = tokens = self._tokens.get(event.choice, 0) + tokens
        if tokens >= self.interval:
            self._ready.add(event.choice)

    def set_interval(self, interval: int) -> None:
        """Set `interval`, also for the pieces that wait already."""
        if interval == self.interval:
            return
        self.interval = interval
        for event in self._events:
            if isinstance(event, Piece):
                self._count(event)
        self._enough = interval == 1 or bool(self._ready) or self._paused

    def close(self) -> None:
        """Let `take` return at once from now on, because the client reads no more."""
        self.closed = True
        self._wake()
        self._stop_timer()

    def release(self) -> None:
        """Release the timer and the request: no event is taken any more."""
        self._stop_timer()
        self._pause = self._resume = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def take(self, seconds: float | None = None) -> list[AnswerEvent]:
        """Wait for events and return them: those of choices that have `interval` tokens or another event.

        After `seconds`, or while the request is paused, the result has all events. It is empty once the queue is
        closed.
        """
        if not self._enough and not self.closed:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            if seconds is not None:
                self._give_up_after(loop, seconds)
            try:
                await self._waiter
            finally:
                self._waiter, self._deadline = None, math.inf
        return [] if self.closed else self._taken()

    def _taken(self) -> list[AnswerEvent]:
        events, ready, left = self._events, self._ready, list[AnswerEvent]()
        if self.interval > 1 and ready and not self._paused:
            left = [one for one in events if one.choice not in ready]
            events = [one for one in events if one.choice in ready]
        self._events, self._ready, self._enough = left, set(), False
        self._tokens = {choice: tokens for choice, tokens in self._tokens.items() if left and choice not in ready}
        self.size = sum(map(_size, left))
        return events

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _give_up_after(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """Set the timer of a waiting `take`. A timer that fires too early is set again: tokens need no timer each."""
        self._deadline = loop.time() + seconds
        if self._timer is None or self._timer_at > self._deadline:
            self._stop_timer()
            self._set_timer(loop)

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer_at = self._deadline
        self._timer = loop.call_at(self._deadline, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if loop.time() >= self._deadline:
            self._wake()
        elif self._deadline < math.inf:
            self._set_timer(loop)

    def written(self) -> None:
        """Record that the taken events have been written or kept: a paused request continues once little waits."""
        if self._paused and self.size < LOW_WATER and self._resume is not None:
            self._paused = False
            self._resume()


def _size(event: AnswerEvent) -> int:
    """Return about how many bytes an event takes."""
    if isinstance(event, Error):
        return EVENT_BYTES
    if isinstance(event, Begun):
        return EVENT_BYTES + _size_of(event.prompt_logprobs)
    size = EVENT_BYTES + ID_BYTES * len(event.hidden)
    if isinstance(event, Piece):
        size += len(event.text) if event.text.isascii() else 4 * len(event.text)
    if isinstance(event, Content | Reasoning | Finish):
        size += ID_BYTES * len(event.ids) + (_size_of(event.logprobs) if event.logprobs else 0)
    return size


def _size_of(logprobs: Sequence[TokenLogprob]) -> int:
    return LOGPROB_BYTES * (len(logprobs) + sum(len(one.top) for one in logprobs))


def _last_of(events: list[AnswerEvent], choice: int) -> int:
    """Return the place of a choice's last event; -1 where it has none."""
    return next((at for at in range(len(events) - 1, -1, -1) if events[at].choice == choice), -1)


def _joins(last: Piece, event: Piece) -> bool:
    if isinstance(last, ToolArgs) and isinstance(event, ToolArgs) and last.index != event.index:
        return False
    # A piece holds the tokens without text first.
    return last.choice == event.choice and not (event.hidden and not isinstance(last, ToolArgs) and last.ids)


def _joined(last: Piece, event: Piece) -> Piece:
    text, hidden = last.text + event.text, last.hidden + event.hidden
    if isinstance(last, ToolArgs) or isinstance(event, ToolArgs):
        return dataclasses.replace(last, text=text, hidden=hidden)
    return dataclasses.replace(
        last, text=text, ids=last.ids + event.ids, logprobs=last.logprobs + event.logprobs, hidden=hidden
    )
