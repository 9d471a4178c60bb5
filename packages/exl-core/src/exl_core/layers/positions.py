"""Learned position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import FormatError
from ..execution.batch import Step
from ..loading.checkpoint import TensorSource
from ..loading.linears import require_finite_float
from .module import WeightModule

__all__ = ["PositionEmbedding"]


class PositionEmbedding(WeightModule):
    """x + table[position], table [positions, hidden]; positions as RoPE counts them.

    Args:
        key: name of the module in the files.
        positions: most positions of the model; the file must hold them, since learned positions cannot be extended.
        hidden_size: columns of the table.
    """

    name = "PosEmbedding"

    def __init__(self, key: str, positions: int, hidden_size: int) -> None:
        self.key = key
        self.positions = positions
        self.hidden_size = hidden_size
        self.weight: Tensor | None = None

    def refusal_of_rows(self, rows: int) -> str | None:
        """Override `Module.refusal_of_rows`: a row's sum does not depend on other rows."""
        return None

    def load(self, source: TensorSource, device: torch.device) -> None:
        """Read and check the table. Raises FormatError."""
        name = f"{self.key}.weight"
        weight = source.read(name)
        if weight.dim() != 2 or weight.shape[1] != self.hidden_size:
            raise FormatError(
                f"{source.describe(name)}: shape {list(weight.shape)}, expected [positions, {self.hidden_size}]"
            )
        if weight.shape[0] < self.positions:
            raise FormatError(
                f"{source.describe(name)}: Learned positional embeddings cannot be extended past native size of "
                f"{weight.shape[0]}; max_seq_len is {self.positions}: lower it"
            )
        require_finite_float(weight, source.describe(name))
        self.weight = weight.to(device)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Add the positions' rows to x [T, hidden] in place and return x."""
        return x.add_(self.loaded_weight[step.rope_positions].to(x.dtype))
