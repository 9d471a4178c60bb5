"""Raise KeyboardInterrupt at a chosen moment."""

from __future__ import annotations

import _thread
import contextlib
import dis
import itertools
import signal
import sys
from collections import deque
from collections.abc import Iterator
from functools import cache
from types import FrameType

import pytest

__all__ = ["interrupted_at", "skip_unless_with_is_safe"]

#: Before each call of a `with` statement's `__enter__`, from Python 3.14 on.
LOAD_SPECIAL = dis.opmap.get("LOAD_SPECIAL")


@contextlib.contextmanager
def interrupted_at(number: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at the `number`-th moment at which Python handles signals.

    These are the beginnings of functions, and the returns of C functions. The return of a `with` statement's
    `__enter__` is left out: no signal was handled there before 3.14, and later versions fix that again (CPython's issue
    148874).

    Yields a list that is empty until the exception is raised. One that is raised in a destructor is not reported.
    """
    seen, raised = itertools.count(1), []

    def look(frame: FrameType, event: str, what: object) -> None:
        if event not in ("call", "c_return", "c_exception") or (event == "c_return" and _enters(frame)):
            return
        if next(seen) == number:
            raised.append(number)
            raise KeyboardInterrupt

    before, reports = sys.getprofile(), sys.unraisablehook
    sys.unraisablehook = deque[object](maxlen=0).append
    sys.setprofile(look)
    try:
        yield raised
    finally:
        sys.setprofile(before)
        sys.unraisablehook = reports


def _enters(frame: FrameType) -> bool:
    """Return whether the frame's last call is that of a `with` statement's `__enter__`."""
    return LOAD_SPECIAL is not None and frame.f_lasti > 1 and frame.f_code.co_code[frame.f_lasti - 2] == LOAD_SPECIAL


def skip_unless_with_is_safe() -> None:
    """Skip a test of signals at any moment where they may leave the lock of a `with` statement locked."""
    if not _with_is_safe():
        pytest.skip("this Python may interrupt a `with` statement before its block (CPython's issue 148874)")


@cache
def _with_is_safe() -> bool:
    """Return whether `__exit__` follows an `__enter__` in C during which a signal arrives."""
    left: list[bool] = []

    class Interrupted:
        __enter__ = staticmethod(_thread.interrupt_main)

        def __exit__(self, *_: object) -> None:
            left.append(True)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interrupted():
            len(left)  # handles signals
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)
    return bool(left)
