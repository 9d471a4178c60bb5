"""Whose a cache is: the generator's that has jobs in it, and behind them the last one's.

A page table says what stands in a cache's pages. Two of them over one cache would each believe in what the other has
overwritten. So a generator takes its caches when jobs are queued, and forgets its pages if another one has had them.
One that nobody holds any more is in nobody's way, though it lives until the garbage collector comes: it is made of
cycles, so whoever it would refuse calls the collector.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

from exl_generate.errors import JobStateError

__all__ = ["Tenant", "taken"]

_gate = threading.RLock()
_holders: dict[int, weakref.ref[Tenant]] = {}
# Until when a holder in the way is not looked for by a garbage collection again. One takes half a second in a process
# of many objects, and no thread runs meanwhile: a loop that tries again may spend a small part of the time on them.
_rests: weakref.WeakKeyDictionary[Tenant, float] = weakref.WeakKeyDictionary()
COLLECT_EVERY = 1.0
COLLECT_SHARE = 0.05


class Tenant(Protocol):
    """What a generator is to the others."""

    def leave_caches(self) -> None:
        """Make room for another generator. Raises `JobStateError` while jobs of this one are in the way."""

    def forget_pages(self) -> None:
        """Somebody else has written into the caches."""


@contextlib.contextmanager
def taken(tenant: Tenant, caches: Sequence[object]) -> Iterator[None]:
    """The caches are the tenant's from here on; nobody else can take them before the end of this. Raises what the
    present holder's `leave_caches` does."""
    with _gate:
        places = [id(cache) for cache in map(_memory_of, caches) if _known(cache)]
        while (refusing := _make_room(tenant, places)) is not None:
            _collect(refusing)
        strange = [place for place in places if _holder(place) is not tenant]
        if any(place in _holders for place in strange):
            tenant.forget_pages()
        _holders.update((place, weakref.ref(tenant)) for place in strange)
        yield


def _make_room(tenant: Tenant, places: Sequence[int]) -> weakref.ref[Tenant] | None:
    """Have the others leave. One that refuses may be there only until the next garbage collection: it is returned, and
    nothing refers to it when this is left. Raises its refusal if there was a collection for it a short while ago."""
    others = {id(one): one for one in map(_holder, places) if one is not None and one is not tenant}
    for other in others.values():
        try:
            other.leave_caches()
        except JobStateError:
            if time.monotonic() < _rests.get(other, 0.0):
                raise
            return weakref.ref(other)
    return None


def _collect(refusing: weakref.ref[Tenant]) -> None:
    """Call the collector for one that refuses, and not again for a while whatever comes of it."""
    began = time.monotonic()
    gc.collect()
    ended = time.monotonic()
    if (other := refusing()) is not None:
        _rests[other] = ended + max(COLLECT_EVERY, (ended - began) / COLLECT_SHARE)


def _memory_of(cache: object) -> object:
    """The object that owns the memory: a view names it."""
    return getattr(cache, "underlying", cache)


def _known(cache: object) -> bool:
    """See that a cache's number is forgotten with it. False for one that cannot be watched."""
    if id(cache) not in _holders:
        try:
            weakref.finalize(cache, _holders.pop, id(cache), None).atexit = False
        except TypeError:
            return False
    return True


def _holder(place: int) -> Tenant | None:
    found = _holders.get(place)
    return None if found is None else found()
