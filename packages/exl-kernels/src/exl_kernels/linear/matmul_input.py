"""The input of a matmul on a GPU as the result of another kernel: attention, a norm or an adapter packs it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import _native
from .cuda import CudaQuantMatrix

__all__ = ["MatmulInput"]


@dataclass(frozen=True, slots=True)
class MatmulInput:
    """The packed input of a matmul of few rows, as the place of another kernel's results."""

    matrix: CudaQuantMatrix
    """Matrix of the matmul, on the same GPU. ShapeError where its layout pads K."""
    columns: int
    """Rows of the matmul's input layout in `kernels/linear/`: 8 (`rows.cuh`) or 16 to 128 (`prepared.cuh`, wgmma)."""
    scratch: Tensor
    """uint8, aligned to 16 bytes. From byte 0 on 512 x columns bytes for every 256 features are written. Columns past
    the tokens become zeros, or stay as they are where there are eight; features past K in the last 256 are not
    changed."""
    rows: int | None = None
    """Number of rows that `FusedLinear.input_of` was called with; `from_input` takes no other number."""

    def native(self) -> _native.MatmulInput:
        """Return the parameter object of native calls."""
        return _native.MatmulInput(self.matrix._cuda, self.columns, self.scratch)
