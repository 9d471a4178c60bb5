"""Matrices of which every device has some outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl_kernels.linear import QuantMatrix

from ...errors import ModelStateError
from ...layers.matrix import Cut, ShardedMatrix
from ...loading.linears import LinearOptions, LinearSpec, Ranges, load_columns
from .shares import FEATURES, Bounds

if TYPE_CHECKING:
    from ...loading.checkpoint import TensorSource
    from .context import TensorParallel
    from .exchange import Exchange

__all__ = [
    "Columns",
    "OutputCut",
    "Part",
    "RemoteMatrix",
    "SplitMatrix",
    "WholeElsewhere",
    "check_together",
    "gathered",
    "over_parts",
    "run_parts",
]

Columns = slice | Tensor
"""Outputs of a matrix: a range, or int64 numbers in any order."""


@dataclass(frozen=True)
class Part:
    """Outputs `columns` of a matrix, as many as `width`, on device number `shard`.

    `matrix` is None in processes without that device; its columns `kept` are the outputs.
    """

    shard: int
    columns: Columns
    width: int
    matrix: QuantMatrix | None
    kept: Ranges

    def matmul(self, x: Tensor, dtype: torch.dtype | None = None, *, invariant: bool | None = None) -> Tensor:
        """Multiply x [T, in] on the part's device -> [T, width], contiguous, of x's type or `dtype`.

        `invariant` is as for `QuantMatrix.matmul`.
        """
        assert self.matrix is not None, "a part of another process"
        columns = self.matrix.out_features
        out = None if dtype is None else torch.empty((x.shape[0], columns), dtype=dtype, device=x.device)
        y = self.matrix.matmul(x, out=out, invariant=invariant)
        if self.kept == ((0, columns),):
            return y
        return torch.cat([y[:, begin:end] for begin, end in self.kept], dim=1)

    @property
    def device(self) -> torch.device | None:
        """Device of the part; None in processes without it."""
        return None if self.matrix is None else self.matrix.device

    def dequantize(self) -> Tensor:
        """Return W float16 [in, width] on the CPU."""
        assert self.matrix is not None, "a part of another process"
        whole = self.matrix.dequantize()
        return torch.cat([whole[:, begin:end].cpu() for begin, end in self.kept], dim=1)


class SplitMatrix(ShardedMatrix):
    """A matrix cut by outputs.

    Every output is computed whole on one device, in the order of one device's sum. On the CPU, and wherever a kernel's
    results do not depend on the number of columns, the result is bitwise identical to that of the whole matrix.
    """

    def __init__(
        self,
        spec: LinearSpec,
        context: TensorParallel,
        parts: Sequence[Part],
        stored: int,
        sample: QuantMatrix | None = None,
    ) -> None:
        """Describe the parts of all devices, in the order of the devices.

        Args:
            spec: the matrix.
            context: the devices.
            parts: the parts.
            stored: outputs of the matrix in the files.
            sample: some columns of the matrix, needed where no part is on this process' devices.
        """
        self.parts = tuple(parts)
        self.local = tuple(part for part in parts if part.matrix is not None)
        held = [part.matrix for part in self.local if part.matrix is not None]
        self.context = context
        super().__init__(spec, context.home, held or ([] if sample is None else [sample]))
        self.nbytes = sum(matrix.nbytes for matrix in held)
        self.stored_features = stored
        self.places = [(part.shard, part.columns) for part in self.parts]

    @property
    def takes_blocks(self) -> bool:
        """Whether one launch takes BLOCK_ROWS rows of each part of this process."""
        return all(part.matrix is not None and part.matrix.takes_blocks for part in self.local)

    def matmul(self, x: Tensor, out: Tensor | None = None, *, invariant: bool | None = None) -> Tensor:
        """Multiply x [T, in] on the home device -> [T, out], in `out` if given."""
        if out is None:
            out = torch.empty((x.shape[0], self.out_features), dtype=x.dtype, device=x.device)
        inputs = self.context.spread(x)
        dtype = None if out.dtype == x.dtype else out.dtype
        made = [part.matmul(inputs(part.shard), dtype, invariant=invariant) for part in self.local]
        return gathered(self.context.exchange, self.places, made, out)

    def dequantize(self) -> Tensor:
        """Return W float16 [in, out] on the CPU without padding columns."""
        check_together(self, self.context.exchange)
        # One process joins the parts on the CPU: a GPU may have no room for the whole.
        home = torch.device("cpu") if self.context.exchange.whole else self.context.home
        out = torch.empty((self.in_features, self.out_features), dtype=torch.float16, device=home)
        made = [part.dequantize().to(home) for part in self.local]
        return gathered(self.context.exchange, self.places, made, out).cpu()


@dataclass(frozen=True)
class OutputCut(Cut):
    """Contiguous outputs for every device."""

    context: TensorParallel
    bounds: Bounds

    def load(self, source: TensorSource, spec: LinearSpec, options: LinearOptions) -> SplitMatrix:
        """Read the parts of this process' devices to them. Raises as `load_linear`."""
        parts, stored, sample = [], 0, None
        for shard, begin, end in self.bounds:
            matrix: QuantMatrix | None = None
            kept: Ranges = ((0, end - begin),)
            if self.context.is_local(shard):
                there = replace(options, device=str(self.context.device(shard)))
                matrix, kept, stored = load_columns(source, spec, there, begin, end)
            parts.append(Part(shard, slice(begin, end), end - begin, matrix, kept))
        if all(part.matrix is None for part in parts):
            few = min(FEATURES, spec.out_features)
            sample, _, stored = load_columns(source, spec, replace(options, device="cpu"), 0, few)
        return SplitMatrix(spec, self.context, parts, stored, sample)


