"""Operators of a pass of many rows, whose halves take the same memory one after the other.

Such passes are bound by the host: what depends on the pass alone is made once for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from exl_kernels.attention.prompt import PromptAttention
from exl_kernels.device import rows_are_invariant
from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.cuda import CudaQuantMatrix, WeightMemory

from ..device import activation_dtype
from ..layers.heads import shape_heads
from .attention_half import AttentionHalf, JoinedHeads
from .batch import Step
from .half import Half, HalfInput, JoinedHalf
from .half_launches import HeadNormLaunch
from .operators import Operators

__all__ = ["ManyRows", "largest_weight", "takes_many_rows"]

ALIGNED = 512
"""Bytes; as memory of torch's allocator, so that cuBLAS takes the same kernels."""


class _Attention(NamedTuple):
    """Attention of all layers of one kind."""

    parts: Sequence[Tensor]
    """q, k and v, each [T, heads * head_dim]."""
    attend: PromptAttention
    mixed: Tensor
    """The result [T, heads * head_dim]."""


def takes_many_rows(rows: int, *, invariant: bool) -> bool:
    """Return whether `ManyRows` runs halves of so many rows whose launches are not joined.

    invariant: the pass asks for batch-invariant rows.
    """
    return not rows_are_invariant(rows, invariant=invariant)


def largest_weight(halves: Sequence[Half]) -> int:
    """Return the elements of the largest matrix that `ManyRows` dequantizes."""
    own = (part for half in halves if isinstance(half, JoinedHalf) for part in half.matmul_halves())
    matrices = (matrix for half in own for matrix in half.matrices if isinstance(matrix, CudaQuantMatrix))
    return max((matrix.in_features * matrix.out_features for matrix in matrices), default=0)


class ManyRows(Operators):
    """Separate matmuls of one pass of more rows than are batch-invariant, which dequantize their matrices.

    Results of first matmuls, attention, and matmuls that nothing is added to are valid until the next half runs.

    Args:
        halves: those that may run.
        rows: tokens of the pass, `takes_many_rows`.
        device: the device of the halves.
    """

    def __init__(self, halves: Sequence[Half], rows: int, device: torch.device) -> None:
        self._rows, self._dtype = rows, activation_dtype(device)
        own = [part for half in halves if isinstance(half, JoinedHalf) for part in half.matmul_halves()]
        per = ALIGNED // self._dtype.itemsize
        sizes = ([_up(rows * width, per) for width in half.held] for half in own)
        self._memory = torch.empty(max(map(sum, sizes), default=0), dtype=self._dtype, device=device)
        self._weights = WeightMemory(largest_weight(halves), device)
        self._results: dict[tuple[int, ...], list[Tensor]] = {}
        self._attention: dict[object, _Attention] = {}
        self._sum: Tensor | None = None

    def first(self, half: JoinedHalf, x: Tensor, h: HalfInput, step: Step) -> list[Tensor]:
        """Norm x, unless h is that, and multiply by each of the first matrices."""
        h, found = half.normed(x, h), self._parts(half.held)[: len(half.about.first)]
        self._multiply(half, h, found)
        return found

    def attention(self, half: JoinedHalf, x: Tensor, h: HalfInput, step: Step) -> Tensor | None:
        """Run norm, q, k, v and attention; see `Operators.attention`. None for decode steps."""
        assert isinstance(half, AttentionHalf), "halves of MLPs have none"
        if step.decodes:
            return None
        found = self._attention.get(half.kind)
        if found is None:
            found = self._attention[half.kind] = self._attention_of(half, step)
        self._multiply(half, half.normed(x, h), found.parts)
        if half.plan.head_norm_launch(step.q_len, together=False) is HeadNormLaunch.OWN:
            shape_heads(half.about, found.parts)
        found.attend(step.pages(half.about.layer_idx))
        return found.mixed

    def _attention_of(self, half: AttentionHalf, step: Step) -> _Attention:
        a, parts = half.about, self._parts(half.held)
        q, k, v, mixed = (t.view(self._rows, -1, a.head_dim) for t in parts)
        heads = JoinedHeads(a, step)
        attend = PromptAttention(
            heads.pages,
            q,
            k,
            v,
            tables=heads.tables,
            slots=step.slots,
            rotation=None if a.rope == "none" else heads.turn,
            options=heads.scores,
            out=mixed,
        )
        return _Attention(parts[:3], attend, parts[3])

    def _parts(self, widths: tuple[int, ...]) -> list[Tensor]:
        """Return tensors [T, width] side by side in the memory that halves share."""
        found = self._results.get(widths)
        if found is None:
            per = ALIGNED // self._dtype.itemsize
            begins = accumulate((_up(self._rows * width, per) for width in widths), initial=0)
            found = self._results[widths] = [
                self._memory[begin : begin + self._rows * width].view(self._rows, width)
                for begin, width in zip(begins, widths, strict=False)
            ]
        return found

    def _multiply(self, half: JoinedHalf, h: Tensor, out: Sequence[Tensor]) -> None:
        for matrix, result in zip(half.matrices, out, strict=False):  # the last matrix has no result here
            self._write(matrix, h, result)

    def _write(self, matrix: QuantMatrix, x: Tensor, out: Tensor) -> None:
        if isinstance(matrix, CudaQuantMatrix):
            matrix.matmul_in(self._weights, x, out)
        else:
            matrix.matmul(x, out=out, invariant=False)

    def add(self, matrix: CudaQuantMatrix, y: Tensor, x: Tensor) -> None:
        """See `Operators.add`."""
        matrix.add_matmul_in(self._weights, y, x)

    def multiplied(self, matrix: QuantMatrix, y: Tensor, step: Step) -> Tensor:
        """See `Operators.multiplied`."""
        if self._sum is None or self._sum.shape[1] != matrix.out_features:
            self._sum = y.new_empty(y.shape[0], matrix.out_features)
        self._write(matrix, y, self._sum)
        return self._sum


def _up(size: int, to: int) -> int:
    return -(-size // to) * to
