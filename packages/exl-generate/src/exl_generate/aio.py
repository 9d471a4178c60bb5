"""The dynamic generator for asyncio: iterations run in a thread, so the event loop never waits for the model."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
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

#: Consecutive iterations that may fail, for a reason of no job in particular, before all jobs end with the error.
MAX_FAILED_ITERATIONS = 3

#: Seconds that the end of the process waits for iterations.
LONGEST_EXIT = 10.0


class ExLlamaV2DynamicGeneratorAsync:
    """The dynamic generator for asyncio. Its attribute `generator` is the `ExLlamaV2DynamicGenerator` that works.

    Jobs may be submitted from any task, event loop or thread. Results go to their job alone. A failing job gets a last
    result, and other jobs are not affected. After `close()`, every consumer has seen its job end, and new jobs raise
    `JobStateError`. When nothing refers to the generator any more, its thread ends, too.

    Args:
        args: positional arguments of `ExLlamaV2DynamicGenerator`.
        kwargs: keyword arguments of `ExLlamaV2DynamicGenerator`.

    Raises:
        RequestError, CapacityError: as `ExLlamaV2DynamicGenerator`.
    """

    generator_class: ClassVar[type[ExLlamaV2DynamicGenerator]] = ExLlamaV2DynamicGenerator

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.generator = self.generator_class(*args, **kwargs)
        self._worker = _Worker(self.generator)
        weakref.finalize(self, self._worker.stop).atexit = False

    def enqueue(self, job: ExLlamaV2DynamicJobAsync) -> None:
        """Queue a job. It raises the errors of `ExLlamaV2DynamicGenerator.enqueue`; the job is then not queued."""
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
        """Cancel all jobs, deliver their last results and end the thread. Further calls do nothing."""
        self._worker.stop()
        await asyncio.to_thread(self._worker.join)

    async def __aenter__(self) -> ExLlamaV2DynamicGeneratorAsync:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class _Worker:
    """The thread that runs a generator's iterations and passes each result to its job.

    It holds no reference to the generator object that made it. So an unused generator is collected, which stops the
    thread.
    """

    def __init__(self, generator: ExLlamaV2DynamicGenerator) -> None:
        self._generator = generator
        # Weakly held: a job without any reference is discarded.
        self._jobs: dict[ExLlamaV2DynamicJob, weakref.ref[ExLlamaV2DynamicJobAsync]] = {}
        self._cancels: deque[ExLlamaV2DynamicJob] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="exl-generate", daemon=True)
        self._thread.start()
        _workers.add(self)

    @property
    def jobs(self) -> dict[ExLlamaV2DynamicJob, ExLlamaV2DynamicJobAsync]:
        """A copy of the jobs that have not ended and that are still referenced."""
        found = {}
        for inner in list(self._jobs):
            reference = self._jobs.get(inner)
            if reference is not None and (job := reference()) is not None:
                found[inner] = job
        return found

    def enqueue(self, job: ExLlamaV2DynamicJobAsync) -> None:
        """Queue a job and wake the thread."""
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
        """Tell the thread to end all jobs and then itself; does not wait."""
        with defer_sigint(), self._wake:
            self._closing = True
            self._wake.notify()

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end of the thread, at most `seconds`."""
        self._thread.join(seconds)

    def _abandon(self, job: ExLlamaV2DynamicJob) -> None:
        """Discard a job; the garbage collector may call this in the middle of any code."""
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
        """Return the jobs that were removed from the generator directly: no result of theirs will come."""
        return [job for job in list(self._jobs) if job.is_finished]

    def _fail_all(self, error: BaseException) -> None:
        """End every job with an error that belongs to none of them and does not go away."""
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


#: Workers of this process.
_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """End the threads: native code that returns into an interpreter that has ended aborts the process."""
    workers = list(_workers)
    until = time.monotonic() + LONGEST_EXIT
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))


def _forget() -> None:
    """Forget the workers in a forked child: their threads exist only in the parent."""
    global _workers
    _workers = weakref.WeakSet()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class ExLlamaV2DynamicJobAsync:
    """A job for asyncio: it enqueues itself, and iterating over it yields its result dicts.

    A loop that was left by `break` may be continued. The job ends by `cancel()`, by closing the iterator (`aclose`), by
    cancelling the task that waits in it, or when no reference to it is left.

    Args:
        generator: The generator that runs the job.
        *args: Arguments of `ExLlamaV2DynamicJob`.
        **kwargs: Arguments of `ExLlamaV2DynamicJob`.
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
        """End the job; its iterator gets a last result (`eos_reason` "cancelled"). Further calls do nothing."""
        self.cancelled = True
        await self.generator.cancel(self)

    async def finished(self) -> None:
        """Wait until the job's last result has arrived."""
        await self._ended.wait()

    def abandon(self) -> None:
        """End the job unless it has ended, without waiting."""
        if not self._ended.is_set():
            self.cancelled = True
            self.generator.cancel_soon(self)

    def put(self, result: Result) -> None:
        """Pass a result to the job's event loop; called by the generator's thread."""
        self._call_in_loop(self._receive, result)

    async def take(self) -> Result | None:
        """Return the next result; None after the last one, for every caller."""
        result = await self._results.get()
        if result is None:
            self._results.put_nowait(None)
        return result

    def _receive(self, result: Result) -> None:
        self._results.put_nowait(result)
        if result["eos"]:
            self._end()

    def _end(self) -> None:
        """Release everyone who waits: there are no more results. Runs in the job's event loop."""
        self._ended.set()
        self._results.put_nowait(None)

    def _call_in_loop(self, call: Callable[..., None], *args: Any) -> None:
        """Run `call` in the job's event loop: now if the current loop is that one, else soon."""
        here: asyncio.AbstractEventLoop | None = None
        with contextlib.suppress(RuntimeError):
            here = asyncio.get_running_loop()
        if here is self._loop:
            call(*args)
            return
        with contextlib.suppress(RuntimeError):  # the loop has been closed
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
