"""Advance jobs over the ids of an earlier run, in small parts between the steps of the running jobs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from exl_serve.engine.groups import Group

if TYPE_CHECKING:
    from exl_generate import ExLlamaV2DynamicJob

__all__ = ["Resuming"]

SECONDS, IDS = 0.001, 32
"""Seconds between two steps, and ids at a time. At least one part is done, so that resuming never stops."""


class Resuming:
    """Completions whose jobs have ids of an earlier run, oldest first.

    `done` receives each with its job once `generator.enqueue` has nothing to advance over, or with the error of a job
    that cannot continue.
    """

    def __init__(
        self, generator: Any, done: Callable[[Group, int, ExLlamaV2DynamicJob, Exception | None], None]
    ) -> None:
        self._generator, self._done = generator, done
        self.waiting: deque[tuple[Group, int]] = deque()

    def add(self, group: Group, choice: int, job: ExLlamaV2DynamicJob) -> None:
        """Queue a completion."""
        group.resuming[choice] = job
        self.waiting.append((group, choice))

    def drop(self, group: Group) -> None:
        """Give up a request's completions."""
        if group.resuming:
            self.waiting = deque(pair for pair in self.waiting if pair[0] is not group)
            for job in group.resuming.values():
                self._generator.discard(job)
            group.resuming.clear()

    def advance(self) -> None:
        """Do the next part; called between two steps."""
        until = time.monotonic() + SECONDS
        while self.waiting:
            group, choice = self.waiting[0]
            job, failed = group.resuming[choice], None
            try:
                ready = self._generator.prepare(job, IDS)
            except Exception as error:
                ready, failed = True, error
            if ready:
                self.waiting.popleft()
                del group.resuming[choice]
                self._done(group, choice, job, failed)
            if time.monotonic() >= until:
                return
