"""The order in which dequantized experts multiply: which of them at a time, and the rows of each.

Some experts at a time are dequantized and multiplied in one batched call, so each gets as many rows as the one with the
most. Experts with about as many rows go together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PaddedGroup", "padded_groups", "padded_slots"]

ROUND = 8
"""Rows of an expert are padded to a multiple of this."""
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


def padded_slots(groups: Sequence[PaddedGroup], counts: Sequence[int]) -> Tensor:
    """Return for each padded row of all groups, one after the other, its place among the pairs sorted by expert.

    A pair is a row with one of its experts. Padding rows get the number of pairs. int64, on the CPU.
    """
    held = torch.tensor(counts, dtype=torch.int64)
    begins = held.cumsum(0) - held
    parts = []
    for group in groups:
        experts = torch.tensor(group.experts)
        within = torch.arange(group.rows)
        places = begins[experts, None] + within
        parts.append(places.masked_fill(within >= held[experts, None], int(held.sum())).flatten())
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
