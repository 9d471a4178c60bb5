"""Bit widths of each matrix: tables of options per slot, and a deterministic allocation of a budget.

A slot is one layer's attention or MLP. Without calibration data the error of an option is estimated from its widths
alone: one more bit quarters the squared error, and small groups reduce it slightly. The allocation walks the convex
hull of the (bits, error) points of every slot, best gain per bit first, so no random search is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import FormatError
from ..formats import exl2_groups, exl2_total_bits

__all__ = ["ATTENTION_ROLES", "HEAD_PLANS", "MLP_ROLES", "Matrix", "Point", "Slot", "allocate", "point_of"]

ATTENTION_ROLES = ("q", "k", "v", "o")
MLP_ROLES = ("gate", "up", "down")

HEAD_PLANS = {
    2: "0.3:4b_32g/0.7:2b_32g",
    3: "0.15:4b_32g/0.85:3b_32g",
    4: "0.15:6b_32g/0.85:4b_32g",
    5: "0.15:6b_128g/0.85:5b_128g",
    6: "0.15:8b_128g/0.85:6b_128g",
    8: "1:8b_128g",
}

# Columns q, k, v, o.
_ATTENTION = """
0.05:3b_64g/0.95:2b_64g   0.05:3b_64g/0.95:2b_64g   0.05:3b_64g/0.95:2b_64g   0.05:3b_64g/0.95:2b_64g
0.1:3b_64g/0.9:2b_64g     0.1:3b_64g/0.9:2b_64g     0.25:3b_64g/0.75:2b_64g   0.1:3b_64g/0.9:2b_64g
0.1:3b_64g/0.9:2b_64g     0.1:3b_64g/0.9:2b_64g     0.1:4b_128g/0.9:3b_128g   0.1:3b_64g/0.9:2b_64g
0.1:3b_64g/0.9:2b_64g     0.1:3b_64g/0.9:2b_64g     0.1:4b_128g/0.9:3b_128g   0.1:4b_128g/0.9:3b_128g
0.1:4b_128g/0.9:3b_128g   0.1:4b_128g/0.9:3b_128g   0.1:4b_128g/0.9:3b_128g   0.1:4b_128g/0.9:3b_128g
0.1:4b_128g/0.9:3b_128g   0.1:4b_128g/0.9:3b_128g   0.1:4b_64g/0.9:3b_64g     0.1:4b_128g/0.9:3b_128g
1:4b_128g                 1:4b_128g                 1:4b_128g                 1:4b_128g
1:4b_128g                 1:4b_128g                 1:4b_64g                  1:4b_128g
1:4b_64g                  1:4b_64g                  1:4b_32g                  1:4b_64g
1:4b_32g                  1:4b_32g                  1:4b_32g                  1:4b_32g
0.1:5b_128g/0.9:4b_128g   0.1:5b_128g/0.9:4b_128g   0.1:5b_64g/0.9:4b_64g     0.1:5b_128g/0.9:4b_128g
0.1:5b_64g/0.9:4b_64g     0.1:5b_64g/0.9:4b_64g     0.1:5b_32g/0.9:4b_32g     0.1:5b_64g/0.9:4b_64g
0.1:5b_64g/0.9:4b_64g     0.1:5b_64g/0.9:4b_64g     1:5b_64g                  0.1:5b_64g/0.9:4b_64g
0.1:5b_32g/0.9:4b_32g     0.1:5b_32g/0.9:4b_32g     1:5b_32g                  0.1:5b_32g/0.9:4b_32g
0.1:6b_128g/0.9:5b_128g   0.1:6b_128g/0.9:5b_128g   1:6b_128g                 0.1:6b_128g/0.9:5b_128g
0.1:6b_32g/0.9:5b_32g     0.1:6b_32g/0.9:5b_32g     1:6b_32g                  0.1:6b_32g/0.9:5b_32g
1:6b_128g                 1:6b_128g                 1:6b_128g                 1:6b_128g
1:6b_32g                  1:6b_32g                  1:8b_32g                  1:6b_32g
1:8b_128g                 1:8b_128g                 1:8b_128g                 1:8b_128g
"""

# Columns gate, up, down.
_MLP = """
0.05:3b_64g/0.95:2b_64g   0.05:3b_64g/0.95:2b_64g   0.05:6b_32g/0.2:3b_64g/0.75:2b_64g
0.1:3b_64g/0.9:2b_64g     0.25:3b_64g/0.75:2b_64g   0.05:6b_32g/0.2:3b_64g/0.75:2b_64g
0.1:3b_64g/0.9:2b_64g     0.3:3b_64g/0.7:2b_64g     0.05:5b_32g/0.95:3b_32g
0.1:3b_64g/0.9:2b_64g     0.3:3b_64g/0.7:2b_64g     0.05:5b_32g/0.95:4b_32g
0.1:4b_128g/0.9:3b_128g   0.25:4b_128g/0.75:3b_128g 0.05:8b_32g/0.1:4b_128g/0.85:3b_128g
0.1:4b_32g/0.9:3b_32g     0.25:4b_32g/0.75:3b_32g   0.05:8b_32g/0.1:4b_32g/0.85:3b_32g
0.1:4b_32g/0.9:3b_32g     0.25:4b_32g/0.75:3b_32g   0.05:8b_32g/0.95:4b_128g
1:4b_128g                 1:4b_32g                  0.05:8b_32g/0.95:4b_128g
1:4b_32g                  1:4b_32g                  0.05:8b_32g/0.95:4b_32g
0.1:5b_128g/0.9:4b_128g   0.25:5b_128g/0.75:4b_128g 0.05:8b_32g/0.1:5b_128g/0.85:4b_128g
0.1:5b_32g/0.9:4b_32g     0.25:5b_32g/0.75:4b_32g   0.05:8b_32g/0.1:5b_32g/0.85:4b_32g
0.1:6b_128g/0.9:5b_128g   0.25:6b_128g/0.75:5b_128g 0.05:8b_32g/0.1:6b_128g/0.85:5b_128g
0.1:6b_32g/0.9:5b_32g     0.25:6b_32g/0.75:5b_32g   0.05:8b_32g/0.1:6b_32g/0.85:5b_32g
1:6b_128g                 1:6b_128g                 0.05:8b_32g/0.95:6b_128g
0.1:8b_128g/0.9:6b_128g   0.1:8b_128g/0.9:6b_128g   0.15:8b_128g/0.85:6b_128g
0.1:8b_128g/0.9:6b_128g   0.1:8b_128g/0.9:6b_128g   1:8b_128g
1:8b_128g                 1:8b_128g                 1:8b_128g
"""


def _table(text: str, roles: Sequence[str]) -> tuple[dict[str, str], ...]:
    return tuple(dict(zip(roles, line.split(), strict=True)) for line in text.strip().splitlines())


OPTIONS = {"attention": _table(_ATTENTION, ATTENTION_ROLES), "mlp": _table(_MLP, MLP_ROLES)}


@dataclass(frozen=True, slots=True)
class Matrix:
    """One linear of a model: its key, its role in the layer, and its size."""

    key: str
    role: str
    in_features: int
    out_features: int

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.in_features * self.out_features


@dataclass(frozen=True, slots=True)
class Slot:
    """A layer's attention or MLP, whose matrices together take one row of an option table."""

    name: str
    matrices: tuple[Matrix, ...]

    @property
    def options(self) -> tuple[dict[str, str], ...]:
        """Rows of the option table for this slot: a plan for each role."""
        return OPTIONS["attention" if self.matrices[0].role in ATTENTION_ROLES else "mlp"]


