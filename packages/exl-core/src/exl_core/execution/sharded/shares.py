"""The share of each device in heads, features and experts: whole numbers from proportions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from exl_kernels.linear import QUARTERS

__all__ = ["FEATURES", "Bounds", "Shares"]

FEATURES = 32  # output features are cut at multiples of this: no format needs more
Bounds = tuple[tuple[int, int, int], ...]  # (number of the device, begin, end) of every device with a share


@dataclass(frozen=True)
class Shares:
    """Proportions of the devices: `heads` for key/value heads and their matrices, `rest` for all others.

    Both sum to 1 over the devices. A device may get nothing of a kind.

    Attributes:
        heads: the shares of heads.
        rest: the shares of all else.
        sums: MLPs are cut at quarters of K, which saves an exchange; otherwise by outputs.
    """

    heads: tuple[float, ...]
    rest: tuple[float, ...]
    sums: bool = False

    def kv_heads(self, count: int) -> Bounds:
        """Return bounds of whole key/value heads, each with the query heads that read it."""
        return _bounds(self.heads, count, 1)

    def features(self, count: int) -> Bounds:
        """Return bounds of output features, in blocks."""
        return _bounds(self.rest, count, FEATURES)

    def quarters(self) -> Bounds:
        """Return bounds of quarters of K: at most four devices have any."""
        return _bounds(self.rest, QUARTERS, 1)

    def all_have_quarters(self) -> bool:
        """Return whether every device with a share of `rest` has a quarter of K."""
        return {shard for shard, _, _ in self.quarters()} == {shard for shard, part in enumerate(self.rest) if part}

    def experts(self, count: int) -> list[int]:
        """Return the device of every expert of a mixture: experts are not cut."""
        return [device for device, begin, end in _bounds(self.rest, count, 1) for _ in range(begin, end)]


def _bounds(shares: Sequence[float], count: int, unit: int) -> Bounds:
    """Cut 0 to `count` at multiples of `unit`, each border nearest to the sum of the preceding shares."""
    units = -(-count // unit)
    ends = [min(round(total * units), units) for total in accumulate(shares)]
    ends[-1] = units
    borders = [0, *ends]
    found = [(i, borders[i] * unit, min(borders[i + 1] * unit, count)) for i in range(len(shares))]
    return tuple((i, begin, end) for i, begin, end in found if begin < end)
