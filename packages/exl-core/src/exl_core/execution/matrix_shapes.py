"""The shapes of matrices in a model's files, without their weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from exl_kernels.selection import MatrixShape

from ..layers import Linear, Norm
from ..loading.checkpoint import Checkpoint, TensorReader, TensorSource
from ..loading.linears import LinearOptions, LinearSpec, read_quantized

__all__ = ["MatrixShapes"]


class MatrixShapes:
    """The shapes of a model's matrices, read once each from the headers and scales of its files."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """checkpoint: the files of the model."""
        self._source = _WithoutWeights(TensorReader(checkpoint))
        self._known: dict[str, MatrixShape | None] = {}

    def is_float(self, linear: Linear) -> bool:
        """Return whether the matrix is not quantized."""
        return self.of(linear) is None

    def is_padded(self, linear: Linear) -> bool:
        """Return whether a quantized matrix has columns beyond the layer's features."""
        shape = self.of(linear)
        return shape is not None and shape.out_features != linear.out_features

    def of(self, linear: Linear) -> MatrixShape | None:
        """Return the shape of a quantized matrix; None for a float matrix."""
        if linear.key not in self._known:
            self._known[linear.key] = _shape(self._source, linear.spec, linear.stored(self._source))
        return self._known[linear.key]

    def all(self, linears: Iterable[Linear]) -> list[MatrixShape] | None:
        """Return the shapes; None where a matrix is float."""
        shapes = [self.of(linear) for linear in linears]
        quantized = [shape for shape in shapes if shape is not None]
        return quantized if len(quantized) == len(shapes) else None

    def of_norm(self, norm: Norm) -> tuple[int, ...]:
        """Return the shape of a norm's weight."""
        name = f"{norm.key}.weight"
        return tuple(self._source.shape(name if self._source.has(name) else norm.key))


def _shape(source: TensorSource, spec: LinearSpec, options: LinearOptions) -> MatrixShape | None:
    found = read_quantized(source, spec, options)
    if found is None:
        return None
    kind, tensors, name = found
    if kind == "exl2":
        return MatrixShape.from_exl2(tensors, name=name, fine_scales=options.fine_scales)
    return MatrixShape.from_gptq(
        tensors, bits=options.gptq_bits, zeros=options.gptq_zeros, group_size=options.gptq_group_size, name=name
    )


class _WithoutWeights:
    """A source of uninitialized packed weights of the right shape, which are never read from the disk."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self.has, self.shape, self.read, self.describe = reader.has, reader.shape, reader.read, reader.describe

    def read_group(self, names: Collection[str]) -> dict[str, Tensor]:
        weights = {name for name in names if name.endswith((".q_weight", ".qweight"))}
        group = self._reader.read_group([name for name in names if name not in weights])
        for name in weights:
            group[name] = torch.empty(self.shape(name), dtype=torch.int32)
        return group
