"""Defer Ctrl-C while a scheduler step changes the state of the generator.

A signal handler may run between almost any two bytecodes of the main thread. A handler that raises leaves undone what
was to follow. Inside a `defer_sigint` section the signal is only recorded, however often it comes. The section calls
the previous handler where an exception loses nothing: at `deliver`, at the end of the section, and, from the second
signal on, inside `interruptible` blocks. Those hold code that may never return and changes no state of the generator: a
filter, a hook, a forward pass.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes enum members of its arguments in every step
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Protocol

from exl_generate.errors import UserCodeError

__all__ = ["as_job_error", "defer_sigint", "interruptible"]

#: sections that are open in the main thread, innermost last
_open: list[defer_sigint] = []

#: seconds between two checks for a recorded Ctrl-C while another thread holds a lock
_LOCK_POLL_SECONDS = 0.05


class _Lock(Protocol):
    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool: ...
    def release(self) -> None: ...


class defer_sigint:
    """Context manager that records Ctrl-C and calls the previous handler once, at the end of the section.

    Entering and leaving cost two system calls in the main thread and nothing in other threads, where no signal arrives.
    Sections may be nested: an inner section hands its signal to the outer one.
    """

    __slots__ = ("_before", "_interruptible", "_opened", "_recorded", "_thread")

    def __init__(self) -> None:
        self._before: Any = None
        self._recorded = False
        self._interruptible = False
        self._opened = False
        #: the main thread, once the section is open there
        self._thread = 0

    def __enter__(self) -> defer_sigint:
        if _in_main_thread():
            self._before = _signal.getsignal(signal.SIGINT)
            if callable(self._before):
                _signal.signal(signal.SIGINT, self._handle)
            self._opened = True
            self._thread = threading.get_ident()
            _open.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not self._opened:
            return
        _open.remove(self)
        if callable(self._before) and _signal.getsignal(signal.SIGINT) == self._handle:
            _signal.signal(signal.SIGINT, self._before)
        if self._recorded and not isinstance(error, KeyboardInterrupt):
            self._call_previous()

    def record(self) -> None:
        """Record an interrupt, as if a signal had arrived."""
        self._recorded = True

    def deliver(self) -> None:
        """Call the previous handler now if a Ctrl-C was recorded.

        The section stays open, also while the exception of that handler propagates.
        """
        if self._recorded:
            self._recorded = False
            try:
                self._call_previous()
            finally:
                self._reinstall()

    def holding(self, lock: _Lock) -> _Holding:
        """Return a context manager that holds `lock`. A Ctrl-C is delivered while another thread has the lock."""
        return _Holding(self, lock)

    def _call_previous(self) -> None:
        if callable(self._before):
            self._before(signal.SIGINT, None)
            return
        # This section installed no handler: user code raised the KeyboardInterrupt.
        outer = [section for section in _open if section is not self]
        if not outer:
            raise KeyboardInterrupt
        outer[-1].record()

    def _reinstall(self) -> None:
        """Install this section's handler again where the previous handler has replaced it."""
        found = _signal.getsignal(signal.SIGINT)
        if callable(self._before) and found != self._handle:
            _open[0]._before = found
            if callable(found):
                _signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._recorded and self._interruptible:
            self._interruptible = False  # before the handler raises: the code that follows must not be interrupted
            try:
                _open[0]._before(number, frame)
            finally:
                self._reinstall()
            self._interruptible = True
        self._recorded = True


class _Holding:
    """The context manager of `defer_sigint.holding`: a class, since a generator takes twice as many calls."""

    __slots__ = ("_lock", "_section")

    def __init__(self, section: defer_sigint, lock: _Lock) -> None:
        self._section = section
        self._lock = lock

    def __enter__(self) -> None:
        if not self._section._opened:
            self._lock.acquire()
        else:
            while not self._lock.acquire(timeout=_LOCK_POLL_SECONDS):
                self._section.deliver()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class interruptible:
    """Context manager inside which a second Ctrl-C raises at once.

    For code that may hang and whose caller handles any exception. Outside of a `defer_sigint` section it does nothing.
    """

    __slots__ = ("_section", "_was")

    def __init__(self) -> None:
        self._section: defer_sigint | None = None
        if _open and _open[-1]._thread == threading.get_ident():
            self._section = _open[-1]
        self._was = False

    def __enter__(self) -> None:
        if self._section is not None:
            self._was = self._section._interruptible
            self._section._interruptible = True

    def __exit__(self, *_: object) -> None:
        if self._section is not None:
            self._section._interruptible = self._was


def as_job_error(error: BaseException) -> Exception:
    """Return the exception that ends a job whose filter, hook or settings raised `error`.

    An `Exception` is returned as it is, anything else as the `__cause__` of a `UserCodeError`. A KeyboardInterrupt in
    the main thread (a second Ctrl-C, while a filter hangs) also reaches the caller at the end of the step.
    """
    if isinstance(error, Exception):
        return error
    if isinstance(error, KeyboardInterrupt) and _in_main_thread():
        if not _open:
            raise error
        _open[-1].record()
    wrapped = UserCodeError(f"a hook or filter raised {error!r}, which is no Exception; raise one instead")
    wrapped.__cause__ = error
    return wrapped


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
