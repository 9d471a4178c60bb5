"""Products with what stands around them in a layer: norm before, gate activation or residual after, several matrices.

The door for code that captures a decode step: it reads nothing back, takes scratch memory from torch's allocator only
and launches on torch's current stream, so a call can be captured in a CUDA graph. Results are those of the separate
operators to the bit (`norm.rms_norm`, `QuantMatrix.matmul`, `cuda_ops.gated_activation`, `torch.add`), whichever
kernels do the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .. import _native
from ..attention.cuda import ProductInput
from ..cuda_ops import gated_activation, launch_on, rms_norm, stream_of
from ..device import launch_of
from ..errors import DTypeError, ShapeError, UnsupportedError
from ..selection import GEMV_ROWS, PACKED_ROWS
from .cuda import CudaQuantMatrix
from .matrix import QuantMatrix
from .workspace import block_workspace

__all__ = ["FusedLinear", "Norm", "Prepared"]

Activation = Literal["silu", "gelu", "quickgelu"]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm of the input: x / sqrt(mean(x^2) + eps) * (weight + offset), rounded to the dtype of x."""

    weight: Tensor
    """[K], on the matrices' GPU."""
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """The input of a product of few rows as another has left it: in the product's own order, normed or yet to be."""

    scratch: Tensor
    """uint8, aligned to 128 bytes: the matmul's scratch memory, which begins with its input
    (`kernels/linear/rows.cuh`)."""
    rows: int


