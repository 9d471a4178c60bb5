"""Matrices on a GPU: the results of `QuantMatrix.from_exl2`, `from_gptq` and `from_float` for a CUDA device.

Quantized weights are repacked on the CPU into tensor-core tiles (rust/exl-cuda/src/layout) at the bits per weight of
the file. A matmul multiplies half activations and accumulates in float32. Where 128 rows have one scale, it multiplies
with exact differences of codes and zeros and applies the scale to the rows' sum: the second half rounding of the
format's definition (of each weight) is left out; `dequantize` has it. In units of 256 rows with more scales, it
multiplies with the weights as the format defines them. Sums have one order, so few rows are batch-invariant
(`device.rows_are_invariant`): a row's result does not depend on the number of rows or its place among them. Calls with
`invariant` make it so for any number of rows. BF16 activations are carried as halves times a power of two of their row.

`_native.CudaLinearGroup.plan` and `plan_alone` pick the kernel (rust/exl-cuda, `ops::linear::select`). This module
allocates the memory that the plan lists and launches the kernel.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

import torch
from torch import Tensor

from .. import _native
from ..cuda_ops import stream_of
from ..device import launch_of, require_cuda, row_invariant, rows_are_invariant
from ..errors import DTypeError, FormatError, ShapeError
from ..formats import Exl2Parts, GptqFormat, GptqParts
from ..selection import BLOCK_ROWS
from .matrix import Compute, Format, QuantMatrix
from .planned import KEPT_PLANS
from .upload import Pack, moved, packed_image, settle
from .workspace import block_workspace

__all__ = [
    "CudaFloatMatrix",
    "CudaQuantMatrix",
    "WeightMemory",
    "exl2_matrix",
    "float_matrix",
    "gptq_matrix",
    "launch_matmul",
]

_HALVES = (torch.float16, torch.bfloat16)


def aligned(x: Tensor) -> Tensor:
    """Return x itself, or a copy where x does not begin at a multiple of 16 bytes."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


class WeightMemory:
    """Memory on a GPU of one dequantized matrix at a time, for the matmuls of a pass.

    Args:
        elements: of the largest matrix.
        device: the GPU of the matrices.
    """

    def __init__(self, elements: int, device: torch.device) -> None:
        self._flat = torch.empty(elements, dtype=torch.float16, device=device)
        self._shaped: dict[tuple[int, int], Tensor] = {}

    def shaped(self, rows: int, columns: int) -> Tensor:
        """Return the memory as a matrix [rows, columns] float16, which overwrites the one before."""
        found = self._shaped.get((rows, columns))
        if found is None:
            found = self._shaped[rows, columns] = self._flat[: rows * columns].view(rows, columns)
        return found


def launch_matmul(
    group: _native.CudaLinearGroup,
    plan: _native.MatmulPlan,
    x: Tensor | None,
    out: Tensor | None,
    *,
    scratch: Tensor | None = None,
    residual: Tensor | None = None,
    norm: _native.NormPrologue | None = None,
    next_input: _native.NextInput | None = None,
    chained: bool = False,
    input_activation: str | None = None,
    adapters: _native.EpilogueAdapters | None = None,
) -> None:
    """Launch a matmul by its plan on torch's current stream, in memory of the plan's sizes.

    Args:
        group: the matrices.
        plan: a plan of `group` for these rows and operands.
        x: [m, K] float16 or bfloat16, contiguous; None where its rows are packed in `scratch` already.
        out: [m, N], or [2, m, N] where the plan has a separate gate; None where results go to `next_input` alone.
        scratch: uint8 of the plan's size, where x is None; otherwise it is allocated here.
        residual: like out, added to the result.
        norm: RMS norm of the input.
        next_input: packed input of the next matmul, which also, or only, gets the results.
        chained: the preceding matmul packed the input.
        input_activation: activation of x, where the plan activates inputs.
        adapters: of the rows, where the plan is for them.

    Raises:
        ValueError, TypeError: an operand does not fit the plan.
        DeviceError: the launch fails.
    """
    place = scratch if x is None else x
    assert place is not None
    stream = stream_of(place)
    if scratch is None and (size := plan.scratch_bytes):
        scratch = torch.empty(size, dtype=torch.uint8, device=place.device)
    exchange_bytes = plan.exchange_bytes
    exchange = block_workspace(place.device, stream, exchange_bytes) if exchange_bytes else None
    group.run(
        plan,
        x,
        out,
        launch_of(stream),
        scratch=scratch,
        exchange=exchange,
        residual=residual,
        norm=norm,
        next=next_input,
        chained=chained,
        input_activation=input_activation,
        adapters=adapters,
    )


