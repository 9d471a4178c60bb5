"""Threads for filters that compute while the model runs. They are daemons: a filter that never returns cannot keep the
process from ending, as it could in the standard library's pool."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any

__all__ = ["filter_pool"]

#: Threads for all generators of the process; each is started when there is work and no thread is idle.
WORKERS = 16

_Work = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class _DaemonPool(Executor):
    def __init__(self, workers: int) -> None:
        self._queue: SimpleQueue[_Work] = SimpleQueue()
        # One entry a thread without work. Not a Semaphore: an interrupt inside one would keep its lock for good.
        self._idle: SimpleQueue[None] = SimpleQueue()
        self._left = workers
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run fn(*args, **kwargs) in a thread."""
        future: Future[Any] = Future()
        self._queue.put((future, fn, args, kwargs))
        try:
            self._idle.get_nowait()
        except Empty:
            with self._lock:
                if self._left > 0:
                    self._left -= 1
                    threading.Thread(target=self._run, name="exl-filter", daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            future, fn, args, kwargs = self._queue.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)
            del future, fn, args, kwargs  # an idle thread keeps no request alive
            self._idle.put(None)


_pool: list[_DaemonPool] = []
_lock = threading.Lock()


def filter_pool() -> Executor:
    """The process's filter threads, made when a filter first needs one."""
    with _lock:
        if not _pool:
            _pool.append(_DaemonPool(WORKERS))
        return _pool[0]
