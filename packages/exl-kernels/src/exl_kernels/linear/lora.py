"""Low-rank adapters on a GPU: y += (x A) B, where each row has a different adapter or none.

`LoraTable` adds the adapters of one matrix. `LoraGroup` adds those of the matrices of one joined matmul, bitwise
identically, with two launches for all of them: one before the matmul, which also norms the input, and one after it,
which also adds the residual or applies the gate; or, for one or two rows, in the launch of the matmul
(`LoraGroup.multiply`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _native
from ..cuda_ops import check_operand, launch_on
from ..device import row_invariant
from ..errors import DTypeError, ShapeError
from ..selection import refusal_of_adapted_rows, refusal_of_adapted_shapes
from .cuda import aligned
from .fused import Activation, FusedLinear, FusedNorm
from .matmul_input import MatmulInput

__all__ = ["LoraEntry", "LoraGroup", "LoraTable"]

_PLACES = {field.name: field.offset // field.size for field in _native.lora_entry_fields()}
"""The place of each field of an entry among the int64 numbers of a row of a table."""


@dataclass(frozen=True, eq=False)
class LoraEntry:
    """The adapter of one matrix on a GPU: x -> ((x @ A.T) * scale) @ B + bias.

    Raises:
        ShapeError: the rank is 0, or A or B is not aligned to 16 bytes.
    """

    a: Tensor
    """float16 [rank, in]."""
    b: Tensor
    """float16 [rank, out]."""
    scale: Tensor
    """float32 [rank]."""
    bias: Tensor | None = None
    """float32 [out], already scaled."""

    def __post_init__(self) -> None:
        if not self.a.shape[0]:
            raise ShapeError("an adapter of rank 0: its rank must be at least 1")
        for name, t in (("a", self.a), ("b", self.b)):
            if t.data_ptr() % 16:
                raise ShapeError(f"{name} of an adapter begins at {t.data_ptr():#x}: expected a multiple of 16 bytes")

    @staticmethod
    def of(a: Tensor, b: Tensor, bias: Tensor | None, scaling: float, device: torch.device) -> LoraEntry | None:
        """Make an entry from A [rank, in] and B [out, rank] as files hold them.

        None where the kernels do not take them: a value that half precision cannot hold, a shape
        (`selection.refusal_of_adapted_shapes`), or a rank of 0.
        """
        half_a, half_b = (t.to(device).half() for t in (a, b))
        fits = a.shape[0] > 0 and refusal_of_adapted_shapes(a.shape[1], [b.shape[0]]) is None
        if not (fits and half_a.isfinite().all() and half_b.isfinite().all()):
            return None
        return LoraEntry(
            aligned(half_a.contiguous()),
            aligned(half_b.t().contiguous()),
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
        self._table = torch.tensor(list(map(_fields, entries)), dtype=torch.int64, device=first.a.device)

    @staticmethod
    def takes(x: Tensor, y: Tensor, *, invariant: bool | None = None) -> bool:
        """Return whether a pass over x that ends in y adds adapters by `add`; otherwise torch's matmuls do.

        Batch-invariant passes of any length do: the arithmetic of a row must not depend on the number of rows.

        Args:
            x: the input of the matrix.
            y: its results.
            invariant: as for `QuantMatrix.matmul`.
        """
        invariant = row_invariant() if invariant is None else invariant
        halves = x.dtype == y.dtype == torch.float16 and x.is_contiguous() and y.is_contiguous()
        return halves and refusal_of_adapted_rows(x.shape[0], invariant=invariant) is None

    def add(self, x: Tensor, y: Tensor, slots: Tensor | None = None) -> None:
        """Add the adapters' results to y.

        Args:
            x: float16 [T, in].
            y: float16 [T, out], changed in place.
            slots: int32 [T], the entry of each row by number, negative for a row without an adapter. They
                are not checked, since a check would read them back. None: every row has slot 0.

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
        if slots is not None and (slots.dtype != torch.int32 or tuple(slots.shape) != (x.shape[0],)):
            raise ShapeError(f"slots is {tuple(slots.shape)} {slots.dtype}: expected int32 [{x.shape[0]}]")
        if x.shape[0]:
            x = aligned(x)  # the kernels read 16 bytes at a time
            middle = torch.empty((x.shape[0], self.most_rank), dtype=torch.float32, device=x.device)
            _native.cuda_lora_add(x, y=y, table=self._table, slots=slots, middle=middle, launch=launch_on(x))


