"""The dynamic generator for asyncio (spec/generators.md 3.22): rounds run in a thread, the event loop never waits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from exl_generate.dynamic import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exl_generate.errors import JobStateError
from exl_generate.interrupts import Unbroken

__all__ = ["ExLlamaV2DynamicGeneratorAsync", "ExLlamaV2DynamicJobAsync"]

log = logging.getLogger(__name__)

Result = dict[str, Any]


class ExLlamaV2DynamicGeneratorAsync:
    """Takes the arguments of `ExLlamaV2DynamicGenerator`, which is the attribute `generator`.

    Jobs may be submitted from any task, event loop or thread. Results go to their job alone; a job that fails gets
    its own last result and disturbs no other. After `close()` every consumer has seen its job end, and new jobs are
    refused.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.generator = ExLlamaV2DynamicGenerator(*args, **kwargs)
        # Weakly held: a job that nobody can read any more is cancelled.
        self._jobs: dict[ExLlamaV2DynamicJob, weakref.ref[ExLlamaV2DynamicJobAsync]] = {}
        self._cancels: deque[ExLlamaV2DynamicJob] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="exl-generate", daemon=True)
        self._thread.start()

    def enqueue(self, job: ExLlamaV2DynamicJobAsync) -> None:
        """Queue a job; raises what `ExLlamaV2DynamicGenerator.enqueue` raises, and then leaves nothing behind."""
        inner = job.job
        with Unbroken(), self._wake:
            if self._closing:
                raise JobStateError("the generator has been closed; make a new one")
            self._jobs[inner] = weakref.ref(job, lambda _: self._cancel_inner(inner))
            try:
                self.generator.enqueue(inner)
            except BaseException:
                del self._jobs[inner]
                raise
            self._wake.notify()

    async def cancel(self, job: ExLlamaV2DynamicJobAsync) -> None:
        """End a job and wait until its last result stands in its iterator. Finished jobs are left alone."""
        self.cancel_soon(job)
        await job.finished()

    def cancel_soon(self, job: ExLlamaV2DynamicJobAsync) -> None:
        """End a job at the next round, from any thread, without waiting."""
        self._cancel_inner(job.job)

    def _cancel_inner(self, job: ExLlamaV2DynamicJob) -> None:
        with Unbroken(), self._wake:
            self._cancels.append(job)
            self._wake.notify()

    async def close(self) -> None:
        """Cancel all jobs, deliver their last results and end the thread."""
        with Unbroken(), self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> ExLlamaV2DynamicGeneratorAsync:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _run(self) -> None:
        while self._wait():
            try:
                while self._cancels:
                    self.generator.cancel(self._cancels.popleft())
                for result in self.generator.iterate():
                    self._deliver(result)
            except BaseException:  # nothing that user code raises may end this thread: it is not the main one
                log.exception("a round of the generator failed; its jobs go on with the next one")
        for job in list(self._jobs):
            self.generator.cancel(job)
        for result in self.generator.iterate():
            self._deliver(result)
        for job in list(self._jobs):
            self._deliver(job.cancelled())  # somebody has cleared the generator's queue: there is no result to come

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when it is time to end."""
        with self._wake:
            self._wake.wait_for(lambda: self._closing or self._cancels or self.generator.num_remaining_jobs())
            return not self._closing

    def _deliver(self, result: Result) -> None:
        held = self._jobs.get(result["job"])
        if held is None:
            return
        if result["eos"]:
            del self._jobs[result["job"]]
        if (job := held()) is not None:
            job.put(result)


class ExLlamaV2DynamicJobAsync:
    """Arguments after `generator` as `ExLlamaV2DynamicJob`; enqueues itself. Iterate over it for its result dicts.

    A loop that was left by `break` may be taken up again. `cancel()`, closing the iterator (`aclose`), cancelling the
    task that waits in it, or dropping the job (no reference left, as when the function that made it returns) ends it.
    """

    def __init__(self, generator: ExLlamaV2DynamicGeneratorAsync, *args: Any, **kwargs: Any) -> None:
        self.generator = generator
        self.job = ExLlamaV2DynamicJob(*args, **kwargs)
        self.cancelled = False
        self._loop = asyncio.get_running_loop()
        self._results: asyncio.Queue[Result | None] = asyncio.Queue()
        self._ended = asyncio.Event()
        generator.enqueue(self)

    def __aiter__(self) -> AsyncIterator[Result]:
        return _Results(self)

    async def cancel(self) -> None:
        """End the job; whoever iterates over it gets its last result (`eos_reason` "cancelled"). Once is enough."""
        self.cancelled = True
        await self.generator.cancel(self)

    async def finished(self) -> None:
        """Wait until the job's last result is there."""
        await self._ended.wait()

    def abandon(self) -> None:
        """End the job unless it has ended, without waiting."""
        if not self._ended.is_set():
            self.cancelled = True
            self.generator.cancel_soon(self)

    def put(self, result: Result) -> None:
        """Hand a result to the job's event loop; called by the generator's thread."""
        with contextlib.suppress(RuntimeError):  # that loop has been closed: nobody is listening
            self._loop.call_soon_threadsafe(self._receive, result)

    async def take(self) -> Result | None:
        """The next result; None after the last, for everyone who waits or asks."""
        result = await self._results.get()
        if result is None:
            self._results.put_nowait(None)
        return result

    def _receive(self, result: Result) -> None:
        self._results.put_nowait(result)
        if result["eos"]:
            self._ended.set()
            self._results.put_nowait(None)


class _Results:
    """Results of a job in order. Not an async generator: closing one that has not begun must cancel as well."""

    def __init__(self, job: ExLlamaV2DynamicJobAsync) -> None:
        self._job = job
        self._closed = False

    def __aiter__(self) -> AsyncIterator[Result]:
        return self

    async def __anext__(self) -> Result:
        if self._closed:
            raise StopAsyncIteration
        try:
            result = await self._job.take()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if result is None:
            raise StopAsyncIteration
        return result

    async def aclose(self) -> None:
        """Stop iterating and end the job."""
        self._closed = True
        self._job.abandon()