class RemoteMatrix(ShardedMatrix):
    """A matrix that is whole on another process' device. It can not be multiplied or read here."""

    def matmul(self, x: Tensor, out: Tensor | None = None, *, invariant: bool | None = None) -> Tensor:
        """Raise ModelStateError."""
        raise ModelStateError(f"{self.name} is on the device of another process")

    def dequantize(self) -> Tensor:
        """Raise ModelStateError."""
        raise ModelStateError(f"{self.name} is on the device of another process: ask that process for its weights")


@dataclass(frozen=True)
class WholeElsewhere(Cut):
    """The whole matrix on a device of another process."""

    context: TensorParallel

    def load(self, source: TensorSource, spec: LinearSpec, options: LinearOptions) -> RemoteMatrix:
        """Read the format of the matrix. Raises as `load_linear`."""
        few = min(FEATURES, spec.out_features)
        sample, _, stored = load_columns(source, spec, replace(options, device="cpu"), 0, few)
        made = RemoteMatrix(spec, self.context.home, [sample])
        made.nbytes, made.stored_features = 0, stored
        return made


def check_together(matrix: ShardedMatrix, exchange: Exchange) -> None:
    """Raise PeerError unless all processes dequantize this matrix now: gloo ends a process that exchanges alone."""
    name = hashlib.blake2b(matrix.name.encode(), digest_size=8).digest()
    exchange.check_same(f"dequantize of {matrix.name}", name)


def over_parts(x: Tensor, matrices: Sequence[SplitMatrix], run: Callable[[Tensor, Sequence[Part]], Tensor]) -> Tensor:
    """Run a function over several matrices with equal shards, one after the other on each device.

    Args:
        x: [T, in] on the home device.
        matrices: the matrices.
        run: called as run(x on the device, the parts there); returns [T, width] of x's type.

    Returns:
        [T, out] on the home device.
    """
    first = matrices[0]
    made = run_parts(x, matrices, run)
    out = torch.empty((x.shape[0], first.out_features), dtype=x.dtype, device=x.device)
    return gathered(first.context.exchange, first.places, made, out)


def run_parts(
    x: Tensor, matrices: Sequence[SplitMatrix], run: Callable[[Tensor, Sequence[Part]], Tensor]
) -> list[Tensor]:
    """Return the results of `run` of each of this process' devices, there; arguments as for `over_parts`."""
    inputs = matrices[0].context.spread(x)
    return [run(inputs(group[0].shard), group) for group in zip(*(m.local for m in matrices), strict=True)]


def gathered(exchange: Exchange, places: Sequence[tuple[int, Columns]], made: Sequence[Tensor], out: Tensor) -> Tensor:
    """Gather the columns of all devices in `out` [rows, columns] on the home device.

    Args:
        exchange: the exchange.
        places: device number and columns of every part.
        made: the parts of this process' devices, in order, of the type of `out`.
        out: the result.
    """
    rows = out.shape[0]
    parts = [(shard, (rows, _width(columns))) for shard, columns in places]
    for (_, columns), values in zip(places, exchange.collect(parts, made, out), strict=True):
        out[:, columns] = values
    return out


def _width(columns: Columns) -> int:
    return columns.stop - columns.start if isinstance(columns, slice) else len(columns)
