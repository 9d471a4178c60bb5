"""Low-rank adapters on a GPU: y += (x A) B, where each row has a different adapter or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_kernels import _native
from exl_kernels.cuda_ops import check_operand, launch_on
from exl_kernels.errors import DTypeError, ShapeError
from exl_kernels.linear.cuda import aligned

__all__ = ["LoraEntry", "LoraTable"]


@dataclass(frozen=True, eq=False)
class LoraEntry:
    """The adapter of one matrix on a GPU: x -> ((x @ A.T) * scale) @ B + bias."""

    a: Tensor
    """float16 [rank, in]."""
    b: Tensor
    """float16 [rank, out]."""
    scale: Tensor
    """float32 [rank]."""
    bias: Tensor | None = None
    """float32 [out], already scaled."""

    @staticmethod
    def of(a: Tensor, b: Tensor, bias: Tensor | None, scaling: float, device: torch.device) -> LoraEntry | None:
        """Make an entry from A [rank, in] and B [out, rank] as files hold them.

        None where the kernels do not take them: a value that half precision cannot hold, inputs that are no multiple of
            8, or
        an odd number of outputs.
        """
        half_a, half_b = (t.to(device).half() for t in (a, b))
        if a.shape[1] % 8 or b.shape[0] % 2 or not (half_a.isfinite().all() and half_b.isfinite().all()):
            return None
        return LoraEntry(
            half_a.contiguous(),
            half_b.t().contiguous(),
            torch.full((a.shape[0],), scaling, dtype=torch.float32, device=device),
            None if bias is None else (bias.to(device).float() * scaling).contiguous(),
        )

    @property
    def rank(self) -> int:
        """Columns between the two matrices."""
        return self.a.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in (self.a, self.b, self.scale, self.bias) if t is not None)


class LoraTable:
    """The adapters that rows of a pass may have for one matrix; None adds nothing.

    A row's result depends on that row and its entry alone.

    Raises:
        ShapeError: there is no entry, or the entries have different sizes.
    """

    def __init__(self, entries: Sequence[LoraEntry | None]) -> None:
        present = [entry for entry in entries if entry is not None]
        if not present:
            raise ShapeError("a table of adapters needs an entry")
        self._entries = present  # keeps the tensors alive: the table holds their addresses
        first = present[0]
        self.in_features, self.out_features = first.a.shape[1], first.b.shape[1]
        self.most_rank = max(entry.rank for entry in present)
        if any((e.a.shape[1], e.b.shape[1]) != (self.in_features, self.out_features) for e in present):
            raise ShapeError("the adapters of a table are for one matrix: their inputs and outputs must be equal")
        rows = [
            (0, 0, 0, 0, 0)
            if e is None
            else (*(t.data_ptr() for t in (e.a, e.b, e.scale)), 0 if e.bias is None else e.bias.data_ptr(), e.rank)
            for e in entries
        ]
        self._table = torch.tensor(rows, dtype=torch.int64, device=first.a.device)

    def add(self, x: Tensor, y: Tensor, entry_ids: Tensor | None = None) -> None:
        """Add the adapters' results to y.

        Args:
            x: float16 [T, in].
            y: float16 [T, out], changed in place.
            entry_ids: int32 [T], the entry of each row, below their number, negative for a row without an adapter. They
                are not checked, since a check would read them back. None: every row has entry 0.

        Raises:
            DTypeError, ShapeError: an operand does not fit.
            DeviceError: the launch failed, or CUDA cannot be used.
        """
        for name, t, width in (("x", x, self.in_features), ("y", y, self.out_features)):
            check_operand(name, t, self._table)
            if t.dtype != torch.float16:
                raise DTypeError(f"{name} has dtype {t.dtype}: expected float16")
            if t.dim() != 2 or t.shape[1] != width or t.shape[0] != x.shape[0]:
                raise ShapeError(f"{name} is {tuple(t.shape)}: expected [T, {width}], with one T for x and y")
        if entry_ids is not None and (entry_ids.dtype != torch.int32 or tuple(entry_ids.shape) != (x.shape[0],)):
            raise ShapeError(f"entry_ids is {tuple(entry_ids.shape)} {entry_ids.dtype}: expected int32 [{x.shape[0]}]")
        if x.shape[0]:
            x = aligned(x)  # the kernels read 16 bytes at a time
            middle = torch.empty((x.shape[0], self.most_rank), dtype=torch.float32, device=x.device)
            _native.cuda_lora_add(x, y, self._table, entry_ids, middle, launch_on(x))
