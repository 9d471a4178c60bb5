"""Ctrl-C while a round is under way: it waits until the round's books are closed.

A signal's handler may run between almost any two bytecodes of the main thread, and one that raises leaves undone what
was to follow. Inside an `Unbroken` section it is only noted, however often it comes. It is handed on where that undoes
nothing: at places that say so (`hand_on`), at the end of the section, and from the second one on while code runs that
may never return but holds no books (`lent`): a filter, a hook, a pass of the model.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes enum members of what goes through it: 10 us a round
import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Protocol

from exl_generate.errors import UserCodeError

__all__ = ["Unbroken", "contained", "lent"]

#: sections that are open in the main thread, innermost last
_open: list[Unbroken] = []

#: seconds between two looks for a noted Ctrl-C while another thread holds a lock
_PATIENCE = 0.05


class _Lock(Protocol):
    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool: ...
    def release(self) -> None: ...


class Unbroken:
    """A section that Ctrl-C does not break into: the handler that was installed before is called behind it, once.

    Costs two system calls, and nothing in other threads, where no signal arrives. Sections may be nested: what is noted
    in an inner one is handed to the outer one.
    """

    __slots__ = ("_before", "_lent", "_noted", "_opened")

    def __init__(self) -> None:
        self._before: Any = None
        self._noted = False
        self._lent = False
        self._opened = False

    def __enter__(self) -> Unbroken:
        if _in_main_thread():
            self._before = _signal.getsignal(signal.SIGINT)
            if callable(self._before):
                _signal.signal(signal.SIGINT, self._note)
            self._opened = True
            _open.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not self._opened:
            return
        _open.remove(self)
        if callable(self._before) and _signal.getsignal(signal.SIGINT) == self._note:
            _signal.signal(signal.SIGINT, self._before)
        if self._noted and not isinstance(error, KeyboardInterrupt):
            self._pass_on()

    def note(self) -> None:
        """Call the former handler when that undoes nothing."""
        self._noted = True

    def hand_on(self) -> None:
        """If there was a Ctrl-C, call the former handler now; the section goes on, also while what that raised
        passes."""
        if self._noted:
            self._noted = False
            try:
                self._pass_on()
            finally:
                self._stay()

    @contextlib.contextmanager
    def holding(self, lock: _Lock) -> Iterator[None]:
        """With this lock; a Ctrl-C is handed on while another thread has it."""
        if not self._opened:
            lock.acquire()
        else:
            while not lock.acquire(timeout=_PATIENCE):
                self.hand_on()
        try:
            yield
        finally:
            lock.release()

    def _pass_on(self) -> None:
        if callable(self._before):
            self._before(signal.SIGINT, None)
            return
        # No handler of ours was installed: this one was raised by user code.
        outer = [section for section in _open if section is not self]
        if not outer:
            raise KeyboardInterrupt
        outer[-1].note()

    def _stay(self) -> None:
        """Stand before whatever handler the former one may have put in its own place."""
        found = _signal.getsignal(signal.SIGINT)
        if callable(self._before) and found != self._note:
            _open[0]._before = found
            if callable(found):
                _signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted and self._lent:
            self._lent = False  # before anything is raised: what follows is ours again
            try:
                _open[0]._before(number, frame)
            finally:
                self._stay()
            self._lent = True
        self._noted = True


class lent:
    """While this runs, a second Ctrl-C breaks in. For code that may hang and whose end by an exception is provided
    for."""

    __slots__ = ("_section", "_was")

    def __init__(self) -> None:
        self._section: Unbroken | None = _open[-1] if _open and _in_main_thread() else None
        self._was = False

    def __enter__(self) -> None:
        if self._section is not None:
            self._was = self._section._lent
            self._section._lent = True

    def __exit__(self, *_: object) -> None:
        if self._section is not None:
            self._section._lent = self._was


def contained(error: BaseException) -> Exception:
    """What a job ends with whose own code raised `error`. A KeyboardInterrupt in the main thread (a second Ctrl-C,
    while a filter hangs) goes on to the caller as well, when the round is over."""
    if isinstance(error, Exception):
        return error
    if isinstance(error, KeyboardInterrupt) and _in_main_thread():
        if not _open:
            raise error
        _open[-1].note()
    wrapped = UserCodeError(f"a hook or filter raised {error!r}, which is no Exception; raise one instead")
    wrapped.__cause__ = error
    return wrapped


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
