"""Budgets for compiling grammars: how long, how much memory, and off the caller's thread."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from subprocess import Popen
from typing import Any, TypeVar

from exl_filters.errors import FilterCompileError, FilterUsageError

__all__ = ["CompileBudget", "Deadline", "compile_in_background", "compile_within", "deadline"]

F = TypeVar("F")

# Compilations at work at once; more wait for their turn.
MOST_AT_ONCE = 4


@dataclass(frozen=True)
class CompileBudget:
    """What compiling one grammar may take: `seconds` of time and `megabytes` of memory, enforced by a process that is
    killed. `trust`: compile here at once, with llguidance's own limits only (a bad grammar may then take all memory or
    end the process).
    """

    seconds: float = 10.0
    megabytes: int = 1024
    trust: bool = False

    def __post_init__(self) -> None:
        timed = isinstance(self.seconds, int | float) and self.seconds > 0
        if not timed or not isinstance(self.megabytes, int) or self.megabytes < 1:
            raise FilterUsageError(
                f"a budget has seconds above 0 and whole megabytes above 0; got {self.seconds!r} and {self.megabytes!r}"
            )


class Deadline:
    """When a compilation must be over, whatever its budget; None: never. Cancelling is a deadline of now."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds
        self._lock = threading.Lock()
        self._cancelled = False
        self._process: Popen[bytes] | None = None

    def left(self) -> float:
        """Seconds left; a day where there is no end."""
        if self._cancelled:
            return 0.0
        return 86400.0 if self._end is None else max(0.0, self._end - time.monotonic())

    def over(self) -> bool:
        return self.left() <= 0

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._process is not None:
                self._process.kill()

    @contextlib.contextmanager
    def killing(self, process: Popen[bytes]) -> Iterator[None]:
        """For the while, cancelling kills `process`."""
        with self._lock:
            self._process = process
            if self._cancelled:
                process.kill()
        try:
            yield
        finally:
            with self._lock:
                self._process = None

    def error(self) -> FilterCompileError:
        if self._cancelled:
            return FilterCompileError("cancelled")
        return FilterCompileError(f"not compiled within {self.seconds:g} s: simplify it, or allow more time")


_deadline: ContextVar[Deadline | None] = ContextVar("exl_filters_compile_deadline", default=None)
_slots = threading.BoundedSemaphore(MOST_AT_ONCE)


def deadline() -> Deadline | None:
    """The deadline of the compilation that this thread is in, set by `compile_within` and `compile_in_background`."""
    return _deadline.get()


class _Compilation(Future[F]):
    """`cancel()` works while it runs, too: the process that tries the grammar is killed."""

    def __init__(self, limit: Deadline) -> None:
        super().__init__()
        self._limit = limit

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            self._limit.cancel()
        return cancelled


def compile_in_background(make: Callable[..., F], *args: Any, within: float | None = None, **kwargs: Any) -> Future[F]:
    """Call `make` (a filter class, say) on a thread of its own; the future gives the filter or raises what it raised.

    within: seconds after which a grammar that is being tried is given up with `FilterCompileError`; `cancel()` does so
    at once. At most MOST_AT_ONCE are at work together. A `make` that is no grammar of ours cannot be stopped: its
    thread goes on, its result is dropped.
    """
    limit = Deadline(within)
    future: _Compilation[F] = _Compilation(limit)

    def work() -> None:
        _deadline.set(limit)
        try:
            if not _slots.acquire(timeout=limit.left()):
                raise limit.error()
            try:
                if limit.over():
                    raise limit.error()
                made = make(*args, **kwargs)
            finally:
                _slots.release()
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)
        else:
            with contextlib.suppress(InvalidStateError):
                future.set_result(made)

    threading.Thread(target=copy_context().run, args=(work,), name="exl-filters-compile", daemon=True).start()
    return future


def compile_within(seconds: float, make: Callable[..., F], *args: Any, **kwargs: Any) -> F:
    """The filter `make` gives, or `FilterCompileError` when it takes longer than `seconds`.

    A grammar that is being tried is killed then, and its thread ends; see `compile_in_background`.
    """
    future = compile_in_background(make, *args, within=seconds, **kwargs)
    try:
        return future.result(timeout=seconds)
    except TimeoutError:
        if future.done():
            raise
        future.cancel()
        raise Deadline(seconds).error() from None


def _forget() -> None:
    """In a forked child: whoever held the places stayed with the parent."""
    global _slots
    _slots = threading.BoundedSemaphore(MOST_AT_ONCE)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
