"""The order in which dequantized experts multiply: which of them at a time, and the rows of each.

Some experts at a time are dequantized and multiplied in one batched call, so each gets as many rows as the one with the
most. Experts with about as many rows go together.

The groups choose no kernel of ours; rust/exl-cuda plans them (`ops::moe::dequantized::groups`) on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _native

__all__ = ["PaddedExperts", "dequantized_bytes", "experts_at_once", "most_padded_rows", "plan_padded"]

DEQUANTIZED_BYTES: int = _native.dequantized_bytes()
"""Memory for dequantized matrices, unless a single one is larger."""

most_padded_rows = _native.most_padded_rows


def experts_at_once(hidden: int, width: int) -> int:
    """Return how many experts have a matrix [hidden, width] dequantized at a time."""
    return max(1, DEQUANTIZED_BYTES // (2 * hidden * width))


def dequantized_bytes(hidden: int, width: int) -> int:
    """Return the most bytes of the matrices that are dequantized at a time."""
    return 2 * hidden * width * experts_at_once(hidden, width)


@dataclass(frozen=True)
class PaddedExperts:
    """The experts that have rows, the groups one after the other.

    Attributes:
        memory: uint8, the bytes of `numbers` and `rows`, to be copied at once; pinned if asked for.
        count: experts of the layer.
        groups: the experts that are multiplied at once.
    """

    memory: Tensor
    count: int
    groups: list[_native.PaddedGroup]

    def numbers(self, memory: Tensor) -> Tensor:
        """Return the experts' numbers, int64 [experts of all groups], in `memory` or a copy of it."""
        return memory[: 8 * self.count].view(torch.int64)[: self._held]

    def rows(self, memory: Tensor) -> Tensor:
        """Return int32 [experts of all groups, 3] in `memory` or a copy: expert, first padded row, padded rows."""
        return memory[8 * self.count :].view(torch.int32).view(self.count, 3)[: self._held]

    @property
    def _held(self) -> int:
        return sum(group.experts for group in self.groups)


def plan_padded(begins: Tensor, most: int, *, pinned: bool = False) -> PaddedExperts:
    """Divide the experts that have rows into groups of at most `most`.

    A group has at most twice as many padded rows as its experts have or, if that is more, 64 for each, before
    the rows of an expert are rounded up to a multiple of 32.

    Args:
        begins: int64 [experts + 1] on the CPU: where the rows of each expert begin, in ascending order.
        most: experts of a group, at least one.
        pinned: plan in pinned memory, which a GPU copies without a wait.

    Raises:
        ValueError: `begins` or `most` is not as stated.
    """
    count = begins.shape[0] - 1
    memory = torch.empty(20 * count, dtype=torch.uint8, pin_memory=pinned)
    return PaddedExperts(memory, count, _native.plan_padded_experts(begins, most=most, plan=memory))
