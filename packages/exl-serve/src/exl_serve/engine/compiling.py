"""Compile constraints and encode images, which may take seconds, outside the engine thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from exl_filters.trial import MOST_WORKERS
from exl_serve.engine.fair_queue import FairQueue
from exl_serve.engine.groups import Group
from exl_serve.engine.jobs import compile_constraints
from exl_serve.engine.vision import Vision

__all__ = ["Compiling"]

COMPILERS, COMPILERS_OF_A_KEY = MOST_WORKERS, MOST_WORKERS - 1
"""Requests prepared at once, and those of one key: no key takes all threads and processes."""


class Compiling:
    """Requests whose constraints are being compiled and whose images are being encoded, in fair turns of their keys.

    `done` receives each of them on the thread that calls `deliver`, with the error that its preparation has raised.
    `wake` is called from a thread of the pool when there is one to deliver.
    """

    def __init__(
        self,
        generator: Any,
        vision: Vision | None,
        done: Callable[[Group, Exception | None], None],
        wake: Callable[[], None],
    ) -> None:
        self._generator, self._vision, self._done, self._wake = generator, vision, done, wake
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: FairQueue[Group] = FairQueue(COMPILERS, COMPILERS_OF_A_KEY)
        #: requests that `deliver` passes on
        self.made: deque[tuple[Group, tuple[Sequence[Any], Sequence[Any]] | Exception]] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, group: Group) -> None:
        """Queue a request."""
        group.compiling = True
        self._waiting.add(group.request.key, group)
        self._next()

    def drop(self, group: Group) -> None:
        """Give up a request. What a thread has begun of it goes on, and is not delivered."""
        if group.compiling:
            self._waiting.remove(group.request.key, group)

    def deliver(self) -> None:
        """Pass on the requests that are ready."""
        while self.made:
            group, made = self.made.popleft()
            self._waiting.done(group.request.key)
            self._next()
            if group.cancelled:
                continue
            group.compiling = False
            if isinstance(made, Exception):
                self._done(group, made)
            else:
                group.filters, group.embeddings = made
                self._done(group, None)

    def close(self) -> None:
        """Begin no further request."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(COMPILERS, thread_name_prefix="exl-compile")
        while (group := self._waiting.take()) is not None:
            self._pool.submit(self._make, group)

    def _make(self, group: Group) -> None:
        """Prepare one request; runs on a thread of the pool."""
        generator, vision, request = self._generator, self._vision, group.request
        made: tuple[Sequence[Any], Sequence[Any]] | Exception
        try:
            filters = compile_constraints(request.constraints, generator.model, generator.tokenizer)
            made = filters, vision.embed(request.media, request.cache_salt) if vision is not None else ()
        except Exception as error:
            made = error
        self.made.append((group, made))
        if not self._closed:
            self._wake()