@dataclass(frozen=True, slots=True)
class Point:
    """One row of a slot's option table by number: total bits of its matrices, and their expected squared error."""

    option: int
    bits: int
    error: float


def allocate(slots: Sequence[Slot], bits: float) -> dict[str, str]:
    """Choose a plan for every matrix within a budget of bits per weight.

    The choice is deterministic and monotone in `bits`, except for the last few matrices.

    Args:
        slots: attention and MLP of each layer, in order.
        bits: average bits per weight, all five tensors of each matrix counted.

    Returns:
        The plan of each matrix by its key.

    Raises:
        FormatError: even the narrowest plans need more bits; the message says how many.
    """
    weights = sum(m.weights for slot in slots for m in slot.matrices)
    budget = int(bits * weights)
    points = [[point_of(slot, i) for i in range(len(slot.options))] for slot in slots]
    chosen = [min(p, key=lambda point: (point.bits, point.error)) for p in points]
    left = budget - sum(point.bits for point in chosen)
    if left < 0:
        raise FormatError(
            f"{bits} bits per weight is too little: scales and tables included, this model needs at least "
            f"{(budget - left) / weights:.3f}"
        )
    steps = [((a.error - b.error) / (b.bits - a.bits), i, b) for i, p in enumerate(points) for a, b in _edges(_hull(p))]
    # Best gain per bit first; ties go to the outer layers, which are the most sensitive.
    middle = (len(slots) - 1) / 2
    for _, i, point in sorted(steps, key=lambda step: (-step[0], -abs(step[1] - middle), step[1])):
        if 0 <= point.bits - chosen[i].bits <= left:
            left -= point.bits - chosen[i].bits
            chosen[i] = point
    for i, p in enumerate(points):
        better = [q for q in p if q.error < chosen[i].error and q.bits - chosen[i].bits <= left]
        if better:
            best = min(better, key=lambda point: (point.error, point.bits))
            left -= best.bits - chosen[i].bits
            chosen[i] = best
    return {
        m.key: slot.options[point.option][m.role]
        for slot, point in zip(slots, chosen, strict=True)
        for m in slot.matrices
    }


def point_of(slot: Slot, option: int) -> Point:
    """Return the bits and the expected error of a slot's matrices with one row of its option table."""
    plans = slot.options[option]
    bits = sum(exl2_total_bits(plans[m.role], m.in_features, m.out_features) for m in slot.matrices)
    error = sum(m.out_features * _row_error(plans[m.role], m.in_features) for m in slot.matrices)
    return Point(option, bits, error)


def _row_error(plan: str, in_features: int) -> float:
    """Return the expected squared error of one output row, in units of the variance of its weights times 4^-bits."""
    error = 0.0
    for bits, rows in exl2_groups(plan, in_features):
        # The largest of n normal weights grows about as sqrt(ln n), and so does the quantization step.
        error += rows * 4.0**-bits * (1.0 + 0.08 * (rows.bit_length() - 6))
    return error


def _hull(points: list[Point]) -> list[Point]:
    """Return the lower convex hull: fewer bits for more error, steepest edge first."""
    hull: list[Point] = []
    for point in sorted(points, key=lambda p: (p.bits, p.error)):
        if hull and point.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], point):
            hull.pop()
        if hull and point.bits == hull[-1].bits:
            continue
        hull.append(point)
    return hull


def _slope(a: Point, b: Point) -> float:
    return (a.error - b.error) / (b.bits - a.bits)


def _edges(hull: list[Point]) -> list[tuple[Point, Point]]:
    return list(pairwise(hull))
