"""`ReplayedFilter`: filters that go back by beginning anew."""

from __future__ import annotations

from exl_filters.base import ExLlamaV2Filter
from exl_filters.errors import FilterUsageError

__all__ = ["ReplayedFilter"]


class ReplayedFilter(ExLlamaV2Filter):
    """Rewinds by a new begin with the same prefix and all tokens that are kept.

    Subclasses set both in `begin`, the list empty, and append every token to it in `feed`.
    """

    _prefix: bytes
    _fed: list[int]

    def rewind(self, n: int) -> None:
        if not 0 <= n <= len(self._fed):
            raise FilterUsageError(f"rewind({n}) after {len(self._fed)} tokens")
        if n:
            kept = self._fed[: len(self._fed) - n]
            self.begin(self._prefix)
            for token in kept:
                self.feed(token)
