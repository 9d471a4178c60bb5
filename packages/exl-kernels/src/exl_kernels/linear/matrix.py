"""Linear layers over quantized or float weights: y = (x @ W + bias) * prescale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from .. import _native
from ..errors import DTypeError, FormatError, ShapeError, UnsupportedError
from ..formats import Exl2Parts, GptqFormat, GptqParts

__all__ = ["QUARTERS", "Compute", "Format", "QuantMatrix"]

QUARTERS = 4
"""Parts of K that a matmul sums one by one, so that K can be cut between them without changing a result."""

Compute = Literal["exact", "int8"]
Format = Literal["exl2", "gptq", "float"]

_EXL2_DTYPES = {
    "q_weight": torch.int32,
    "q_scale": torch.int32,
    "q_scale_max": torch.float16,
    "q_groups": torch.int16,
    "q_invperm": torch.int32,
}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_CPU = torch.device("cpu")


class QuantMatrix:
    """A weight matrix W [K, N] = [in, out], repacked for this machine's kernels at the bits per weight of its file.

    `compute="exact"` multiplies float32 activations with the exact half weights and accumulates in float32: the oracle.

    `compute="int8"` rounds activations to int8 with one float32 scale per 32 values (in the matrix's row order).
    Integer dot products with (code - zero point) are exact. They are scaled without the last rounding of weights to
    half: an error of at most 2^-11 of a weight, a twentieth of that of the activations' rounding.

    Float weights are always computed exactly. A row's result is bitwise identical for any number of rows in the call,
    any number of threads, and every instruction set. K is summed in QUARTERS parts, which are added in order. NaN and
    infinite activations make that row's outputs NaN (int8) or give the result of float32 arithmetic (exact).

    Attributes:
        in_features: K.
        out_features: N as stored: EXL2 pads to a multiple of 32.
        format: "exl2", "gptq" or the float type.
        compute: "exact" or "int8".
        bits_per_weight: of the file's form, all tensors but the bias.
        nbytes: bytes in memory.
        device: device of the matrix.
        name: name for messages.
    """

    __slots__ = (
        "_native",
        "bits_per_weight",
        "compute",
        "device",
        "format",
        "in_features",
        "name",
        "nbytes",
        "out_features",
    )

    def __init__(self, native: _native.Matrix, format: Format, compute: Compute, name: str) -> None:
        """Wrap a matrix `native` of the native module; use `from_exl2`, `from_gptq` or `from_float`."""
        self._native = native
        self.format: Format = format
        self.compute: Compute = compute
        self.name = name
        self.device = _CPU
        self.in_features: int = native.in_features
        self.out_features: int = native.out_features
        self.bits_per_weight: float = native.bits_per_weight
        self.nbytes: int = native.nbytes

    @property
    def takes_blocks(self) -> bool:
        """Whether one launch on a GPU takes BLOCK_ROWS float16 rows of this packed matrix."""
        return False

    @classmethod
    def from_exl2(
        cls,
        tensors: Mapping[str, Tensor],
        *,
        prescale: float = 1.0,
        compute: Compute = "int8",
        device: torch.device | str = "cpu",
        name: str = "",
        fine_scales: bool = False,
    ) -> QuantMatrix:
        """Copy an EXL2 matrix.

        Args:
            tensors: q_weight, q_scale, q_scale_max, q_groups, q_invperm as for `formats.exl2_check`, and optionally
                bias [N].
            prescale: factor of x @ W + bias.
            compute: arithmetic on the CPU; ignored on a GPU.
            device: "cpu" or a CUDA device, where the matrix takes half activations (see `linear.cuda`).
            name: name of the matrix in messages.
            fine_scales: store a scale for every 32 rows on a GPU, not for 128, so that one launch takes the matrix with
                others of which one `has_fine_scales`. Results are the same; ignored on the CPU.

        Raises:
            FormatError: the tensors do not fit the format; the message names the matrix.
            UnsupportedError: an option is unknown.
            DeviceError: CUDA cannot be used.
        """
        _check_options("from_exl2", compute, device, prescale)
        parts = Exl2Parts(**{key: _part(tensors, key, dtype, name) for key, dtype in _EXL2_DTYPES.items()})
        bias = _bias(tensors.get("bias"), parts.q_weight.shape[-1] if parts.q_weight.dim() else 0, name)
        _require_two_dimensions(name, parts.q_weight, parts.q_scale)
        if torch.device(device).type == "cuda":
            from .cuda import exl2_matrix

            return exl2_matrix(
                parts,
                bias=bias,
                prescale=prescale,
                compute=compute,
                device=device,
                name=name,
                fine_scales=fine_scales,
            )
        native = _native.Matrix.from_exl2(name, parts, bias=bias, prescale=prescale, exact=compute == "exact")
        return cls(native, "exl2", compute, name)

    @classmethod
    def from_gptq(
        cls,
        tensors: Mapping[str, Tensor],
        *,
        bits: int = 4,
        zeros: Literal["classic", "v2"] = "classic",
        group_size: int | None = None,
        prescale: float = 1.0,
        compute: Compute = "int8",
        device: torch.device | str = "cpu",
        name: str = "",
    ) -> QuantMatrix:
        """Copy a GPTQ matrix.

        Args:
            tensors: qweight, qzeros, scales (read as float16) and optionally g_idx and bias [N], as for
                `formats.gptq_dequantize`.
            bits: 2, 3, 4 or 8.
            zeros: "classic" (zero point = stored + 1) or "v2".
            group_size: rows of a group; None or -1 infers the smallest power of two that gives the file's number of
                groups.
            prescale: factor of x @ W + bias.
            compute: arithmetic on the CPU; ignored on a GPU.
            device: "cpu" or a CUDA device.
            name: name of the matrix in messages.

        Raises:
            FormatError: the tensors do not fit the format; the message names the matrix.
            UnsupportedError: an option is unknown.
            DeviceError: CUDA cannot be used.
        """
        _check_options("from_gptq", compute, device, prescale)
        if zeros not in ("classic", "v2"):
            raise UnsupportedError(f'from_gptq: zeros={zeros!r}; use "classic" or "v2"')
        if bits not in (2, 3, 4, 8):
            raise FormatError(f"{name or 'matrix'}: GPTQ of {bits} bits; the format has 2, 3, 4 and 8")
        if group_size is not None:
            group_size = None if group_size < 1 else min(group_size, 2**31 - 1)
        qweight = _part(tensors, "qweight", torch.int32, name)
        qzeros = _part(tensors, "qzeros", torch.int32, name)
        scales = _float_part(tensors, "scales", name)
        _require_two_dimensions(name, qweight, qzeros, scales)
        g_idx = _part(tensors, "g_idx", torch.int32, name) if tensors.get("g_idx") is not None else None
        parts, format = GptqParts(qweight, qzeros, scales, g_idx), GptqFormat(bits, zeros == "v2", group_size)
        bias = _bias(tensors.get("bias"), qweight.shape[1], name)
        if torch.device(device).type == "cuda":
            from .cuda import gptq_matrix

            return gptq_matrix(parts, format, bias=bias, prescale=prescale, compute=compute, device=device, name=name)
        native = _native.Matrix.from_gptq(name, parts, format, bias=bias, prescale=prescale, exact=compute == "exact")
        return cls(native, "gptq", compute, name)

    @classmethod
    def from_float(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        prescale: float = 1.0,
        compute: Compute = "int8",
        device: torch.device | str = "cpu",
        name: str = "",
        precise: bool = False,
    ) -> QuantMatrix:
        """Copy a float matrix, on the CPU kept in its dtype and computed exactly, on a GPU in float16.

        Args:
            weight: [out, in] in float16, bfloat16 or float32.
            bias: [out], or None.
            prescale: factor of x @ W + bias.
            compute: kept for information.
            device: "cpu" or a CUDA device.
            name: name of the matrix in messages.
            precise: keep bfloat16 weights on a GPU, too, for `linear.cuda.CudaFloatMatrix.matmul_precise`.

        Raises:
            FormatError: weight or bias has a wrong shape or dtype, or the bias is not finite.
            UnsupportedError: an option is unknown.
            DeviceError: CUDA cannot be used.
        """
        _check_options("from_float", compute, device, prescale)
        label = name or "matrix"
        if weight.dtype not in _FLOATS:
            raise FormatError(f"{label}: weight is {weight.dtype}; expected float16, bfloat16 or float32")
        if weight.dim() != 2 or 0 in weight.shape:
            raise FormatError(f"{label}: weight has shape {list(weight.shape)}; expected [out, in], neither of them 0")
        bias = _bias(bias, weight.shape[0], name)
        if torch.device(device).type == "cuda":
            from .cuda import float_matrix

            return float_matrix(
                weight, bias=bias, prescale=prescale, compute=compute, device=device, name=name, precise=precise
            )
        native = _native.Matrix.from_float(_on_cpu(weight, label).contiguous(), bias, prescale)
        return cls(native, "float", compute, name)

    def matmul(self, x: Tensor, out: Tensor | None = None, *, invariant: bool | None = None) -> Tensor:
        """Compute (x @ W + bias) * prescale.

        Args:
            x: float32 [..., K] on the CPU; float16 or bfloat16 on a GPU.
            out: [..., N], contiguous, not overlapping x; None for a new tensor.
            invariant: on a GPU many rows are batch-invariant, too; None: as `device.row_invariant` says. On the CPU
                all rows always are.

        Returns:
            `out`, or a new tensor of x's dtype.

        Raises:
            ShapeError, DTypeError: wrong size, type or device.
        """
        if x.dtype is not torch.float32 or x.device.type != "cpu":
            raise DTypeError(
                f"{self.name or 'matmul'}: x is {x.dtype} on {x.device}; this matrix takes float32 on the CPU"
            )
        shape = x.shape
        if not shape or shape[-1] != self.in_features:
            raise ShapeError(f"{self.name or 'matmul'}: x has shape {list(shape)}; the last must be {self.in_features}")
        if not x.is_contiguous():
            x = x.contiguous()
        wanted = (*shape[:-1], self.out_features)
        if out is None:
            out = torch.empty(wanted, dtype=torch.float32)
        elif out.shape != wanted or out.dtype is not torch.float32 or out.device != _CPU or not out.is_contiguous():
            raise ShapeError(
                f"{self.name or 'matmul'}: out is {list(out.shape)} {out.dtype} on {out.device}; "
                f"expected contiguous float32 {list(wanted)} on the CPU"
            )
        self._native.matmul(x, out)
        return out

    def dequantize(self) -> Tensor:
        """Return W [K, N] float16 in file order, from the repacked form, exactly as the format defines it.

        Float matrices give the transposed weight, rounded to float16.
        """
        out = torch.empty((self.in_features, self.out_features), dtype=torch.float16)
        self._native.dequantize(out)
        return out

    def quarter_features(self, first: int, last: int) -> Tensor:
        """Return the input features of quarters [first, last) of K, in the order in which `quarters` takes them.

        K is cut in QUARTERS parts of whole blocks of 32 packed rows; a small matrix has parts without rows.

        Returns:
            int64 [features].

        Raises:
            UnsupportedError: the matrix is on a GPU.
            ShapeError: there are no such quarters.
        """
        self._check_quarters(first, last)
        return torch.tensor(self._native.quarter_features(first, last), dtype=torch.int64)

    def quarters(self, first: int, last: int) -> QuantMatrix:
        """Return a matrix of the rows of quarters [first, last) of K, without bias and prescale.

        Its input has the features of `quarter_features`. The results of all single quarters that have rows, added in
        order in float32, are bitwise those of the whole matrix before bias and prescale; so are those of [0, n) and the
        single quarters after it.

        Raises:
            UnsupportedError, ShapeError: as for `quarter_features`, and for quarters without rows.
        """
        if not len(self.quarter_features(first, last)):
            raise ShapeError(f"{self.name or 'matrix'}: quarters [{first}, {last}) of its K have no rows")
        return QuantMatrix(self._native.quarters(first, last), self.format, self.compute, self.name)

    def columns(self, columns: Tensor) -> QuantMatrix:
        """Return a matrix of the given columns, in this order, whose results are bitwise theirs.

        Args:
            columns: integers [n] of 0 to out_features - 1, at least one.

        Raises:
            UnsupportedError: the matrix is on a GPU.
            ShapeError: a column is not in the matrix, or there are none.
        """
        self._on_cpu("columns")
        numbers = columns.tolist()
        if not numbers or min(numbers) < 0 or max(numbers) >= self.out_features:
            raise ShapeError(
                f"{self.name or 'matrix'}: columns must be one or more of 0 to {self.out_features - 1}, not "
                f"{numbers[:4]} to {numbers[-4:]}"
            )
        return QuantMatrix(self._native.columns(numbers), self.format, self.compute, self.name)

    def _on_cpu(self, what: str) -> None:
        if self.device.type != "cpu":
            raise UnsupportedError(f"{self.name or 'matrix'}: {what} of a matrix on {self.device}; only on the CPU")

    def _check_quarters(self, first: int, last: int) -> None:
        self._on_cpu("quarters")
        if not 0 <= first < last <= QUARTERS:
            raise ShapeError(
                f"{self.name or 'matrix'}: quarters [{first}, {last}); K has quarters 0 to {QUARTERS - 1}, first < last"
            )

    def __repr__(self) -> str:
        return (
            f"QuantMatrix({self.name!r}, {self.format}, {self.in_features} x {self.out_features}, "
            f"{self.bits_per_weight:.2f} bpw, {self.compute})"
        )


def _check_options(what: str, compute: str, device: torch.device | str, prescale: float) -> None:
    if compute not in ("exact", "int8"):
        raise UnsupportedError(f'{what}: compute={compute!r}; use "exact" or "int8"')
    if torch.device(device).type not in ("cpu", "cuda"):
        raise UnsupportedError(f"{what}: device {device}; a matrix lives on the CPU or an NVIDIA GPU: 'cpu' or 'cuda'")
    if not math.isfinite(prescale):
        raise FormatError(f"{what}: prescale is {prescale}; it must be finite")


def _on_cpu(tensor: Tensor, label: str) -> Tensor:
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            f"{label}: the tensor is on {tensor.device}; weights are repacked on the CPU, use .cpu()"
        )
    return tensor


def _part(tensors: Mapping[str, Tensor], key: str, dtype: torch.dtype, name: str) -> Tensor:
    label = f"{name or 'matrix'}: {key}"
    tensor = tensors.get(key)
    if tensor is None:
        raise FormatError(f"{label} is missing")
    if tensor.dtype != dtype:
        raise FormatError(f"{label} is {tensor.dtype}; expected {dtype}")
    return _on_cpu(tensor, label).contiguous()


def _float_part(tensors: Mapping[str, Tensor], key: str, name: str) -> Tensor:
    tensor = tensors.get(key)
    if tensor is not None and tensor.dtype in _FLOATS:
        return _on_cpu(tensor, f"{name or 'matrix'}: {key}").to(torch.float16).contiguous()
    return _part(tensors, key, torch.float16, name)


def _require_two_dimensions(name: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dim() != 2:
            raise FormatError(
                f"{name or 'matrix'}: a packed tensor has shape {list(tensor.shape)}; expected two dimensions"
            )


def _bias(bias: Tensor | None, out_features: int, name: str) -> Tensor | None:
    if bias is None:
        return None
    label = f"{name or 'matrix'}: bias"
    if bias.dtype not in _FLOATS:
        raise FormatError(f"{label} is {bias.dtype}; expected a float type")
    if bias.shape != (out_features,):
        raise FormatError(f"{label} has shape {list(bias.shape)}; expected [{out_features}]")
    bias = _on_cpu(bias, label).to(torch.float32).contiguous()
    if not bool(torch.isfinite(bias).all()):
        raise FormatError(f"{label} holds NaN or infinity")
    return bias
