"""The dynamic generator for asyncio: iterations run in a thread, so the event loop never waits for the model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

from exl_generate.dynamic import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exl_generate.dynamic.results import Result, dict_of
from exl_generate.errors import JobStateError
from exl_generate.interrupts import defer_sigint

__all__ = ["ExLlamaV2DynamicGeneratorAsync", "ExLlamaV2DynamicJobAsync"]

log = logging.getLogger(__name__)

#: Iterations that may fail one after the other, for a reason of no job in particular, before all jobs end with it.
MAX_FAILED_ITERATIONS = 3


class ExLlamaV2DynamicGeneratorAsync:
    """Takes the arguments of `ExLlamaV2DynamicGenerator`, which is the attribute `generator`.

    Jobs may be submitted from any task, event loop or thread. Results go to their job alone; a job that fails gets
    its own last result and disturbs no other. After `close()` every consumer has seen its job end, and new jobs raise
    `JobStateError`. A generator that nobody refers to any more ends its thread, too.
    """

    generator_class: ClassVar[type[ExLlamaV2DynamicGenerator]] = ExLlamaV2DynamicGenerator

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.generator = self.generator_class(*args, **kwargs)
        self._worker = _Worker(self.generator)
        weakref.finalize(self, self._worker.stop).atexit = False

    def enqueue(self, job: ExLlamaV2DynamicJobAsync) -> None:
        """Queue a job; raises what `ExLlamaV2DynamicGenerator.enqueue` raises, and then leaves nothing behind."""
        self._worker.enqueue(job)

    async def cancel(self, job: ExLlamaV2DynamicJobAsync) -> None:
        """End a job and wait until its last result is in its iterator. Finished jobs are left alone."""
        self.cancel_soon(job)
        await job.finished()

    def cancel_soon(self, job: ExLlamaV2DynamicJobAsync) -> None:
        """End a job before the next iteration, from any thread, without waiting."""
        self._worker.cancel(job.job)

    def discard(self, job: ExLlamaV2DynamicJobAsync) -> None:
        """End a job at once, from any thread, without waiting and without any further result."""
        self._worker.discard(job.job)

    async def close(self) -> None:
        """Cancel all jobs, deliver their last results and end the thread. Once is enough."""
        self._worker.stop()
        await asyncio.to_thread(self._worker.join)

    async def __aenter__(self) -> ExLlamaV2DynamicGeneratorAsync:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class _Worker:
    """The thread that runs a generator's iterations and hands each result to its job.

    It does not refer to the object that made it, so that one without users is collected, which stops the thread.
    """

    def __init__(self, generator: ExLlamaV2DynamicGenerator) -> None:
        self._generator = generator
        # Weakly held: a job that nobody can read any more is discarded.
        self._jobs: dict[ExLlamaV2DynamicJob, weakref.ref[ExLlamaV2DynamicJobAsync]] = {}
        self._cancels: deque[ExLlamaV2DynamicJob] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="exl-generate", daemon=True)
        self._thread.start()

    @property
    def jobs(self) -> dict[ExLlamaV2DynamicJob, ExLlamaV2DynamicJobAsync]:
        """The jobs that have not ended and that somebody refers to; a copy."""
        found = {}
        for inner in list(self._jobs):
            reference = self._jobs.get(inner)
            if reference is not None and (job := reference()) is not None:
                found[inner] = job
        return found

    def enqueue(self, job: ExLlamaV2DynamicJobAsync) -> None:
        inner = job.job
        with defer_sigint(), self._wake:
            if self._closing:
                raise JobStateError("the generator has been closed; make a new one")
            self._jobs[inner] = weakref.ref(job, lambda _: self._abandon(inner))
            try:
                self._generator.enqueue(inner)
            except BaseException:
                del self._jobs[inner]
                raise
            self._wake.notify()

    def cancel(self, job: ExLlamaV2DynamicJob) -> None:
        """End a job before the next iteration, with a last result."""
        with defer_sigint(), self._wake:
            self._cancels.append(job)
            self._wake.notify()

    def discard(self, job: ExLlamaV2DynamicJob) -> None:
        """End a job at once, without any further result."""
        with defer_sigint():
            self._jobs.pop(job, None)
            self._generator.discard(job)
            with self._wake:
                self._wake.notify()

    def stop(self) -> None:
        """Have the thread end all jobs, and then itself; does not wait."""
        with defer_sigint(), self._wake:
            self._closing = True
            self._wake.notify()

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    def _abandon(self, job: ExLlamaV2DynamicJob) -> None:
        """As `discard`, called by the garbage collector in the middle of anything."""
        with defer_sigint(), self._wake:
            self._jobs.pop(job, None)
            self._generator.discard_soon(job)
            self._wake.notify()

    def _run(self) -> None:
        failures = 0
        while self._wait():
            try:
                self._iterate()
                failures = 0
            except BaseException as error:  # nothing that user code raises may end this thread: it is not the main one
                failures += 1
                log.exception("an iteration of the generator failed; its jobs go on with the next one")
                if failures >= MAX_FAILED_ITERATIONS:
                    self._fail_all(error)
                    failures = 0
        for job in list(self._jobs):
            self._generator.cancel(job)
        for result in self._generator.iterate():
            self._deliver(result)
        for job in list(self._jobs):
            self._deliver(dict_of(job.cancelled()))

    def _iterate(self) -> None:
        while self._cancels:
            self._generator.cancel(self._cancels.popleft())
        for result in self._generator.iterate():
            self._deliver(result)
        for job in self._cleared():
            self._deliver(dict_of(job.cancelled()))

    def _cleared(self) -> list[ExLlamaV2DynamicJob]:
        """Jobs that somebody has taken out of the generator itself: there is no result of theirs to come."""
        return [job for job in list(self._jobs) if job.is_finished]

    def _fail_all(self, error: BaseException) -> None:
        """End every job with an error that is none of its own and does not go away."""
        for job in list(self._jobs):
            self._generator.discard(job)
            self._deliver(dict_of(job.fail(error)))

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when it is time to end."""
        with self._wake:
            self._wake.wait_for(lambda: self._closing or self._cancels or self._generator.has_work or self._cleared())
            return not self._closing

    def _deliver(self, result: Result) -> None:
        held = self._jobs.get(result["job"])
        if held is None:
            return
        if result["eos"]:
            self._jobs.pop(result["job"], None)  # another thread may have discarded it
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
        self._call_in_loop(self._receive, result)

    async def take(self) -> Result | None:
        """The next result; None after the last, for everyone who waits or asks."""
        result = await self._results.get()
        if result is None:
            self._results.put_nowait(None)
        return result

    def _receive(self, result: Result) -> None:
        self._results.put_nowait(result)
        if result["eos"]:
            self._end()

    def _end(self) -> None:
        """There are no more results: release everyone who waits. In the job's event loop."""
        self._ended.set()
        self._results.put_nowait(None)

    def _call_in_loop(self, call: Callable[..., None], *args: Any) -> None:
        """Run `call` in the job's event loop: now if this is it, else soon."""
        here: asyncio.AbstractEventLoop | None = None
        with contextlib.suppress(RuntimeError):
            here = asyncio.get_running_loop()
        if here is self._loop:
            call(*args)
            return
        with contextlib.suppress(RuntimeError):  # that loop has been closed: nobody is listening
            self._loop.call_soon_threadsafe(call, *args)


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
