"""The MLP cut at quarters of the last matrix' K: hidden features stay on their device, and sums are exchanged.

The whole matrix is summed as ((q0 + q1) + q2) + q3 over the quarters of its packed rows. A device computes the features
that fall into its quarters and sends its quarters' float32 sums. Every process adds them in that one order, so results
are bitwise those of one device. Only matrices on the CPU can be cut so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl_kernels.linear import QuantMatrix

from ...layers.matrix import Cut, ShardedMatrix
from ...loading.linears import LinearOptions, LinearSpec, load_linear
from .matrix import Part, SplitMatrix, check_together, run_parts

if TYPE_CHECKING:
    from ...loading.checkpoint import TensorSource
    from .context import TensorParallel

__all__ = ["FeatureCut", "MlpQuarters", "SumMatrix"]


@dataclass(frozen=True)
class Piece:
    """Rows `features` of a matrix, int64 numbers, on device number `shard`, which are summed together.

    `matrix` has these rows, without bias and prescale; None in processes without that device.
    """

    shard: int
    features: Tensor
    matrix: QuantMatrix | None


class SumMatrix(ShardedMatrix):
    """A matrix cut by inputs, at quarters of its K."""

    def __init__(
        self,
        spec: LinearSpec,
        context: TensorParallel,
        pieces: Sequence[Piece],
        bias: Tensor | None,
        sample: QuantMatrix,
    ) -> None:
        """Describe the pieces of all devices.

        Args:
            spec: the matrix.
            context: the devices.
            pieces: the pieces in the order of addition, which is that of the devices.
            bias: float32 [out], or None.
            sample: a matrix of the same format.
        """
        self.pieces = tuple(pieces)
        held = [piece.matrix for piece in pieces if piece.matrix is not None]
        self.context = context
        super().__init__(spec, context.home, held or [sample])
        self.nbytes = sum(matrix.nbytes for matrix in held)
        self.prescale, self.bias = spec.prescale, bias

    def matmul(self, x: Tensor, out: Tensor | None = None, *, invariant: bool | None = None) -> Tensor:
        """Multiply x float32 [T, in] with features in the model's order -> [T, out], in `out` if given."""
        inputs = self.context.spread(x)
        made = [p.matrix.matmul(inputs(p.shard)[:, p.features]) for p in self.pieces if p.matrix is not None]
        return self._added(made, x, out)

    def after(
        self, x: Tensor, matrices: Sequence[SplitMatrix], run: Callable[[Tensor, Sequence[Part]], Tensor]
    ) -> Tensor:
        """Multiply the results of `run`, which stay on their devices; arguments as for `over_parts`.

        The columns of `matrices` are those that `FeatureCut` cuts for this matrix.
        """
        hidden = iter(run_parts(x, matrices, run))
        made: list[Tensor] = []
        held = [piece for piece in self.pieces if piece.matrix is not None]
        shard, begin, values = -1, 0, x
        for piece in held:
            if piece.shard != shard:
                shard, begin, values = piece.shard, 0, next(hidden)
            end = begin + len(piece.features)
            assert piece.matrix is not None
            made.append(piece.matrix.matmul(values[:, begin:end]))
            begin = end
        return self._added(made, x, None)

    def _added(self, made: Sequence[Tensor], x: Tensor, out: Tensor | None) -> Tensor:
        """Exchange the sums of all pieces, and add them in the one order."""
        parts = [(piece.shard, (x.shape[0], self.out_features)) for piece in self.pieces]
        first, *others = self.context.exchange.collect(parts, made, x)
        total = first if out is None else out.copy_(first)
        for sums in others:
            total += sums
        if self.bias is not None:
            total += self.bias
        return total if self.prescale == 1.0 else total.mul_(self.prescale)

    def dequantize(self) -> Tensor:
        """Return W float16 [in, out] on the CPU without padding columns."""
        check_together(self, self.context.exchange)
        out = torch.empty((self.in_features, self.out_features), dtype=torch.float16)
        made = [piece.matrix.dequantize() for piece in self.pieces if piece.matrix is not None]
        parts = [(piece.shard, (len(piece.features), self.out_features)) for piece in self.pieces]
        for piece, rows in zip(self.pieces, self.context.exchange.collect(parts, made, out), strict=True):
            out[piece.features] = rows
        return out


class MlpQuarters(Cut):
    """The cut of an MLP's last matrix at quarters of its K, which decides the features of each device."""

    def __init__(self, context: TensorParallel, spec: LinearSpec, options: LinearOptions) -> None:
        """spec, options: of the last matrix."""
        self.context = context
        self._spec, self._options = spec, options
        self._made: SumMatrix | None = None  # loaded for the matrices before it, which are loaded first

    def features(self, source: TensorSource) -> list[tuple[int, Tensor]]:
        """Return (device number, features int64) of every device that has any, in the order of `SumMatrix.after`.

        Raises as `load_linear`.
        """
        if self._made is None:
            self._made = self._load(source)
        by_shard: dict[int, list[Tensor]] = {}
        for piece in self._made.pieces:
            by_shard.setdefault(piece.shard, []).append(piece.features)
        return [(shard, torch.cat(own)) for shard, own in by_shard.items()]

    def load(self, source: TensorSource, spec: LinearSpec, options: LinearOptions) -> SumMatrix:
        """Read the pieces of this process' devices. Raises as `load_linear`."""
        made, self._made = self._made, None
        return self._load(source) if made is None else made

    def _load(self, source: TensorSource) -> SumMatrix:
        spec = self._spec
        whole = load_linear(source, replace(spec, prescale=1.0), replace(self._options, device="cpu"))
        if whole.out_features != spec.out_features:
            whole = whole.columns(torch.arange(spec.out_features))
        bias = whole.matmul(torch.zeros((1, spec.in_features)))[0] if spec.bias else None
        pieces = []
        for shard, first, last in self.context.shares.quarters():
            borders = [first, last] if first == 0 else range(first, last + 1)
            for begin, end in pairwise(borders):
                features = whole.quarter_features(begin, end)
                if len(features):
                    local = self.context.is_local(shard)
                    pieces.append(Piece(shard, features, whole.quarters(begin, end) if local else None))
        return SumMatrix(spec, self.context, pieces, bias, whole)


@dataclass(frozen=True)
class FeatureCut(Cut):
    """The outputs of a matrix before the last one of an MLP, by the device of the feature."""

    quarters: MlpQuarters

    def load(self, source: TensorSource, spec: LinearSpec, options: LinearOptions) -> SplitMatrix:
        """Read the parts of this process' devices. Raises as `load_linear`."""
        context = self.quarters.context
        whole = load_linear(source, spec, replace(options, device="cpu"))
        parts = []
        for shard, features in self.quarters.features(source):
            matrix = whole.columns(features) if context.is_local(shard) else None
            parts.append(Part(shard, features, len(features), matrix, ((0, len(features)),)))
        return SplitMatrix(spec, context, parts, whole.out_features, whole)
