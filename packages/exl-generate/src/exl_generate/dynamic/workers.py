"""Threads for filters that compute while the model runs.

The threads are daemons: a filter that never returns cannot keep the process from ending, unlike in the standard
library's pool. The end waits a moment for tasks that run, since Python ends a thread that returns from native code
later, and the native frames may not survive that.

A Ctrl-C may interrupt any code of the main thread here (`interrupts.interruptible`). Python raises it between two
calls. So it may come after a pure-Python lock of `threading` has taken its inner lock and before the `with` that
releases it: a Semaphore, a Condition or a starting Thread then stays locked. Threads here share only locks and queues
implemented in C. (CPython 3.14 may leave even those locked: its issue 148874.)
"""

from __future__ import annotations

import _thread
import atexit
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any

__all__ = ["DaemonPool", "filter_pool"]

#: Threads for all generators of the process; each is started when there is more work than threads.
WORKERS = 16

#: Seconds that the end of the process waits for tasks.
LONGEST_EXIT = 2.0

_Work = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class _Condition(threading.Condition):
    """A condition that `with` locks in C, so that it is either not locked, or unlocked at the end of the block."""

    __enter__ = property(lambda self: self._lock.__enter__)
    __exit__ = property(lambda self: self._lock.__exit__)


class _Future(Future[Any]):
    """A future whose interrupted waiter does not keep the thread from delivering the result."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = _Condition()


class DaemonPool(Executor):
    """At most `workers` daemon threads, each started when there is more work than threads."""

    def __init__(self, workers: int) -> None:
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        # One entry for what is queued or runs. One more, after an interrupt, costs no more than a thread too many.
        self._load: SimpleQueue[None] = SimpleQueue()
        self._workers, self._started = workers, 0
        self._lock = threading.Lock()
        # Threads that have taken a task. `_load` may count one too many for good.
        self._busy: set[int] = set()
        self._over = False

    @property
    def started(self) -> int:
        """Threads that have been started."""
        return self._started

    @property
    def load(self) -> int:
        """Tasks that wait or run."""
        return self._load.qsize()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads once they have run what was submitted. Does not wait for them, and cancels nothing."""
        for _ in range(self._started + 1):  # an interrupt may have left one too many
            self._queue.put(None)

    def finish(self, seconds: float) -> bool:
        """Begin no further task and wait at most so many seconds for those that run. Returns whether all ended."""
        self._over = True
        until = time.monotonic() + seconds
        while self._busy and time.monotonic() < until:
            time.sleep(0.001)
        return not self._busy

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run fn(*args, **kwargs) in a thread."""
        future = _Future()
        self._load.put(None)
        self._queue.put((future, fn, args, kwargs))
        with self._lock:
            while self._started < min(self._workers, self._load.qsize()):
                _thread.start_new_thread(self._run, ())
                self._started += 1
        return future

    def _run(self) -> None:
        threading.current_thread().name = "exl-filter"
        number = threading.get_ident()
        while True:
            work = self._queue.get()
            self._busy.add(number)  # before the look at `_over`, which `finish` sets before it looks at `_busy`
            if work is None or self._over:
                if work is not None:
                    work[0].cancel()
                self._busy.discard(number)
                return
            future, fn, args, kwargs = work
            result = failure = None
            if wanted := future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:
                    failure = error
            self._load.get_nowait()  # before a waiter sees the result and submits the next job
            if failure is not None:
                future.set_exception(failure)
            elif wanted:
                future.set_result(result)
            del work, future, fn, args, kwargs, result, failure  # an idle thread keeps no request alive
            self._busy.discard(number)


_pool: list[DaemonPool] = []
_lock = threading.Lock()


@atexit.register
def _finish() -> None:
    """Wait for native code of filters: it must not return into an interpreter that has ended."""
    for pool in _pool:
        pool.finish(LONGEST_EXIT)


def filter_pool() -> Executor:
    """Return the process's filter threads, started when a filter first needs one."""
    with _lock:
        if not _pool:
            _pool.append(DaemonPool(WORKERS))
        return _pool[0]


def _forget() -> None:
    """Forget the threads in a forked child: they exist only in the parent."""
    global _lock
    _lock = threading.Lock()
    _pool.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
