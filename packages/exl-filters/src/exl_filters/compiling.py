"""Budgets for compiling grammars: limits of time and memory, and compiling off the caller's thread."""

from __future__ import annotations

import contextlib
import math
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

# Compilations that run at once; further ones wait for a slot.
MOST_AT_ONCE = 4


@dataclass(frozen=True)
class CompileBudget:
    """Limits for compiling one grammar. A separate process compiles it first and is killed beyond a limit.

    Args:
        seconds: Time limit in seconds, above 0 and finite.
        megabytes: Memory limit in megabytes, a whole number above 0.
        trust: Compile in this process at once, with llguidance's own limits only. A bad grammar may then use all memory
            or
            end the process.

    Raises:
        FilterUsageError: a limit is not above 0, or not finite.
    """

    seconds: float = 10.0
    megabytes: int = 1024
    trust: bool = False

    def __post_init__(self) -> None:
        timed = isinstance(self.seconds, int | float) and 0 < self.seconds < math.inf
        if not timed or not isinstance(self.megabytes, int) or self.megabytes < 1:
            raise FilterUsageError(
                "a budget has finite seconds above 0 and whole megabytes above 0; "
                f"got {self.seconds!r} and {self.megabytes!r}"
            )


class Deadline:
    """The time at which a compilation must be over, whatever its budget; None: no limit. Cancelling sets it to now."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds
        self._lock = threading.Lock()
        self._cancelled = False
        self._process: Popen[bytes] | None = None

    def left(self) -> float:
        """Return the seconds left; a day where there is no limit."""
        if self._cancelled:
            return 0.0
        return 86400.0 if self._end is None else max(0.0, self._end - time.monotonic())

    def over(self) -> bool:
        """Whether the time has passed or the compilation was cancelled."""
        return self.left() <= 0

    def cancel(self) -> None:
        """Set the deadline to now, and kill the process that compiles."""
        with self._lock:
            self._cancelled = True
            if self._process is not None:
                self._process.kill()

    @contextlib.contextmanager
    def killing(self, process: Popen[bytes]) -> Iterator[None]:
        """Let `cancel` kill `process` for the duration of a `with` block."""
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
        """Return the error to raise when the deadline has passed."""
        if self._cancelled:
            return FilterCompileError("cancelled")
        return FilterCompileError(f"not compiled within {self.seconds:g} s: simplify it, or allow more time")


_deadline: ContextVar[Deadline | None] = ContextVar("exl_filters_compile_deadline", default=None)
_slots = threading.BoundedSemaphore(MOST_AT_ONCE)


def deadline() -> Deadline | None:
    """Return the deadline of the current thread's compilation, set by `compile_within` and `compile_in_background`."""
    return _deadline.get()


class _Compilation(Future[F]):
    """A future whose `cancel()` also works while it runs: it kills the process that compiles the grammar."""

    def __init__(self, limit: Deadline) -> None:
        super().__init__()
        self._limit = limit

    def cancel(self) -> bool:
        """Cancel the compilation; a running process is killed. Returns whether it was cancelled."""
        cancelled = super().cancel()
        if cancelled:
            self._limit.cancel()
        return cancelled


def compile_in_background(make: Callable[..., F], *args: Any, within: float | None = None, **kwargs: Any) -> Future[F]:
    """Call `make` (a filter class, for example) on a new thread. The future gives the filter or raises its error.

    At most MOST_AT_ONCE compilations run at once. `cancel()` on the future stops the compilation at once. A `make` that
    compiles no grammar cannot be stopped: its thread goes on, and its result is dropped.

    Args:
        make: The function or class to call.
        *args: Positional arguments of `make`.
        within: Seconds after which a compilation is stopped with `FilterCompileError`. None: no limit.
        **kwargs: Keyword arguments of `make`.
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
    """Return the filter that `make(*args, **kwargs)` builds. Raises `FilterCompileError` after `seconds`.

    A compilation that takes too long is killed, and its thread ends; see `compile_in_background`.
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
    """Make the slots new in a forked child: the threads that hold them exist only in the parent."""
    global _slots
    _slots = threading.BoundedSemaphore(MOST_AT_ONCE)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
