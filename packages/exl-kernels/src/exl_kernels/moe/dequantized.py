"""The order in which dequantized experts multiply: which of them at a time, and the rows of each.

Some experts at a time are dequantized and multiplied in one batched call, so each gets as many rows as the one with the
most. Experts with about as many rows go together.

`ops::moe::select` (rust/exl-cuda) decides that experts are dequantized. The groups depend on how many rows each expert
got, and choose no kernel of ours: they bound the padding that cuBLAS multiplies. So they are no part of that table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DEQUANTIZED_BYTES", "ROUND", "PaddedGroup", "padded_experts", "padded_groups"]

DEQUANTIZED_BYTES = 128 << 20
"""Memory for dequantized matrices, unless a single one is larger."""

ROUND = 32
"""Rows of an expert are padded to a multiple of this: cuBLAS chooses kernels anew for each number of rows."""
FREE_ROWS = 64
"""Rows of an expert that cost no more than fewer."""


@dataclass(frozen=True)
class PaddedGroup:
    """Experts that are multiplied at once, each with `rows` rows."""

    experts: tuple[int, ...]
    rows: int


def padded_groups(counts: Sequence[int], most: int) -> list[PaddedGroup]:
    """Divide the experts that have rows into groups of at most `most`.

    A group has at most twice as many padded rows as its experts have or, if that is more, `FREE_ROWS` for each.

    Args:
        counts: rows of each expert.
        most: experts of a group, at least one.
    """
    groups: list[PaddedGroup] = []
    held: list[int] = []
    total = 0
    for number in sorted((i for i, count in enumerate(counts) if count), key=counts.__getitem__):
        count = counts[number]
        padded = (len(held) + 1) * count
        if held and (len(held) == most or (count > FREE_ROWS and padded > 2 * (total + count))):
            groups.append(_group(held, counts))
            held, total = [], 0
        held.append(number)
        total += count
    if held:
        groups.append(_group(held, counts))
    return groups


def _group(experts: Sequence[int], counts: Sequence[int]) -> PaddedGroup:
    """Return the group of experts in the order of their counts."""
    return PaddedGroup(tuple(experts), -(-counts[experts[-1]] // ROUND) * ROUND)


def padded_experts(groups: Sequence[PaddedGroup]) -> list[tuple[int, int, int]]:
    """Return (expert, first padded row, padded rows) of each expert, the groups one after the other."""
    found, first = [], 0
    for group in groups:
        for number in group.experts:
            found.append((number, first, group.rows))
            first += group.rows
    return found
