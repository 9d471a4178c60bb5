"""Which texts the filter may give, told by the calendar of the standard library and not by the filter's own code.

For the law kit: only `exl-filters check` and the tests import this module, which needs exl-filters' extra `testing`.
"""

from __future__ import annotations

import datetime
import re

from hypothesis import strategies as st

from exl_filters.testing import Language

__all__ = ["dates"]

SHAPE = re.compile(rb"[0-9]{4}-[0-9]{2}-[0-9]{2}")
# Every beginning of a date becomes a date with the rest of one of these.
ENDINGS = (b"1111-11-11", b"1110-10-10")


def whole(text: bytes) -> bool:
    """Whether the standard library reads it as a date."""
    if not SHAPE.fullmatch(text):
        return False
    try:
        datetime.date.fromisoformat(text.decode("ascii"))
    except ValueError:
        return False
    return True


def prefix(text: bytes) -> bool:
    """Whether some date begins with it."""
    return any(whole(text + ending[len(text) :]) for ending in ENDINGS)


def dates() -> Language:
    """All dates that exist."""
    sentences = st.dates().map(lambda date: date.isoformat().encode())
    return Language("dates", prefix, whole, sentences, [b"2024-02-29", b"1999-12-31"])