class LoraGroup:
    """The adapters that rows of a pass may have for one to three matrices over one input.

    A row in slot i has the entries `levels[n][matrix][i]`, first those of the first level: each level's results are
    added and rounded in turn, as by one `LoraTable` after another. None adds nothing.

    The kernels read entries and slots before the preceding launches have ended. A copy that the host has waited
    for is early enough, and so is work before the launch of the captured graph that contains the calls.

    Args:
        levels: entries by level, matrix and slot.
        in_features: inputs of the matrices, a multiple of 8.
        widths: outputs of each matrix, even.

    Raises:
        ShapeError: an entry does not fit its matrix, there is no entry, or a size is not supported.
    """

    def __init__(
        self, levels: Sequence[Sequence[Sequence[LoraEntry | None]]], in_features: int, widths: Sequence[int]
    ) -> None:
        self.in_features, self.widths = in_features, tuple(widths)
        why = refusal_of_adapted_shapes(in_features, self.widths)
        if why is not None:
            raise ShapeError(f"matrices of {in_features} inputs and {self.widths} outputs: {why}")
        sets = {len(entries) for level in levels for entries in level}
        if len(sets) != 1 or any(len(level) != len(self.widths) for level in levels):
            raise ShapeError("every level of a group needs the entries of every matrix, one for each set")
        present = [
            (entry, width)
            for level in levels
            for entries, width in zip(level, self.widths, strict=True)
            for entry in entries
            if entry is not None
        ]
        if not present:
            raise ShapeError("a group of adapters needs an entry")
        for entry, width in present:
            if (entry.a.shape[1], entry.b.shape[1]) != (in_features, width):
                raise ShapeError(
                    f"an adapter of {entry.a.shape[1]} inputs and {entry.b.shape[1]} outputs for a matrix of "
                    f"{in_features} and {width}"
                )
        self._entries = [entry for entry, _ in present]  # keeps the tensors alive: the table holds their addresses
        self.most_rank = max(entry.rank for entry in self._entries)
        fields = [[[_fields(entry) for entry in entries] for entries in level] for level in levels]
        self._table = torch.tensor(fields, dtype=torch.int64, device=self._entries[0].a.device)
        self._sizes = _native.AdapterSizes(levels=len(levels), most_rank=self.most_rank)

    def fits(self, matmul: FusedLinear, x: Tensor, *, residual: bool = False) -> bool:
        """Return whether `multiply` takes the matmul, of the matrices of the group.

        Args:
            matmul: with or without a norm and a gate.
            x: [T, in].
            residual: a residual is added.
        """
        aligned = x.data_ptr() % 16 == 0
        return matmul.takes_adapters(x.shape[0], self._sizes, residual=residual, aligned=aligned)

    def shrink(
        self,
        x: Tensor,
        slots: Tensor | None = None,
        *,
        norm: FusedNorm | None = None,
        normed: Tensor | None = None,
        into: MatmulInput | None = None,
    ) -> Tensor:
        """Multiply x by the A of each row's adapters.

        Args:
            x: float16 [T, in], contiguous, aligned to 16 bytes.
            slots: int32 [T], the slot of each row, below the number of sets, negative for a row without adapters.
                None: every row has slot 0.
            norm: RMS norm of x that comes first, with a weight of float32.
            normed: like x, gets norm(x); None without a norm, or with `into`.
            into: the input of a matmul, as `FusedLinear.input_of` gives it, that gets x packed, or its norm.

        Returns:
            The argument of `expand`, float32 [T, levels * matrices * largest rank].

        Raises:
            ShapeError: an operand does not fit.
            DeviceError: the launch failed, or CUDA cannot be used.
        """
        check_operand("x", x, self._table)
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise ShapeError(f"x is {tuple(x.shape)}: expected [T, {self.in_features}]")
        columns = self._table.shape[0] * self._table.shape[1] * self.most_rank
        middle = torch.empty((x.shape[0], columns), dtype=torch.float32, device=x.device)
        before = None if norm is None else _native.NormPrologue(norm.weight, norm.eps, norm.offset)
        try:
            rows = _native.LoraRows(self._table, slots=slots, middle=middle)
            packed = None if into is None else into.native()
            _native.cuda_lora_shrink(x, rows, launch_on(x), norm=before, normed=normed, into=packed)
        except ValueError as error:
            raise ShapeError(f"shrink: {error}") from None
        return middle

    def multiply(
        self,
        matmul: FusedLinear,
        x: Tensor,
        slots: Tensor | None = None,
        *,
        out: Tensor,
        residual: Tensor | None = None,
        looks: int | None = None,
    ) -> Tensor:
        """Compute `matmul(x, out, residual)` with the adapters added, in one launch, where `fits` holds.

        Args:
            matmul: the matrices of the group, with or without a norm and a gate.
            x: float16 [T, in], aligned to 16 bytes.
            slots: as for `shrink`.
            out: float16 [T, outputs], gets the result.
            residual: as for `FusedLinear`.
            looks: how often a block of the launch polls for what others have computed before it computes that itself;
                None: for some milliseconds.

        Returns:
            out.

        Raises:
            UnsupportedError: `fits` does not hold, or x is not aligned.
            ShapeError, DTypeError: an operand does not fit.
            DeviceError: the launch failed, or CUDA cannot be used.
        """
        check_operand("x", x, self._table)
        sizes = (matmul.in_features, tuple(matrix.out_features for matrix in matmul.matrices))
        if sizes != (self.in_features, self.widths):
            raise ShapeError(
                f"multiply: matrices of {sizes[0]} inputs and {sizes[1]} outputs with adapters of {self.in_features} "
                f"and {self.widths}"
            )
        try:
            adapters = _native.EpilogueAdapters(self._table, slots=slots, sizes=self._sizes, looks=looks)
            return matmul.adapted(x, out, adapters, self._sizes, residual)
        except ValueError as error:
            raise ShapeError(f"multiply: {error}") from None

    def expand(
        self,
        y: Tensor,
        middle: Tensor,
        slots: Tensor | None = None,
        *,
        out: Tensor | None = None,
        residual: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        """Add the adapters' results to those of the matrices.

        Args:
            y: float16 [T, sum of widths], the outputs of all matrices side by side.
            middle: result of `shrink` for these rows.
            slots: as for `shrink`.
            out: gets the result; None: y, or a new tensor with an activation. May be the residual.
            residual: like y, added last; or None.
            activation: of two matrices [gate, up]: the result is activation(gate) * up, [T, width].

        Returns:
            out.

        Raises:
            ShapeError: an operand does not fit.
            DeviceError: the launch failed, or CUDA cannot be used.
        """
        check_operand("y", y, self._table)
        if out is None:
            out = y if activation is None else y.new_empty((y.shape[0], self.widths[0]))
        try:
            rows = _native.LoraRows(self._table, slots=slots, middle=middle)
            _native.cuda_lora_expand(
                y,
                out=out,
                widths=list(self.widths),
                rows=rows,
                launch=launch_on(y),
                residual=residual,
                gate=activation,
            )
        except ValueError as error:
            raise ShapeError(f"expand: {error}") from None
        return out


def _fields(entry: LoraEntry | None) -> list[int]:
    """Return the entry as a row of a table: addresses and the rank."""
    row = [0] * len(_PLACES)
    if entry is not None:
        tensors = {"a": entry.a, "b": entry.b, "scale": entry.scale, "bias": entry.bias}
        for name, tensor in tensors.items():
            row[_PLACES[name]] = 0 if tensor is None else tensor.data_ptr()
        row[_PLACES["rank"]] = entry.rank
    return row
