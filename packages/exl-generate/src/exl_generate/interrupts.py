"""Ctrl-C while a round is under way: it waits until the round's books are closed."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from exl_generate.errors import UserCodeError

__all__ = ["Unbroken", "contained"]

#: sections that are open in the main thread, innermost last
_open: list[Unbroken] = []


class Unbroken:
    """A section that Ctrl-C does not break into: the handler that was installed before is called behind it. A second
    Ctrl-C is handed on at once, so that code which hangs can still be left.

    Costs two system calls, and nothing in other threads, where no signal arrives. Sections may be nested.
    """

    __slots__ = ("_before", "_noted")

    def __init__(self) -> None:
        self._before: Any = None
        self._noted = False

    def __enter__(self) -> Unbroken:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._note)
                _open.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._before is None:
            return
        _open.remove(self)
        if signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, self._before)
        if self._noted and not isinstance(error, KeyboardInterrupt):
            self._before(signal.SIGINT, None)

    def note(self) -> None:
        """Call the former handler when the section ends."""
        self._noted = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted:
            self._before(number, frame)
        self._noted = True


def contained(error: BaseException) -> Exception:
    """What a job ends with whose own code raised `error`. A KeyboardInterrupt in the main thread (a second Ctrl-C,
    while a filter hangs) goes on to the caller as well, when the round is over."""
    if isinstance(error, Exception):
        return error
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        if not _open:
            raise error
        _open[-1].note()
    wrapped = UserCodeError(f"a hook or filter raised {error!r}, which is no Exception; raise one instead")
    wrapped.__cause__ = error
    return wrapped
