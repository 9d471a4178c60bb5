"""Choose which grammar is compiled next: a limit for all, a smaller one for each key; keys alternate. Pure data
structure.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items wait by key; `take` returns the next one that may start, and `done` ends it."""

    def __init__(self, at_once: int, of_a_key: int) -> None:
        self._at_once, self._of_a_key = at_once, of_a_key
        #: in the order in which the keys have their turns
        self._waiting: dict[str, deque[T]] = {}
        self._working: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of items that wait or are active."""
        return sum(map(len, self._waiting.values())) + sum(self._working.values())

    def add(self, key: str, item: T) -> None:
        """Add a waiting item."""
        self._waiting.setdefault(key, deque()).append(item)

    def take(self) -> T | None:
        """Return the next item, which is active from now on; None while none may start."""
        if sum(self._working.values()) >= self._at_once:
            return None
        for key, items in self._waiting.items():
            working = self._working.get(key, 0)
            if working >= self._of_a_key:
                continue
            item = items.popleft()
            del self._waiting[key]
            if items:
                self._waiting[key] = items  # after the other keys
            self._working[key] = working + 1
            return item
        return None

    def done(self, key: str) -> None:
        """Record that an active item of this key has ended."""
        self._working[key] -= 1
        if not self._working[key]:
            del self._working[key]

    def remove(self, key: str, item: T) -> bool:
        """Remove a waiting item. Returns False if it does not wait."""
        items = self._waiting.get(key)
        if items is None or item not in items:
            return False
        items.remove(item)
        if not items:
            del self._waiting[key]
        return True
