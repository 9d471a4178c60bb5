"""Meters: what a worker counts and measures."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

__all__ = ["GAP_BUCKETS", "Gaps", "NoMeter"]

GAP_BUCKETS = tuple(m * 10**e for e in (-4, -3, -2, -1, 0) for m in (1, 2.5, 5))
"""Upper bounds of a histogram of seconds between tokens; a last bucket has no bound."""


class Gaps:
    """Seconds between the tokens of one request, counted in buckets: an object for each token would cost more."""

    __slots__ = ("_last", "counts", "total")

    def __init__(self, choices: int) -> None:
        self._last = [0.0] * choices
        self.counts = [0] * (len(GAP_BUCKETS) + 1)
        self.total = 0.0

    def take(self, choice: int, now: float, tokens: int = 1) -> None:
        """Count the time since the last tokens of the choice, in equal parts for each of these `tokens`."""
        if not tokens:
            return
        last = self._last[choice]
        self._last[choice] = now
        if last:
            self.counts[bisect.bisect_left(GAP_BUCKETS, (now - last) / tokens)] += tokens
            self.total += now - last


class NoMeter:
    """A `Meter` that ignores all values."""

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Ignore the value."""

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Ignore the value."""

    def spread(self, name: str, counts: Sequence[int], total: float, **labels: str) -> None:
        """Ignore the values."""
