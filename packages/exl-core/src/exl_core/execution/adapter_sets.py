"""The combinations of adapters that rows of captured steps can have, each in a slot."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..contracts import Adapter

__all__ = ["AdapterSets"]

MAX_SETS = 32  # most combinations at a time


class AdapterSets:
    """Slots of combinations of adapters, which do not keep the adapters alive.

    Attributes:
        version: counts changes of the combinations.
        stale: an adapter was freed since the last `clear`: captured steps must not use the slots any more.
    """

    def __init__(self) -> None:
        self._slots: dict[tuple[int, ...], int] = {}  # identities of a combination's adapters -> slot
        self._adapters: list[tuple[weakref.ref[Adapter], ...]] = []
        self._watched: dict[int, weakref.finalize[..., Adapter]] = {}
        self.version = 0
        self.stale = False

    def clear(self) -> None:
        """Forget all combinations."""
        self._slots.clear()
        self._adapters.clear()
        for watch in self._watched.values():
            watch.detach()
        self._watched.clear()
        self.stale = False

    def new_of(self, adapters: Sequence[tuple[Adapter, ...]]) -> list[tuple[Adapter, ...]]:
        """Return the combinations of these rows that have no slot yet."""
        return list(dict.fromkeys(found for found in adapters if found and _identity(found) not in self._slots))

    def add(
        self,
        new: Sequence[tuple[Adapter, ...]],
        adapters: Sequence[tuple[Adapter, ...]],
        died: Callable[[], Callable[[], None] | None],
    ) -> None:
        """Give new combinations slots. Where there are too many, only those of `adapters`, of all rows, remain.

        died: weak reference to a function that is called after one of the adapters was freed.
        """
        if len(self._slots) + len(new) > MAX_SETS:
            self.clear()
            new = list(dict.fromkeys(found for found in adapters if found))
        for found in new:
            self._slots[_identity(found)] = len(self._adapters)
            self._adapters.append(tuple(weakref.ref(adapter) for adapter in found))
            for adapter in found:
                if id(adapter) not in self._watched:
                    self._watched[id(adapter)] = weakref.finalize(adapter, _tell, died)
                    self._watched[id(adapter)].atexit = False
        self.version += 1

    def slots_of(self, adapters: Sequence[tuple[Adapter, ...]]) -> list[int]:
        """Return the slot of each row's adapters, -1 for none."""
        return [self._slots[_identity(found)] if found else -1 for found in adapters]

    def adapters(self) -> list[tuple[Adapter, ...]]:
        """Return the combinations by slot, without adapters that were freed."""
        alive = [[ref() for ref in found] for found in self._adapters]
        return [tuple(adapter for adapter in found if adapter is not None) for found in alive]


def _identity(adapters: tuple[Adapter, ...]) -> tuple[int, ...]:
    return tuple(map(id, adapters))


def _tell(died: Callable[[], Callable[[], None] | None]) -> None:
    call = died()
    if call is not None:
        call()
