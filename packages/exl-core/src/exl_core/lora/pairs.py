"""The two small matrices of an adapted module, multiplied so that a row's result depends on that row alone."""

from __future__ import annotations

import torch
from torch import Tensor

from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.lora import LoraEntry, LoraTable
from exl_kernels.selection import PACKED_ROWS

from ..device import activation_dtype

__all__ = ["EmbeddingPair", "LoraPair"]


class LoraPair:
    """x -> ((x @ A) @ B + bias) * scaling; A as stored [r, in], B [out, r]."""

    def __init__(
        self, a: Tensor, b: Tensor, bias: Tensor | None, scaling: float, device: torch.device, name: str
    ) -> None:
        a, b = _for_device(a, device), _for_device(b, device)
        self.a = QuantMatrix.from_float(a, device=device, name=f"{name}.lora_A")
        self.b = QuantMatrix.from_float(b, bias, prescale=scaling, device=device, name=f"{name}.lora_B")
        self.rank = a.shape[0]
        self.entry = LoraEntry.of(a, b, bias, scaling, device) if device.type == "cuda" else None
        """The pair for the kernels that add adapters row by row.

        None on a CPU, and for unsupported shapes or values.
        """
        self._table = None if self.entry is None else LoraTable([self.entry])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.a.nbytes + self.b.nbytes + (0 if self.entry is None else self.entry.nbytes)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [T, in] -> [T, out], of x's type."""
        return _in_blocks(self.b, _in_blocks(self.a, x))

    def add_to(self, x: Tensor, y: Tensor) -> None:
        """Add the result for x [T, in] to y [T, out]."""
        if self._table is not None and self._table.takes(x, y):
            self._table.add(x, y)
        else:
            y += self.forward(x)


class EmbeddingPair:
    """ids -> (A[:, id] @ B) * scaling; A as stored [r, vocabulary], B [hidden, r]."""

    def __init__(self, a: Tensor, b: Tensor, scaling: float, device: torch.device, name: str) -> None:
        self.table = a.t().contiguous().to(device)
        self.b = QuantMatrix.from_float(
            _for_device(b, device), prescale=scaling, device=device, name=f"{name}.lora_embedding_B"
        )
        self.rank = a.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.table.nbytes + self.b.nbytes

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids int64 [T] -> [T, hidden]."""
        return _in_blocks(self.b, self.table[ids].to(activation_dtype(self.table.device)))


def _for_device(weight: Tensor, device: torch.device) -> Tensor:
    """Convert bfloat16 to half on a GPU, where activations are halves, unless that overflows.

    Otherwise it would be converted at every step.
    """
    if device.type == "cuda" and weight.dtype == torch.bfloat16:
        half = weight.half()
        return half if bool(torch.isfinite(half).all()) else weight
    return weight


def _in_blocks(matrix: QuantMatrix, x: Tensor) -> Tensor:
    """Compute matrix.matmul(x), on a GPU always PACKED_ROWS rows at a time (the last block padded with zeros).

    A library picks its kernel, and with it the order of sums, by the shape.
    """
    if x.device.type == "cpu":
        return matrix.matmul(x)
    rows = x.shape[0]
    if rows % PACKED_ROWS:
        x = torch.nn.functional.pad(x, (0, 0, 0, PACKED_ROWS - rows % PACKED_ROWS))
    out = torch.empty((x.shape[0], matrix.out_features), dtype=x.dtype, device=x.device)
    for begin in range(0, x.shape[0], PACKED_ROWS):
        matrix.matmul(x[begin : begin + PACKED_ROWS], out=out[begin : begin + PACKED_ROWS])
    return out[:rows]
