"""`ReplayedFilter`: filters that rewind by replaying their tokens."""

from __future__ import annotations

from exl_filters.base import ExLlamaV2Filter
from exl_filters.errors import FilterUsageError

__all__ = ["ReplayedFilter"]


class ReplayedFilter(ExLlamaV2Filter):
    """Rewind by a new `begin` with the same prefix and a feed of all tokens that are kept.

    In `begin`, subclasses set `_prefix` and an empty `_fed`. In `feed`, they append every token to `_fed`.
    """

    _prefix: bytes
    _fed: list[int]

    def rewind(self, n: int) -> None:
        """Undo the last `n` feeds. Raises `FilterUsageError` for more than were fed."""
        if not 0 <= n <= len(self._fed):
            raise FilterUsageError(f"rewind({n}) after {len(self._fed)} tokens")
        if n:
            kept = self._fed[: len(self._fed) - n]
            self.begin(self._prefix)
            for token in kept:
                self.feed(token)
