"""A Ctrl-C at a chosen moment."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import deque
from collections.abc import Iterator
from types import FrameType

__all__ = ["broken_into"]


@contextlib.contextmanager
def broken_into(number: int) -> Iterator[list[int]]:
    """KeyboardInterrupt at the `number`-th moment at which Python looks for signals: a function begins, or one in C has
    come back. Gives a list that is empty until then; where Python takes an object away nobody else hears of it."""
    seen, struck = itertools.count(1), []

    def look(frame: FrameType, event: str, what: object) -> None:
        if event in ("call", "c_return", "c_exception") and next(seen) == number:
            struck.append(number)
            raise KeyboardInterrupt

    before, reports = sys.getprofile(), sys.unraisablehook
    sys.unraisablehook = deque[object](maxlen=0).append
    sys.setprofile(look)
    try:
        yield struck
    finally:
        sys.setprofile(before)
        sys.unraisablehook = reports
