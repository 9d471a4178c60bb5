"""Counting where nobody counts."""

from __future__ import annotations

__all__ = ["NoMeter"]


class NoMeter:
    """A `Meter` that forgets."""

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None: ...

    def observe(self, name: str, value: float, **labels: str) -> None: ...
