"""Track which generator owns a cache, and what else writes into it.

A page table describes the content of one cache. Two page tables over one cache would each trust pages that the other
has overwritten. So a generator becomes the owner of its caches when it queues jobs, and forgets its pages if another
generator owned one of them meanwhile. Owners are held weakly: an unused generator owns nothing.

The caller may also write into a cache, by a contiguous pass of the model. `OtherWrites` finds that out.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

from exl_core.cache.writes import contiguous_writes
from exl_generate.contracts import CacheView

__all__ = ["CacheOwner", "OtherWrites", "owning"]

_lock = threading.RLock()
_owners: weakref.WeakKeyDictionary[object, weakref.ref[CacheOwner]] = weakref.WeakKeyDictionary()


class CacheOwner(Protocol):
    """The part of a generator that other generators on its caches use."""

    def leave_caches(self) -> None:
        """Release the caches for another generator. Raises `JobStateError` while jobs are queued or running."""

    def forget_pages(self) -> None:
        """Forget all pages: another generator has written into the caches."""


@contextlib.contextmanager
def owning(owner: CacheOwner, caches: Sequence[object]) -> Iterator[None]:
    """Make `owner` the owner of the caches; no other generator can take them before the block ends.

    Raises the errors of the present owner's `leave_caches`.
    """
    with _lock:
        memories = _memories(caches)
        changed = [memory for memory in memories if _owner_of(memory) is not owner]
        _make_room(changed)
        if any(memory in _owners for memory in changed):
            owner.forget_pages()
        _owners.update((memory, weakref.ref(owner)) for memory in changed)
        yield


class OtherWrites:
    """The writes into a generator's caches that its page table does not know of."""

    def __init__(self, caches: Sequence[object]) -> None:
        self._memories = _memories(caches)
        self._seen = self._count()

    def any_new(self) -> bool:
        """Whether there were any since the last call."""
        before, self._seen = self._seen, self._count()
        return before != self._seen

    def _count(self) -> int:
        return sum(map(contiguous_writes, self._memories))


def _memories(caches: Sequence[object]) -> list[object]:
    return [cache.underlying if isinstance(cache, CacheView) else cache for cache in caches]


def _make_room(memories: Sequence[object]) -> None:
    for other in {id(found): found for found in map(_owner_of, memories) if found is not None}.values():
        other.leave_caches()


def _owner_of(memory: object) -> CacheOwner | None:
    found = _owners.get(memory)
    return None if found is None else found()
