"""The experts of a layer in shared calls, on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..activation import ActivationKind
from .cpu import CpuExperts, Expert
from .cuda import GroupedExperts, why_apart

__all__ = ["ExpertGroup", "group_experts"]


class ExpertGroup(Protocol):
    """The gated MLPs of a layer, which compute all rows' chosen experts in one call."""

    device: torch.device
    dtype: torch.dtype
    """Type of the activations: float32 on the CPU, float16 on a GPU."""
    joins_shared: bool
    """Whether calls compute the layer's shared expert, unless they are given its result."""

    def shares(self, rows: int, chosen: int, invariant: bool | None) -> bool:
        """Return whether a call of `rows` rows with `chosen` experts each is faster than one expert after the other.

        invariant: rows do not depend on one another, and on a GPU the call can be captured.
        """
        ...

    def __call__(
        self,
        h: Tensor,
        weights: Tensor,
        ids: Tensor,
        *,
        shared: Tensor | None = None,
        shared_weights: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        invariant: bool | None = None,
    ) -> Tensor:
        """Compute residual + (sum over c of weights[:, c] * expert ids[:, c] of h + shared * shared_weights).

        Shapes and errors as for `CpuExperts` and `GroupedExperts`.
        """
        ...


def group_experts(
    experts: Sequence[Expert], activation: ActivationKind, chosen: int, shared: Expert | None = None
) -> ExpertGroup | None:
    """Group the experts of a layer, of which rows take `chosen` each; None where the kernels cannot share calls.

    Args:
        experts: gate, up and down of each expert.
        activation: kind of activation.
        chosen: experts a row.
        shared: an expert for every row, in addition to the chosen ones.

    Raises:
        ShapeError: matrices on the CPU do not fit.
    """
    every = (*experts, *([] if shared is None else [shared]))
    if all(matrix.device.type == "cpu" for parts in every for matrix in parts):
        return CpuExperts(experts, activation, shared)
    return GroupedExperts(experts, activation) if why_apart(experts, activation, chosen) is None else None
