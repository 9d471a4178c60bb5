"""The two small matrices of an adapted module, multiplied so that a row's result depends on that row alone."""

from __future__ import annotations

import torch
from torch import Tensor

from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.lora import LoraEntry, LoraTable

from ..device import activation_dtype

__all__ = ["EmbeddingPair", "LoraPair", "added_by_kernels"]


class LoraPair:
    """x -> ((x @ A) @ B + bias) * scaling; A as stored [r, in], B [out, r]."""

    def __init__(
        self, a: Tensor, b: Tensor, bias: Tensor | None, scaling: float, device: torch.device, name: str
    ) -> None:
        self.a = QuantMatrix.from_float(a, device=device, name=f"{name}.lora_A")
        self.b = QuantMatrix.from_float(b, bias, prescale=scaling, device=device, name=f"{name}.lora_B")
        self.rank = a.shape[0]
        self.entry = LoraEntry.of(a, b, bias, scaling, device) if device.type == "cuda" else None
        """The pair for the kernels that add adapters row by row.

        None on a CPU, and for unsupported shapes or values.
        """
        self._table = None if self.entry is None else LoraTable([self.entry])

    @property
    def for_kernels(self) -> bool:
        """Whether the kernels support the pair."""
        return self.entry is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.a.nbytes + self.b.nbytes + (0 if self.entry is None else self.entry.nbytes)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [T, in] -> [T, out], of x's type."""
        return self.b.matmul(self.a.matmul(x, invariant=True), invariant=True)

    def add_to(self, x: Tensor, y: Tensor, *, invariant: bool | None = None) -> None:
        """Add the result for x [T, in] to y [T, out]; `invariant` as for `QuantMatrix.matmul`."""
        if not added_by_kernels(self._table, x, y, invariant=invariant):
            y += self.forward(x)


def added_by_kernels(
    table: LoraTable | None, x: Tensor, y: Tensor, slots: Tensor | None = None, *, invariant: bool | None = None
) -> bool:
    """Add the pairs of a matrix to y, if its table does for such rows; return whether it did. Otherwise torch must.

    Args:
        table: the pairs by slot; None where kernels do not support one of them.
        x: the input [T, in] of the matrix.
        y: its results [T, out].
        slots: int32 [T], the slot of each row; None: all have slot 0.
        invariant: as for `QuantMatrix.matmul`.
    """
    if table is None or not table.takes(x, y, invariant=invariant):
        return False
    table.add(x, y, slots)
    return True


class EmbeddingPair:
    """ids -> (A[:, id] @ B) * scaling; A as stored [r, vocabulary], B [hidden, r]."""

    def __init__(self, a: Tensor, b: Tensor, scaling: float, device: torch.device, name: str) -> None:
        self.table = a.t().contiguous().to(device)
        self.b = QuantMatrix.from_float(b, prescale=scaling, device=device, name=f"{name}.lora_embedding_B")
        self.rank = a.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.table.nbytes + self.b.nbytes

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids int64 [T] -> [T, hidden]."""
        x = self.table[ids].to(activation_dtype(self.table.device))
        return self.b.matmul(x, invariant=True)
