"""Foreign filters that cannot be copied: which live stack uses each of them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

from exl_filters.errors import FilterBusy

__all__ = ["owners"]


class Owners:
    """Records which live stack uses which foreign object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: dict[int, weakref.ref[object]] = {}

    def claim(self, obj: object, stack: object) -> int:
        """Note that `stack` uses `obj`, and return what `release` takes. Raises FilterBusy while another stack does."""
        with self._lock:
            held = self._owner.get(id(obj))
            if held is not None and held() is not None:
                raise FilterBusy(
                    f"this {type(obj).__name__} serves a live job and cannot be copied safely: give each job its own"
                )
            self._owner[id(obj)] = weakref.ref(stack)
        return id(obj)

    def release(self, claims: Iterable[int], stack: object) -> None:
        """Forget what `stack` has claimed."""
        with self._lock:
            for claim in claims:
                held = self._owner.get(claim)
                if held is not None and held() in (stack, None):
                    del self._owner[claim]


owners = Owners()
"""The owners of this process."""
