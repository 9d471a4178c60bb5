"""What every device gets of heads, features and experts: whole numbers from proportions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["FEATURES", "Bounds", "Shares"]

FEATURES = 32  # output features are cut at multiples of this: no format needs more
Bounds = tuple[tuple[int, int, int], ...]  # (number of the device, begin, end) of every device that gets something


@dataclass(frozen=True)
class Shares:
    """Proportions of the devices: `heads` of key/value heads (and of what depends on them), `rest` of all else.

    Both sum to 1 over the devices. A device may end up with nothing of a kind.
    """

    heads: tuple[float, ...]
    rest: tuple[float, ...]

    def kv_heads(self, count: int) -> Bounds:
        """Whole key/value heads, each with the query heads that read it."""
        return _bounds(self.heads, count, 1)

    def features(self, count: int) -> Bounds:
        """Output features, in blocks."""
        return _bounds(self.rest, count, FEATURES)

    def experts(self, count: int) -> list[int]:
        """The device of every expert of a mixture: experts are not cut."""
        return [device for device, begin, end in _bounds(self.rest, count, 1) for _ in range(begin, end)]


def _bounds(shares: Sequence[float], count: int, unit: int) -> Bounds:
    """0 to `count` cut at multiples of `unit`, each border where the sum of shares before it is nearest."""
    units = -(-count // unit)
    ends = [min(round(total * units), units) for total in accumulate(shares)]
    ends[-1] = units
    borders = [0, *ends]
    found = [(i, borders[i] * unit, min(borders[i + 1] * unit, count)) for i in range(len(shares))]
    return tuple((i, begin, end) for i, begin, end in found if begin < end)
