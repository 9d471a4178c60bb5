"""Quantized linear layers with a fused norm prologue and activation or residual epilogue.

Intended for code that captures a decode step. A call reads nothing back, takes scratch memory from torch's allocator
only and launches on torch's current stream, so a CUDA graph can capture it. Results are bitwise identical to the
separate operators (`norm.rms_norm`, `QuantMatrix.matmul`, `cuda_ops.gated_activation`, `torch.add`), whichever kernels
run. `_native.CudaLinearGroup.plan` picks the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .. import _native
from ..cuda_ops import activation as activate
from ..cuda_ops import gated_activation, layer_norm, rms_norm
from ..errors import DTypeError, ShapeError, UnsupportedError
from ..selection import FEW_ROWS, FUSED_ACTIVATIONS
from .cuda import CudaQuantMatrix, launch_matmul
from .matmul_input import MatmulInput
from .matrix import QuantMatrix
from .planned import KEPT_PLANS, PlannedMatmul, blocks_of

__all__ = ["FusedLinear", "FusedNorm", "Packed"]

Activation = Literal["silu", "gelu", "quickgelu"]
"""`selection.FUSED_ACTIVATIONS`, for type checkers."""


@dataclass(frozen=True, slots=True)
class FusedNorm:
    """A norm that a launch fuses with another operator, rounded to the dtype of x.

    An RMS norm is x / sqrt(mean(x^2) + eps) * (weight + offset); a LayerNorm (`layer`) is
    (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.
    """

    weight: Tensor
    """[K], on the matrices' GPU."""
    eps: float
    offset: float = 0.0
    layer: bool = False
    bias: Tensor | None = None
    """Like the weight, of a LayerNorm; None for zeros."""

    def apply(self, x: Tensor) -> Tensor:
        """Return the norm of x [m, K]."""
        if self.layer:
            return layer_norm(x, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps, weight_offset=self.offset)


@dataclass(frozen=True, slots=True)
class Packed:
    """The input of a matmul in its kernel's layout, normed or not, as written by the preceding launch."""

    scratch: Tensor
    """uint8, aligned to 128 bytes: the scratch memory of the consuming matmul, which begins with its input
    (`kernels/linear/rows.cuh`, `prepared.cuh`)."""
    rows: int
    by_matmul: bool = True
    """Whether that launch was a matmul, which may write more than eight columns transposed."""


class FusedLinear(PlannedMatmul):
    """One to three matrices over one input as one matmul.

    ================================================  ==========================  =================================
    built as                                          out                         out =
    ================================================  ==========================  =================================
    ``FusedLinear([q, k, v], norm=FusedNorm(w, e))``  [m, Nq + Nk + Nv]           norm(x) @ [Wq Wk Wv] (+ biases)
    ``FusedLinear([gate, up], activation="silu")``    [m, N]                      silu(x @ Wgate) * (x @ Wup)
    ``FusedLinear([up], activation="gelu")``          [m, N]                      gelu(x @ Wup)
    ``FusedLinear([o])``, ``residual=h``              [m, N]; may be h itself     h + x @ Wo
    ================================================  ==========================  =================================

    Rows are always batch-invariant: a call of many rows is several launches, as the plan says (`blocks`).

    Biases, prescales and input permutations belong to the matrices and are always applied. Intermediate results are
    rounded to the dtype of x exactly where the separate operators round.

    Args:
        matrices: one to three matrices on one GPU with equal in_features.
        norm: norm of the input, or None.
        activation: activation of the first of two matrices [gate, up], or of one matrix's results, or None.
        dtype: of x and out, float16 or bfloat16.

    Raises:
        ShapeError: matrices or norm weight do not fit together.
        DTypeError: the matrices are not on one GPU, or dtype is neither float16 nor bfloat16.
        UnsupportedError: an unknown activation, or one with matrices that are neither a pair of one size nor alone.
    """

    def __init__(
        self,
        matrices: Sequence[QuantMatrix],
        *,
        norm: FusedNorm | None = None,
        activation: Activation | None = None,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        if not 1 <= len(matrices) <= 3:
            raise ShapeError(f"{len(matrices)} matrices: one matmul takes 1 to 3")
        first = matrices[0]
        for matrix in matrices:
            if matrix.device != first.device or matrix.device.type != "cuda":
                raise DTypeError(f"{matrix.name or 'matrix'} is on {matrix.device}: all matrices must be on one GPU")
            if matrix.in_features != first.in_features:
                raise ShapeError(
                    f"{matrix.name or 'matrix'} takes {matrix.in_features} inputs, the first {first.in_features}"
                )
        if activation is not None:
            if activation not in FUSED_ACTIVATIONS:
                raise UnsupportedError(
                    f"unknown activation {activation!r}, expected one of {', '.join(FUSED_ACTIVATIONS)}"
                )
            if len(matrices) > 2 or matrices[-1].out_features != first.out_features:
                raise UnsupportedError("an activation needs one matrix, or two matrices [gate, up] of one output size")
        if dtype not in (torch.float16, torch.bfloat16):
            raise DTypeError(f"dtype is {dtype}: expected float16 or bfloat16")
        for name, values in () if norm is None else (("weight", norm.weight), ("bias", norm.bias)):
            if values is not None and (values.shape != (first.in_features,) or values.device != first.device):
                raise ShapeError(
                    f"norm {name} is {tuple(values.shape)} on {values.device}: expected "
                    f"[{first.in_features}] on {first.device}"
                )
        self.matrices = tuple(matrices)
        self.norm = norm
        self.activation = activation
        self.dtype = dtype
        self.in_features = first.in_features
        self.out_features = first.out_features if activation else sum(m.out_features for m in matrices)
        self.device = first.device
        self._group = self._native_group()
        self.is_quantized = self._group is not None
        self.is_gated = activation is not None and len(matrices) > 1
        self._plans: dict[int, _native.MatmulPlan] = {}
        self._norm: _native.NormPrologue | None = None
        self._packed_norm: _native.NormPrologue | None = None
        if norm is not None:
            weight = _aligned_floats(norm.weight)
            bias = None if norm.bias is None else _aligned_floats(norm.bias)
            self._norm = _native.NormPrologue(weight, norm.eps, norm.offset, layer=norm.layer, bias=bias)
            if self.takes_packed(FEW_ROWS):
                assert isinstance(first, CudaQuantMatrix)
                ordered = first.in_layout(weight + norm.offset)
                self._packed_norm = _native.NormPrologue(ordered, norm.eps, 0.0)

    def _native_group(self) -> _native.CudaLinearGroup | None:
        """Return the group of the native module, or None where a matrix is not quantized."""
        quantized = [matrix._cuda for matrix in self.matrices if isinstance(matrix, CudaQuantMatrix)]
        if len(quantized) < len(self.matrices):
            return None
        return _native.CudaLinearGroup(quantized, self.activation)

    def _planned(
        self,
        rows: int,
        residual: bool = False,
        aligned_input: bool = True,
        aligned_output: bool = True,
        adapters: _native.AdapterSizes | None = None,
    ) -> _native.MatmulPlan | None:
        """Return the plan of a call; None where a matrix is not quantized."""
        if self._group is None:
            return None
        key = rows << 3 | residual << 2 | aligned_input << 1 | aligned_output
        if adapters is not None:
            key |= (adapters.levels << 20 | adapters.most_rank) << 64
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= KEPT_PLANS:
                self._plans.clear()
            norm = self.norm
            call = _native.MatmulCall(
                rows,
                bfloat16=self.dtype == torch.bfloat16,
                norm=None if norm is None else "layer" if norm.layer else "rms",
                residual=residual,
                aligned_input=aligned_input,
                aligned_output=aligned_output,
                invariant=True,
                adapters=adapters,
            )
            plan = self._plans[key] = self._group.plan(call)
        return plan

    def scratch(self, rows: int) -> Tensor:
        """Allocate scratch memory (uint8) of a call of `rows` rows, for `Packed`.

        Raises:
            UnsupportedError: `kernel` is None.
        """
        plan = self._plan(rows)
        if plan is None:
            raise UnsupportedError(f"{rows} rows of {self.matrices[0].name or 'these matrices'} are no single matmul")
        return torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=self.device)

    def __call__(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply x [m, K] to `out` [m, N], both contiguous and of this `dtype`. Returns out.

        Args:
            x: [m, K].
            out: [m, N].
            residual: like out, added to the result; may be out itself. None with an activation.

        Raises:
            ShapeError, DTypeError, UnsupportedError: an operand does not fit.
        """
        m = self._check(x, out, residual)
        if not m:
            return out
        aligned_input = x.data_ptr() % 16 == 0
        aligned_output = residual is None or _stores_pairs(out, residual)
        plan = self._planned(m, residual is not None, aligned_input, aligned_output)
        if plan is not None and plan.rows < m:
            for rows in blocks_of(m, plan.rows):
                self(x[rows], out[rows], None if residual is None else residual[rows])
            return out
        if plan is not None and plan.joined:
            self._launch(plan, x, out, residual)
            return out
        if self.norm is not None:
            x = self.norm.apply(x)
        self._separate(x, out, residual)
        return out

    def _launch(self, plan: _native.MatmulPlan, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        assert self._group is not None
        if not plan.separate_gate:
            launch_matmul(self._group, plan, x, out, residual=residual, norm=self._norm)
            self._activate_after(plan, out)
            return
        assert self.activation is not None
        gate, up = both = out.new_empty((2, *out.shape))
        launch_matmul(self._group, plan, x, both, norm=self._norm)
        gated_activation(gate, up, self.activation, out=out)

    def _activate_after(self, plan: _native.MatmulPlan, out: Tensor | None) -> None:
        """Apply the activation that the kernel of the plan leaves to the caller."""
        if plan.separate_activation and out is not None:
            assert self.activation is not None
            activate(out, self.activation, out=out)

    def adapted(
        self,
        x: Tensor,
        out: Tensor,
        adapters: _native.EpilogueAdapters,
        sizes: _native.AdapterSizes,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Compute `self(x, out, residual)` with the adapters of each row added first; for `LoraGroup.multiply`.

        Args:
            x: [m, K] float16, of rows for which `takes_adapters` holds.
            out: [m, N].
            adapters: of the rows, for these matrices.
            sizes: theirs.
            residual: as for `__call__`.

        Raises:
            UnsupportedError: no launch of so many rows, or of an input that is not aligned to 16 bytes, adds adapters.
            ShapeError, DTypeError, ValueError: an operand does not fit.
        """
        m = self._check(x, out, residual)
        plan = self._plan(m, residual is not None, x.data_ptr() % 16 == 0, adapters=sizes)
        if plan is None:
            raise UnsupportedError(
                f"no launch of {m} rows of these matrices adds adapters: launch `LoraGroup.shrink` before the matmul "
                "and `LoraGroup.expand` after it"
            )
        assert self._group is not None
        launch_matmul(self._group, plan, x, out, residual=residual, norm=self._norm, adapters=adapters)
        return out

    def input_of(self, m: int) -> MatmulInput | None:
        """Return the input that another launch may pack m float16 rows into for `from_input`, or None."""
        matrix, columns = self.matrices[0], self.input_columns(m)
        if columns is None:
            return None
        assert isinstance(matrix, CudaQuantMatrix)
        return MatmulInput(matrix, columns, self.scratch(m), rows=m)

    def from_input(self, given: MatmulInput, out: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply the rows packed in `given`.

        Args:
            given: the result of `input_of` for the rows of out, filled by another launch.
            out: [m, N].
            residual: as for `__call__`.

        Raises:
            ShapeError: `given` belongs to another matmul or another number of rows; or as for `__call__`.
        """
        m = out.shape[0]
        plan = self._plan(m)
        known = given.matrix is self.matrices[0] and given.rows == m
        if not known or plan is None or given.columns != plan.input_columns:
            raise ShapeError(
                f"the input is packed for {given.rows} rows ({given.columns} columns) of "
                f"{given.matrix.name or 'a matrix'}: expected what input_of({m}) of "
                f"{self.matrices[0].name or 'this matmul'} gives"
            )
        self._check_operand("out", out, (m, self.out_features))
        if residual is not None:
            self._check_operand("residual", residual, (m, self.out_features))
        assert self._group is not None
        launch_matmul(self._group, plan, None, out, scratch=given.scratch, residual=residual)
        self._activate_after(plan, out)
        return out

    def then(self, following: FusedLinear, x: Tensor | Packed, out: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute `following(self(x), out, residual)`, bitwise, without storing the intermediate where both chain.

        Args:
            following: the next matmul.
            x: input of this matmul, also packed in what `input_of` gives.
            out: output of `following`.
            residual: residual of `following`, or None.
        """
        m = x.rows if isinstance(x, Packed) else x.shape[0]
        if not isinstance(x, Packed) and len(blocks := self.blocks(m)) > 1:
            for rows in blocks:
                self.then(following, x[rows], out[rows], None if residual is None else residual[rows])
            return out
        if following.norm is None:
            aligned = residual is None or _stores_pairs(out, residual)
            plan = self._plan(m, aligned_input=isinstance(x, Packed) or x.data_ptr() % 16 == 0)
            next_plan = following._plan(m, residual is not None, True, aligned)
            if plan is not None and next_plan is not None and plan.separate_activation and next_plan.activates_input:
                return self._then_activated(plan, following, next_plan, x, out, residual)
            if self._chains_to(plan, following, next_plan):
                if not isinstance(x, Packed):
                    self._check_operand("x", x, (m, self.in_features))
                following._check_operand("out", out, (m, following.out_features))
                if residual is not None:
                    following._check_operand("residual", residual, (m, following.out_features))
                packed = self.chained(x, following=following)
                assert packed is not None
                following.chained(packed, out, residual)
                return out
        between = torch.empty((m, self.out_features), dtype=self.dtype, device=self.device)
        if isinstance(x, Packed):
            self.chained(x, between)
        else:
            self(x, between)
        return following(between, out, residual)

    def _then_activated(
        self,
        plan: _native.MatmulPlan,
        following: FusedLinear,
        next_plan: _native.MatmulPlan,
        x: Tensor | Packed,
        out: Tensor,
        residual: Tensor | None,
    ) -> Tensor:
        """Compute `then` where the launch that packs the input of `following` applies the activation."""
        assert self._group is not None
        assert following._group is not None
        m = out.shape[0]
        packed = isinstance(x, Packed)
        if not isinstance(x, Packed):
            self._check_operand("x", x, (m, self.in_features))
        following._check_operand("out", out, (m, following.out_features))
        if residual is not None:
            following._check_operand("residual", residual, (m, following.out_features))
        between = torch.empty((m, self.out_features), dtype=self.dtype, device=self.device)
        launch_matmul(
            self._group,
            plan,
            None if isinstance(x, Packed) else x,
            between,
            scratch=x.scratch if isinstance(x, Packed) else None,
            norm=None if packed else self._norm,
            chained=isinstance(x, Packed) and x.by_matmul,
        )
        launch_matmul(following._group, next_plan, between, out, residual=residual, input_activation=self.activation)
        return out

    def chained(
        self,
        x: Tensor | Packed,
        out: Tensor | None = None,
        residual: Tensor | None = None,
        following: FusedLinear | None = None,
    ) -> Packed | None:
        """Compute `self(x, out, residual)` and pack the results, also or only, as the input of `following`.

        The caller checks that sizes fit, that `chains_to` holds for `following`, and `takes_packed` where x is packed.
        A norm of `following` is applied by `following`.

        Args:
            x: [m, K] float16, aligned to 16 bytes, or the result of the preceding call.
            out: [m, N] float16 (float32, too, where there is neither residual nor following), or None.
            residual: like out, or None.
            following: the next matmul, or None.

        Returns:
            The packed input of `following`.
        """
        packed = isinstance(x, Packed)
        rows = x.rows if isinstance(x, Packed) else x.shape[0]
        plan = self._plan(rows)
        assert plan is not None
        assert self._group is not None
        packed_next, next_input = None, None
        if following is not None:
            assert following._group is not None
            packed_next = Packed(following.scratch(rows), rows)
            next_input = _native.NextInput(following._group, packed_next.scratch, following.norm is not None)
        launch_matmul(
            self._group,
            plan,
            None if isinstance(x, Packed) else x,
            out,
            scratch=x.scratch if isinstance(x, Packed) else None,
            residual=residual,
            norm=self._packed_norm if packed else self._norm,
            next_input=next_input,
            chained=isinstance(x, Packed) and x.by_matmul,
        )
        self._activate_after(plan, out)
        return packed_next

    def _check(self, x: Tensor, out: Tensor, residual: Tensor | None) -> int:
        m = x.shape[0] if x.dim() == 2 else -1
        if m < 0 or x.shape[1] != self.in_features:
            raise ShapeError(f"x is {tuple(x.shape)}: expected [rows, {self.in_features}]")
        if residual is not None and self.activation:
            raise UnsupportedError("a residual on a matmul with an activation: add it in the matmul that follows")
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

    def _separate(self, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        """Run the matmul as separate batch-invariant operators; x is already normed."""
        if len(self.matrices) == 1 and residual is None:
            self.matrices[0].matmul(x, out=out, invariant=True)
            if self.activation:
                activate(out, self.activation, out=out)
            return
        parts = [matrix.matmul(x, invariant=True) for matrix in self.matrices]
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


def _aligned_floats(values: Tensor) -> Tensor:
    """Return values as contiguous float32 at a multiple of 16 bytes, of which kernels copy 16 at a time."""
    values = values.float().contiguous()
    return values.clone() if values.data_ptr() % 16 else values


def _stores_pairs(out: Tensor, residual: Tensor) -> bool:
    """Return whether results can be stored in pairs: out is aligned to 8 bytes, the residual to 4."""
    return out.data_ptr() % 8 == 0 and residual.data_ptr() % 4 == 0
