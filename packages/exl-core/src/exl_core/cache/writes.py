"""Count the writes into a cache that bypass page tables.

A page table describes what paged passes have stored. A contiguous pass over the same memory, or a copy from another
cache, overwrites pages that the table still trusts. A generator compares this count with the one that it saw last.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from weakref import WeakKeyDictionary

__all__ = ["contiguous_writes", "paged_copies", "record_contiguous_write"]

_counts: WeakKeyDictionary[object, int] = WeakKeyDictionary()


class _Thread(threading.local):
    copies_pages = False


_thread = _Thread()


def contiguous_writes(cache: object) -> int:
    """Return the number of recorded writes into `cache`."""
    return _counts.get(cache, 0)


def record_contiguous_write(cache: object) -> None:
    """Record that the content of `cache` changes other than by a paged pass."""
    if not _thread.copies_pages:
        _counts[cache] = _counts.get(cache, 0) + 1


@contextlib.contextmanager
def paged_copies() -> Iterator[None]:
    """Count no copies of this thread: it copies between pages, and its page table knows of the copies."""
    _thread.copies_pages = True
    try:
        yield
    finally:
        _thread.copies_pages = False