class _CudaMatrix(QuantMatrix):
    """Checks of activations and outputs that all matrices on a GPU share."""

    __slots__ = ()

    def _output(self, x: Tensor, out: Tensor | None) -> Tensor:
        label = self.name or "matmul"
        if x.dtype not in _HALVES or x.device != self.device:
            raise DTypeError(
                f"{label}: x is {x.dtype} on {x.device}; this matrix takes float16 or bfloat16 on {self.device}"
            )
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ShapeError(f"{label}: x has shape {list(x.shape)}; the last must be {self.in_features}")
        wanted = (*x.shape[:-1], self.out_features)
        if out is None:
            return torch.empty(wanted, dtype=x.dtype, device=x.device)
        if out.shape != wanted or out.device != x.device or not out.is_contiguous():
            raise ShapeError(
                f"{label}: out is {list(out.shape)} on {out.device}; expected contiguous {list(wanted)} on {x.device}"
            )
        if out.dtype not in (*_HALVES, torch.float32):
            raise DTypeError(f"{label}: out is {out.dtype}; expected float16, bfloat16 or float32")
        return out

    def __repr__(self) -> str:
        return (
            f"QuantMatrix({self.name!r}, {self.format}, {self.in_features} x {self.out_features}, "
            f"{self.bits_per_weight:.2f} bpw, {self.device})"
        )


