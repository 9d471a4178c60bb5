"""A meter that counts nothing."""

from __future__ import annotations

__all__ = ["NoMeter"]


class NoMeter:
    """A `Meter` that ignores all values."""

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Ignore the value."""

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Ignore the value."""
