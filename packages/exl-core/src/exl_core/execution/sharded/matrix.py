"""A matrix whose outputs are computed on several devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl_kernels.linear import Compute, Format, QuantMatrix

from ...loading.linears import LinearOptions, LinearSpec, Ranges, load_columns
from .shares import Bounds
from .transfer import send

if TYPE_CHECKING:
    from ...loading.checkpoint import TensorSource
    from .context import TensorParallel

__all__ = ["Part", "SplitMatrix", "load_split", "over_parts"]


@dataclass(frozen=True)
class Part:
    """Outputs [begin, end) of a matrix on device number `shard`. `kept`: the columns of `matrix` that hold them."""

    shard: int
    begin: int
    end: int
    matrix: QuantMatrix
    kept: Ranges

    @property
    def width(self) -> int:
        """Number of outputs."""
        return self.end - self.begin

    @property
    def device(self) -> torch.device:
        """Device of the part."""
        return self.matrix.device

    def matmul(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Multiply x [T, in] on the part's device -> [T, width], contiguous, of x's type or `dtype`."""
        columns = self.matrix.out_features
        out = None if dtype is None else torch.empty((x.shape[0], columns), dtype=dtype, device=x.device)
        y = self.matrix.matmul(x, out=out)
        if self.kept == ((0, columns),):
            return y
        return torch.cat([y[:, begin:end] for begin, end in self.kept], dim=1)


class SplitMatrix:
    """The counterpart of a `QuantMatrix` over several devices, with x and y on the first.

    Every output is computed whole on one device, in the order of one device's sum. On the CPU, and wherever a kernel's
    results do not depend on the number of columns, the result is bitwise identical to that of the whole matrix.
    """

    def __init__(self, spec: LinearSpec, context: TensorParallel, parts: Sequence[Part], stored: int) -> None:
        """stored: number of outputs of the matrix in the files."""
        self.context = context
        self.parts = tuple(parts)
        self.in_features, self.out_features = spec.in_features, spec.out_features
        self.stored_features = stored
        self.name = spec.key
        first = parts[0].matrix
        self.format: Format = first.format
        self.compute: Compute = first.compute
        self.bits_per_weight = sum(p.width * p.matrix.bits_per_weight for p in parts) / spec.out_features
        self.nbytes = sum(p.matrix.nbytes for p in parts)
        self.device = context.home

    def matmul(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply x [T, in] on the first device -> [T, out], in `out` if given."""
        if out is None:
            out = torch.empty((x.shape[0], self.out_features), dtype=x.dtype, device=x.device)
        inputs = self.context.spread(x)
        dtype = None if out.dtype == x.dtype else out.dtype
        made = [(p.begin, p.end, p.matmul(inputs(p.shard), dtype)) for p in self.parts]
        return gathered(made, out)

    def dequantize(self) -> Tensor:
        """Return W float16 [in, out] on the CPU without padding columns."""
        wholes = [(p, p.matrix.dequantize()) for p in self.parts]
        return torch.cat([w[:, begin:end].cpu() for p, w in wholes for begin, end in p.kept], dim=1)


def load_split(
    source: TensorSource, spec: LinearSpec, options: LinearOptions, context: TensorParallel, bounds: Bounds
) -> SplitMatrix:
    """Read every part from the files to its device. Raises as `load_linear`."""
    parts, stored = [], 0
    for shard, begin, end in bounds:
        there = replace(options, device=str(context.device(shard)))
        matrix, kept, stored = load_columns(source, spec, there, begin, end)
        parts.append(Part(shard, begin, end, matrix, kept))
    return SplitMatrix(spec, context, parts, stored)


def over_parts(x: Tensor, matrices: Sequence[SplitMatrix], run: Callable[[Tensor, Sequence[Part]], Tensor]) -> Tensor:
    """Run a function over several matrices with equal shards, one after the other on each device.

    Args:
        x: [T, in] on the first device.
        matrices: the matrices.
        run: called as run(x on the device, the parts there); returns [T, width].

    Returns:
        [T, out] on the first device.
    """
    context = matrices[0].context
    inputs = context.spread(x)
    parts = list(zip(*(m.parts for m in matrices), strict=True))
    made = [(group[0].begin, group[0].end, run(inputs(group[0].shard), group)) for group in parts]
    out = torch.empty((x.shape[0], matrices[0].out_features), dtype=made[0][2].dtype, device=x.device)
    return gathered(made, out)


def gathered(made: Sequence[tuple[int, int, Tensor]], out: Tensor) -> Tensor:
    """Copy columns (begin, end, values) from any device to `out`."""
    for begin, end, values in made:
        out[:, begin:end] = send(values, out.device)
    return out