class FusedLinear:
    """One to three matrices over one input as one product.

    ==============================================  ==========================  ===================================
    built as                                        out                         out =
    ==============================================  ==========================  ===================================
    ``FusedLinear([q, k, v], norm=Norm(w, eps))``   [m, Nq + Nk + Nv]           norm(x) @ [Wq Wk Wv] (+ biases)
    ``FusedLinear([gate, up], activation="silu")``  [m, N]                      silu(x @ Wgate) * (x @ Wup)
    ``FusedLinear([o])``, ``residual=h``            [m, N]; may be h itself     h + x @ Wo
    ==============================================  ==========================  ===================================

    Biases, prescales and input permutations are the matrices' own and always applied. Intermediate results are rounded
    to the dtype of x exactly where the separate operators round.
    """

    def __init__(
        self,
        matrices: Sequence[QuantMatrix],
        *,
        norm: Norm | None = None,
        activation: Activation | None = None,
        max_rows: int = PACKED_ROWS,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        """`max_rows` bounds m; `dtype` of x and out, float16 or bfloat16.

        Raises ShapeError (matrices or norm weight do not fit together), DTypeError (not on one GPU, or a dtype that
        is no half) and UnsupportedError (an activation without a pair of matrices).
        """
        if not 1 <= len(matrices) <= 3:
            raise ShapeError(f"{len(matrices)} matrices: one product takes 1 to 3")
        first = matrices[0]
        for matrix in matrices:
            if matrix.device != first.device or matrix.device.type != "cuda":
                raise DTypeError(f"{matrix.name or 'matrix'} is on {matrix.device}: all matrices must be on one GPU")
            if matrix.in_features != first.in_features:
                raise ShapeError(
                    f"{matrix.name or 'matrix'} takes {matrix.in_features} inputs, the first {first.in_features}"
                )
        if activation is not None:
            if activation not in ("silu", "gelu", "quickgelu"):
                raise UnsupportedError(f"unknown activation {activation!r}, expected one of silu, gelu, quickgelu")
            if len(matrices) != 2 or matrices[1].out_features != first.out_features:
                raise UnsupportedError("an activation needs two matrices [gate, up] of one output size")
        if dtype not in (torch.float16, torch.bfloat16):
            raise DTypeError(f"dtype is {dtype}: expected float16 or bfloat16")
        if norm is not None and (norm.weight.shape != (first.in_features,) or norm.weight.device != first.device):
            raise ShapeError(
                f"norm weight is {tuple(norm.weight.shape)} on {norm.weight.device}: expected "
                f"[{first.in_features}] on {first.device}"
            )
        self.matrices = tuple(matrices)
        self.norm = norm
        self.activation = activation
        self.max_rows = max_rows
        self.dtype = dtype
        self.in_features = first.in_features
        self.out_features = first.out_features if activation else sum(m.out_features for m in matrices)
        self.device = first.device
        self._ring = self._one_launch()
        self._ring_rows: int = 0
        self._few_rows: int = 0
        self._few_bytes: int = 0
        self._takes_prepared: bool = False
        if self._ring is not None:
            self._ring_rows = self._ring.rows(norm is not None, dtype == torch.bfloat16)
            self._few_rows, self._few_bytes = self._ring.few_rows(), self._ring.few_bytes()
            self._takes_prepared = dtype == torch.float16 and self._ring.few_takes_prepared()
        self._batch_rows: int = 0
        if self._ring is not None and self._ring.batch_fits() and (norm is None or self._ring.batch_norms()):
            self._batch_rows = PACKED_ROWS
        self._even = all(matrix.out_features % 2 == 0 for matrix in matrices)
        self._norm: _native.NormPrologue | None = None
        self._prepared_norm: _native.NormPrologue | None = None
        if norm is not None:
            weight = norm.weight.float().contiguous()
            self._norm = _native.NormPrologue(weight, norm.eps, norm.offset)
            if self._takes_prepared:
                assert isinstance(first, CudaQuantMatrix)
                ordered = first.in_layout(weight + norm.offset)
                self._prepared_norm = _native.NormPrologue(ordered, norm.eps, 0.0)

    @property
    def joined_rows(self) -> int:
        """Rows up to which a call is one launch or two; 0 where these matrices always take several."""
        return max(self._ring_rows, self._few_rows, self._batch_rows if self._even else 0)

    @property
    def batch_rows(self) -> int:
        """Rows up to which a call can be the product of many rows behind a launch that lays out its input; 0: never."""
        return self._batch_rows

    @property
    def takes_prepared(self) -> bool:
        """Whether a call of more than GEMV_ROWS and at most `joined_rows` rows can have its input from another product,
        without a launch that norms it and lays it out: float16, all matrices in one order that does not pad K."""
        return self._takes_prepared and self._few_rows > 0

    def room(self) -> Tensor:
        """Scratch memory for `Prepared`."""
        return torch.empty(self._few_bytes, dtype=torch.uint8, device=self.device)

    def _one_launch(self) -> _native.CudaRing | None:
        """The ring kernel over all matrices, where they are quantized; matrices it cannot join report zero rows."""
        quantized = [matrix._cuda for matrix in self.matrices if isinstance(matrix, CudaQuantMatrix)]
        if len(quantized) < len(self.matrices):
            return None
        return _native.CudaRing(quantized, self.activation)

    def __call__(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [m, K] to `out` [m, N], both contiguous; `residual` like out is added and may be out itself. Returns out.

        Raises ShapeError and DTypeError (an operand does not fit).
        """
        m = self._check(x, out, residual)
        if self._ring is not None and 0 < m <= max(self._ring_rows, self._few_rows) and x.data_ptr() % 16 == 0:
            if GEMV_ROWS < m <= self._few_rows or m > self._ring_rows:
                scratch = torch.empty(self._few_bytes, dtype=torch.uint8, device=x.device)
                self._ring.run_few(x, out, scratch, launch_on(x), residual=residual, norm=self._norm)
            else:
                self._ring.run(x, out, launch_on(x), residual=residual, norm=self._norm)
        elif 0 < m <= self._batch_rows and self._batch_takes(x, out, residual):
            self._batched(x, out, residual)
        elif m:
            if self.norm is not None:
                x = rms_norm(x, self.norm.weight, self.norm.eps, weight_offset=self.norm.offset)
            self._separate(x, out, residual)
        return out

    def _batch_takes(self, x: Tensor, out: Tensor, residual: Tensor | None) -> bool:
        """Whether the operands lie as the batch kernel wants them."""
        return (x.data_ptr() % 16 == 0 or self.norm is None) and self._stores_in(out, residual)

    def _stores_in(self, out: Tensor, residual: Tensor | None) -> bool:
        """Whether the batch kernel can add a residual that lies so: it stores in pairs then."""
        return residual is None or (self._even and out.data_ptr() % 8 == 0 and residual.data_ptr() % 4 == 0)

    def input_of(self, m: int) -> ProductInput | None:
        """Where another launch may lay out m rows of float16 for `from_input`; None where it may not."""
        matrix, columns = self.matrices[0], self._columns_of_input(m)
        if columns is None:
            return None
        assert isinstance(matrix, CudaQuantMatrix)
        return ProductInput(matrix, columns, self._scratch(m), rows=m)

    def _columns_of_input(self, m: int) -> int | None:
        """Columns of a `ProductInput` of m rows; None where there is none."""
        if not (
            self._ring is not None
            and len(self.matrices) == 1
            and self.norm is None
            and self.dtype == torch.float16
            and max(self._ring_rows, self._few_rows) < m <= self._batch_rows
            and self._even
        ):
            return None
        return self._ring.batch_input(m)

    def from_input(self, given: ProductInput, out: Tensor, residual: Tensor | None = None) -> Tensor:
        """The product of what has been laid out in `given`, of this product's own `input_of` the rows of out, as
        `__call__`. Raises ShapeError (it is another's, or of another number of rows) and as `__call__`."""
        m = out.shape[0]
        known = given.matrix is self.matrices[0] and given.rows == m
        if not known or given.columns != self._columns_of_input(m):
            raise ShapeError(
                f"the input is laid out for {given.rows} rows ({given.columns} columns) of "
                f"{given.matrix.name or 'a matrix'}: expected what input_of({m}) of "
                f"{self.matrices[0].name or 'this product'} gives"
            )
        self._check_operand("out", out, (m, self.out_features))
        if residual is not None:
            self._check_operand("residual", residual, (m, self.out_features))
        self._run_batch(m, None, given.scratch, out, residual)
        return out

    def then(self, following: FusedLinear, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        """`following(self(x), out, residual)` without the result between, where that can be: the same bits."""
        m = x.shape[0]
        alike = self.dtype == torch.float16 and following.norm is None and x.data_ptr() % 16 == 0
        few = (
            alike
            and following.takes_prepared
            and self.goes_on_to(following)
            and GEMV_ROWS < m <= min(self._few_rows, following._few_rows)
        )
        given = None
        if alike and not few and self._lays_out(m, following) and following._stores_in(out, residual):
            given = following.input_of(m)
        if not few and given is None:
            between = torch.empty((m, self.out_features), dtype=self.dtype, device=self.device)
            return following(self(x, between), out, residual)
        self._check_operand("x", x, (m, self.in_features))
        following._check_operand("out", out, (m, following.out_features))
        if residual is not None:
            following._check_operand("residual", residual, (m, following.out_features))
        if given is not None:
            assert following._ring is not None
            given_on = _native.NextInput(following._ring, given.scratch)
            self._run_batch(m, x, self._scratch(m), None, next_input=given_on)
            following._run_batch(m, None, given.scratch, out, residual, chained=True)
            return out
        between_ = self.in_a_row(x, following=following)
        assert between_ is not None
        following.in_a_row(between_, out, residual)
        return out

    def _lays_out(self, m: int, following: FusedLinear) -> bool:
        """Whether a product of m rows can leave its gated results as the input of another's `from_input`."""
        return (
            self._ring is not None
            and max(self._ring_rows, self._few_rows) < m <= min(self._batch_rows, self.max_rows)
            and self._ring.batch_gates()
            and self._even
            and following.in_features == self.out_features
            and following.device == self.device
        )

    def goes_on_to(self, following: FusedLinear) -> bool:
        """Whether `in_a_row` of these matrices can lay out the input of `following`'s."""
        whole = self.activation is not None or len(self.matrices) == 1
        return whole and self._few_rows > 0 and self.out_features == following.in_features

    def in_a_row(
        self,
        x: Tensor | Prepared,
        out: Tensor | None = None,
        residual: Tensor | None = None,
        following: FusedLinear | None = None,
    ) -> Prepared | None:
        """`self(x, out, residual)` of more than GEMV_ROWS and at most `joined_rows` rows. Results also, or only, go on
        to `following`: what is returned is the input of its `in_a_row`. The same bits.

        x and out [m, ..] float16 (out float32, too, where there is neither residual nor following), or what the product
        before returned; the caller sees to it that sizes fit, and that a product `takes_prepared` what it gets so. A
        norm of `following` is its own and applied there.
        """
        assert self._ring is not None
        rows = x.rows if isinstance(x, Prepared) else x.shape[0]
        scratch = x.scratch if isinstance(x, Prepared) else self.room()
        norm = self._prepared_norm if isinstance(x, Prepared) else self._norm
        assert (norm is None) == (self.norm is None)
        onward, to = None, None
        if following is not None:
            assert following._ring is not None
            onward = Prepared(following.room(), rows)
            to = _native.NextInput(following._ring, onward.scratch, following.norm is not None)
        given = None if isinstance(x, Prepared) else x
        launch = launch_on(scratch)
        self._ring.run_few_chained(given, out, rows, scratch, launch, residual=residual, norm=norm, next=to)
        return onward

    def _check(self, x: Tensor, out: Tensor, residual: Tensor | None) -> int:
        m = x.shape[0] if x.dim() == 2 else -1
        if m < 0 or m > self.max_rows or x.shape[1] != self.in_features:
            raise ShapeError(f"x is {tuple(x.shape)}: expected [up to {self.max_rows}, {self.in_features}]")
        if residual is not None and self.activation:
            raise UnsupportedError("a residual on a gated product: add it in the product that follows")
        for name, t, width in (("x", x, self.in_features), ("out", out, self.out_features)):
            self._check_operand(name, t, (m, width))
        if residual is not None:
            self._check_operand("residual", residual, (m, self.out_features))
        return m

    def _check_operand(self, name: str, t: Tensor, shape: tuple[int, int]) -> None:
        if t.shape != shape or not t.is_contiguous():
            raise ShapeError(f"{name} is {tuple(t.shape)}: expected contiguous {shape}")
        if t.dtype != self.dtype or t.device != self.device:
            raise DTypeError(f"{name} is {t.dtype} on {t.device}: expected {self.dtype} on {self.device}")

    def _batched(self, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        """The product as one launch behind one that lays out its input."""
        m = x.shape[0]
        assert self._ring is not None
        apart = self.activation is not None and not self._ring.batch_gates()
        to = out.new_empty((2, *out.shape)) if apart else out
        self._run_batch(m, x, self._scratch(m), to, residual)
        if apart and self.activation is not None:
            gated_activation(to[0], to[1], self.activation, out=out)

    def _scratch(self, m: int) -> Tensor:
        assert self._ring is not None
        return torch.empty(self._ring.scratch_bytes(m), dtype=torch.uint8, device=self.device)

    def _run_batch(
        self,
        m: int,
        x: Tensor | None,
        scratch: Tensor,
        out: Tensor | None,
        residual: Tensor | None = None,
        next_input: _native.NextInput | None = None,
        chained: bool = False,
    ) -> None:
        """x None where its rows are in scratch already, in this product's order; `chained`: the product before put them
        there. out None where the results go to `next_input`."""
        assert self._ring is not None
        stream = stream_of(scratch)
        multipliers = torch.empty(m, dtype=torch.float32, device=self.device)
        meeting = block_workspace(self.device, stream, self._ring.meeting_bytes(m))
        workspace, launch = _native.BatchWorkspace(scratch, multipliers, meeting), launch_of(stream)
        self._ring.run_batch(
            x, out, workspace, launch, residual=residual, norm=self._norm, next=next_input, chained=chained
        )

    def _separate(self, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        """The product as separate launches; x is already normed."""
        if len(self.matrices) == 1 and residual is None:
            self.matrices[0].matmul(x, out=out)
            return
        parts = [matrix.matmul(x) for matrix in self.matrices]
        if self.activation:
            gated_activation(parts[0], parts[1], self.activation, out=out)
            return
        first = 0
        for part in parts:
            columns = slice(first, first + part.shape[1])
            if residual is None:
                out[:, columns].copy_(part)
            else:
                torch.add(residual[:, columns], part, out=out[:, columns])
            first += part.shape[1]