class CudaQuantMatrix(_CudaMatrix):
    """An EXL2 or GPTQ matrix on a GPU. Attributes as `QuantMatrix`; `compute` is kept for information only."""

    __slots__ = ("_bias", "_cuda", "_features", "_group", "_plans", "_prescale", "plain")

    def __init__(
        self,
        layout: _native.CudaLayout,
        device: torch.device,
        format: Format,
        *,
        bits_per_weight: float,
        bias: Tensor | None,
        prescale: float,
        compute: Compute,
        name: str,
        pack: Pack | None = None,
    ) -> None:
        """Internal constructor; use `QuantMatrix.from_exl2` or `from_gptq` with a CUDA device.

        `pack` packs the image where the layout has none.
        """
        units, maxima = moved(layout.units, device), moved(layout.maxima, device)
        features, row_of_feature = moved(layout.features, device), moved(layout.row_of_feature, device)
        self._bias = None if bias is None else moved(bias, device)
        if pack is not None:
            image = packed_image(layout, device, pack)
        else:
            assert layout.image is not None, "a layout without an image comes with its packing"
            image = layout.image.to(device)
        self._features = features
        self._cuda = _native.CudaMatrix(
            layout,
            image=image,
            units=units,
            maxima=maxima,
            features=features,
            row_of_feature=row_of_feature,
            bias=self._bias,
            prescale=prescale,
        )
        self._prescale = prescale
        self.plain = bias is None and prescale == 1.0
        """Whether the result is x @ W, without bias and prescale."""
        self._group = _native.CudaLinearGroup([self._cuda])
        self._plans: dict[tuple[int | None, torch.dtype, bool], _native.MatmulPlan] = {}
        self.format: Format = format
        self.compute: Compute = compute
        self.name = name
        self.device = device
        self.in_features: int = layout.in_features
        self.out_features: int = layout.out_features
        self.bits_per_weight = bits_per_weight
        held = [image, units, maxima, features, row_of_feature, *([] if self._bias is None else [self._bias])]
        self.nbytes: int = sum(part.nbytes for part in held)
        settle(device)

    def matmul(self, x: Tensor, out: Tensor | None = None, *, invariant: bool | None = None) -> Tensor:
        """Multiply x [.., K] float16 or bfloat16 to [.., N] of that type, or into `out` (also float32).

        Few rows run on the packed weights. For more rows the matrix is dequantized once and multiplied with torch, or,
        with `invariant`, the packed weights take blocks of rows; the plan decides.

        Raises:
            ShapeError, DTypeError: wrong size, type or device.
        """
        out = self._output(x, out)
        rows = x.numel() // self.in_features
        if rows == 0:
            return out
        x = aligned(x.contiguous())
        plan = self._planned(rows, x.dtype, invariant)
        if plan.dequantizes:
            self._multiply(x.view(-1, self.in_features), self.dequantize(), out.view(-1, self.out_features))
        elif plan.rows == rows:
            launch_matmul(self._group, plan, x, out)
        else:
            blocks = (torch.split(t.view(rows, -1), plan.rows) for t in (x, out))
            for some, to in zip(*blocks, strict=True):
                launch_matmul(self._group, self._planned(some.shape[0], x.dtype, invariant), some, to)
        return out

    @property
    def takes_blocks(self) -> bool:
        """Whether one launch takes BLOCK_ROWS float16 rows."""
        return self._group.plan_alone(BLOCK_ROWS, bfloat16=False, invariant=True).whole_block

    def _planned(self, rows: int, dtype: torch.dtype, invariant: bool | None) -> _native.MatmulPlan:
        """Return the plan of a call of so many rows; `invariant` as for `matmul`.

        Rows that are not batch-invariant have one plan, whatever their number, and each prompt has another number.
        """
        invariant = row_invariant() if invariant is None else invariant
        key = (rows if rows_are_invariant(rows, invariant=invariant) else None, dtype, invariant)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= KEPT_PLANS:
                self._plans.clear()
            plan = self._group.plan_alone(rows, bfloat16=dtype == torch.bfloat16, invariant=invariant)
            self._plans[key] = plan
        return plan

    def add_matmul(self, x: Tensor, to: Tensor) -> None:
        """Add x [T, K] @ W to `to` [T, N], both contiguous halves, by one matmul of torch: the sum is rounded once.

        For rows that need not be batch-invariant, of a `plain` matrix.

        Raises:
            ShapeError, DTypeError: as for `matmul`.
        """
        assert self.plain, "a bias or a factor is added by a launch of its own"
        self._output(x, to).addmm_(x, self.dequantize())

    def matmul_in(self, memory: WeightMemory, x: Tensor, out: Tensor) -> None:
        """Compute `matmul(x, out)` of rows that need not be batch-invariant, dequantized in `memory`.

        Operands are checked by the launches alone.

        Args:
            memory: memory on this GPU of at least K * N elements.
            x: [T, K] float16, contiguous.
            out: [T, N] float16, contiguous.
        """
        self._multiply(x, self._dequantized_in(memory), out)

    def add_matmul_in(self, memory: WeightMemory, x: Tensor, to: Tensor) -> None:
        """Compute `add_matmul(x, to)` as `matmul_in`, for a `plain` matrix: the sum is rounded once."""
        to.addmm_(x, self._dequantized_in(memory))

    def _dequantized_in(self, memory: WeightMemory) -> Tensor:
        weight = memory.shaped(self.in_features, self.out_features)
        self._cuda.dequantize(weight, stream_of(weight))
        return weight

    def in_layout(self, values: Tensor) -> Tensor:
        """Return values [K] in the order of the layout's rows, zeros in padding rows, up to whole units of 256 rows."""
        features = self._features.long()
        ordered = torch.where(features >= 0, values[features.clamp(min=0)], torch.zeros((), device=values.device))
        return torch.nn.functional.pad(ordered, (0, -len(ordered) % 256)).contiguous()

    def _multiply(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Write x [T, K] times the dequantized weight [K, N], with bias and prescale, into out [T, N]."""
        if self.plain and x.dtype == out.dtype == torch.float16:
            torch.mm(x, weight, out=out)
            return
        if x.dtype == torch.float16:
            result = x @ weight
        else:
            # As halves: bfloat16 weights would lose three of their eleven bits, and float32 weights would be slow.
            largest = x.abs().amax(dim=1, keepdim=True).float()
            factor = torch.exp2(-torch.floor(torch.log2(largest.clamp(min=1e-30))))
            result = (x.float() * factor).half() @ weight
            result = result.float() / factor
        if not self.plain:
            result = result.float()
            result = (result if self._bias is None else result + self._bias) * self._prescale
        out.copy_(result)

    def dequantize(self) -> Tensor:
        """Return W [K, N] float16 in file order on the GPU, bitwise identical to the format's definition."""
        out = torch.empty((self.in_features, self.out_features), dtype=torch.float16, device=self.device)
        self._cuda.dequantize(out, stream_of(out))
        return out


class CudaFloatMatrix(_CudaMatrix):
    """A float matrix on a GPU, in halves.

    Few rows, and with `invariant` any number of rows, run on kernels of one order of sums: a row's result is bitwise
    the same with any other rows. More rows are multiplied by torch, which picks its kernel by their number.

    bfloat16 and float32 weights become halves times a power of two of the matrix. A bfloat16 weight keeps all its bits
    if it is at least 2^-13 of the largest; smaller ones, and float32 weights, are rounded.
    """

    __slots__ = ("_bias", "_exact", "_native_float", "_prescale", "_scale", "_weight")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        prescale: float,
        compute: Compute,
        name: str,
        *,
        precise: bool = False,
    ) -> None:
        """Internal constructor; use `QuantMatrix.from_float` with a CUDA device."""
        self._weight, self._scale = _as_halves(weight)
        self._exact = weight if precise and weight.dtype == torch.bfloat16 else None
        self._bias = bias
        self._prescale = prescale
        self._native_float = _native.CudaFloat(self._weight, bias, scale=self._scale, prescale=prescale)
        self.format: Format = "float"
        self.compute: Compute = compute
        self.name = name
        self.device = weight.device
        self.out_features, self.in_features = weight.shape
        self.bits_per_weight = 16.0
        held = (self._weight, self._exact, bias)
        self.nbytes: int = sum(part.nbytes for part in held if part is not None)

    @property
    def takes_blocks(self) -> bool:
        """Whether one launch takes BLOCK_ROWS float16 rows: it takes any number."""
        return True

    def matmul(self, x: Tensor, out: Tensor | None = None, *, invariant: bool | None = None) -> Tensor:
        """Multiply x [.., K] float16 or bfloat16 to [.., N] of that type, or into `out` (also float32).

        Raises:
            ShapeError, DTypeError: wrong size, type or device.
        """
        out = self._output(x, out)
        flat = x.reshape(-1, self.in_features)
        if len(flat) == 0:
            return out
        halves, multipliers = (flat.contiguous(), None) if flat.dtype == torch.float16 else _rows_as_halves(flat)
        if not rows_are_invariant(len(flat), invariant=invariant):
            self._multiply(halves, multipliers, out.view(-1, self.out_features))
            return out
        size = self._native_float.scratch_bytes(halves)
        scratch = torch.empty(size, dtype=torch.uint8, device=self.device) if size else None
        launch = launch_of(stream_of(halves))
        self._native_float.matmul(halves, out, launch, multipliers=multipliers, scratch=scratch)
        return out

    def _multiply(self, x: Tensor, multipliers: Tensor | None, out: Tensor) -> None:
        """Write the result of x [T, K] into out [T, N] in one matmul of torch."""
        bare = self._bias is None and multipliers is None and self._scale * self._prescale == 1.0
        if bare and out.dtype == torch.float16:
            torch.mm(x, self._weight.t(), out=out)  # no temporary result
            return
        result = torch.mm(x, self._weight.t())
        if not bare:
            result = result.float().mul_(self._scale if multipliers is None else multipliers.unsqueeze(1) * self._scale)
            result = result if self._bias is None else result.add_(self._bias)
            result = result.mul_(self._prescale)
        out.copy_(result)

    def matmul_precise(self, x: Tensor) -> Tensor:
        """Multiply x [.., K] to float32 [.., N], summed in float64 and rounded once; for the few columns of a router.

        Products of halves are multiples of 2^-48, so sums that stay below 32 are exact, in any order and for any number
        of rows. Larger sums may differ in the last bit where the rounding of float64 coincides with that of float32.
        """
        self._output(x, None)
        result = torch.nn.functional.linear(x.double(), self._stored().double())
        if self._bias is not None:
            result += self._bias
        return (result * self._prescale).float()

    def stored(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [N, K], of a `precise` bfloat16 matrix as given and else float16, and the bias or None."""
        return self._stored(), self._bias

    def _stored(self) -> Tensor:
        if self._exact is not None:
            return self._exact
        return self._weight if self._scale == 1.0 else (self._weight.float() * self._scale).half()

    @property
    def prescale(self) -> float:
        """Factor of x @ W + bias."""
        return self._prescale

    def dequantize(self) -> Tensor:
        """Return the transposed weight [K, N], rounded to float16."""
        return self._stored().t().to(torch.float16).contiguous()


def _as_halves(weight: Tensor) -> tuple[Tensor, float]:
    """Return float16 values and their factor, a power of two: 1 where the largest weight is from 2^-4 to 2^4."""
    if weight.dtype == torch.float16:
        return weight, 1.0
    largest = float(weight.abs().max())
    if largest == 0.0 or 2.0**-4 <= largest < 2.0**4:
        return weight.half(), 1.0
    _, exponent = math.frexp(largest)  # 2^exponent / 2 <= largest < 2^exponent
    return torch.ldexp(weight.float(), torch.tensor(-exponent, device=weight.device)).half(), math.ldexp(1.0, exponent)


def _rows_as_halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return bfloat16 rows [T, K] as float16, and the float32 power of two [T] of each row that restores them."""
    exponents = torch.frexp(x.abs().amax(dim=1).float()).exponent.clamp(-100, 100)
    return torch.ldexp(x.float(), -exponents.unsqueeze(1)).half(), torch.ldexp(
        torch.ones_like(exponents).float(), exponents
    )


def exl2_matrix(
    parts: Exl2Parts,
    *,
    bias: Tensor | None,
    prescale: float,
    compute: Compute,
    device: torch.device | str,
    name: str,
    fine_scales: bool,
) -> CudaQuantMatrix:
    """Implement `QuantMatrix.from_exl2` for a GPU; `parts` are its five checked CPU tensors."""
    place = require_cuda(device)
    layout = _native.CudaLayout.from_exl2(name, parts, _threads(), pack=False, fine_scales=fine_scales)
    bits = _bits(parts, layout)

    def pack(first: int, out: Tensor) -> None:
        layout.pack_exl2(name, parts, first=first, out=out, threads=_threads())

    return CudaQuantMatrix(
        layout,
        place,
        "exl2",
        bits_per_weight=bits,
        bias=bias,
        prescale=prescale,
        compute=compute,
        name=name,
        pack=pack,
    )


def gptq_matrix(
    parts: GptqParts,
    format: GptqFormat,
    *,
    bias: Tensor | None,
    prescale: float,
    compute: Compute,
    device: torch.device | str,
    name: str,
) -> CudaQuantMatrix:
    """Implement `QuantMatrix.from_gptq` for a GPU; `parts` are CPU tensors."""
    place = require_cuda(device)
    layout = _native.CudaLayout.from_gptq(name, parts, format, _threads(), pack=False)
    stored = _bits((part for part in parts if part is not None), layout)

    def pack(first: int, out: Tensor) -> None:
        layout.pack_gptq(name, parts, format, first=first, out=out, threads=_threads())

    return CudaQuantMatrix(
        layout,
        place,
        "gptq",
        bits_per_weight=stored,
        bias=bias,
        prescale=prescale,
        compute=compute,
        name=name,
        pack=pack,
    )


def float_matrix(
    weight: Tensor,
    *,
    bias: Tensor | None,
    prescale: float,
    compute: Compute,
    device: torch.device | str,
    name: str,
    precise: bool,
) -> CudaFloatMatrix:
    """Implement `QuantMatrix.from_float` for a GPU."""
    place = require_cuda(device)
    on_gpu = None if bias is None else bias.to(place, torch.float32)
    made = CudaFloatMatrix(weight.to(place).contiguous(), on_gpu, prescale, compute, name, precise=precise)
    settle(place)
    return made


def _bits(parts: Iterable[Tensor], layout: _native.CudaLayout) -> float:
    weights: int = layout.in_features * layout.out_features
    if not weights:
        raise FormatError("a matrix without weights")
    return 8.0 * sum(part.nbytes for part in parts) / weights


def _threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores)
