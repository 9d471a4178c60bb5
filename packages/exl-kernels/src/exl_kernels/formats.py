"""EXL2 and GPTQ matrices as their files hold them: read, dequantized exactly, and written by round to nearest.

Matrices are W [K, N] = [in_features, out_features], y = x @ W; float weights are [N, K], as in torch's `Linear`. All
tensors are on the CPU. `exl_kernels.reference.formats` has the same functions in plain numpy, as the tests' oracle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import _native
from .errors import DTypeError, FormatError, ShapeError
from .safetensors_file import (
    SafetensorsHeader,
    TensorEntry,
    read_into,
    read_safetensors_folder,
    read_safetensors_header,
    read_tensor,
    write_safetensors,
)

__all__ = [
    "SafetensorsHeader",
    "TensorEntry",
    "exl2_check",
    "exl2_dequantize",
    "exl2_groups",
    "exl2_pack",
    "exl2_quantize",
    "exl2_total_bits",
    "gptq_check",
    "gptq_dequantize",
    "gptq_quantize",
    "importance_order",
    "read_into",
    "read_safetensors_folder",
    "read_safetensors_header",
    "read_tensor",
    "write_safetensors",
]

Zeros = Literal["classic", "v2"]


class Exl2Parts(NamedTuple):
    """The tensors of an EXL2 matrix; `exl2_check` gives shapes and dtypes."""

    q_weight: Tensor
    q_scale: Tensor
    q_scale_max: Tensor
    q_groups: Tensor
    q_invperm: Tensor


class Exl2Codes(NamedTuple):
    """The codes of an EXL2 matrix before they are packed; `exl2_pack` gives shapes and dtypes."""

    codes: Tensor
    scale_codes: Tensor
    q_scale_max: Tensor
    groups: Sequence[tuple[int, int]]


class Exl2Group(NamedTuple):
    """Rows of an EXL2 matrix whose codes have one width."""

    bits: int
    rows: int


class MatrixSize(NamedTuple):
    """The size of a matrix."""

    in_features: int
    out_features: int


class GptqParts(NamedTuple):
    """The tensors of a GPTQ matrix; `gptq_dequantize` gives shapes and dtypes."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor | None


class GptqFormat(NamedTuple):
    """The properties of a GPTQ matrix that its tensors do not tell."""

    bits: int = 4
    v2: bool = False
    """Zero points are stored as they are, not minus one."""
    group_size: int | None = None
    """Rows of a group; None takes the smallest power of two that gives the file's number of groups."""


_EXL2 = {
    "q_weight": (torch.int32, 2),
    "q_scale": (torch.int32, 2),
    "q_scale_max": (torch.float16, 1),
    "q_groups": (torch.int16, 1),
    "q_invperm": (torch.int32, 1),
}
_GPTQ = {"qweight": (torch.int32, 2), "qzeros": (torch.int32, 2), "scales": (torch.float16, 2)}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


# EXL2


def exl2_check(tensors: Mapping[str, Tensor], *, name: str = "") -> list[Exl2Group]:
    """Check a matrix completely and return its groups in file order.

    Args:
        tensors: q_weight int32 [R, N], q_scale int32 [G, N / 8], q_scale_max float16 [G], q_groups int16 [2 G],
            q_invperm int32 [K]; other tensors are ignored.
        name: name of the matrix in messages.

    Raises:
        FormatError: the tensors violate the format; the message names the matrix and the violation.
    """
    return _groups(_native.exl2_check(name, _exl2_parts(tensors, name)))


def exl2_dequantize(tensors: Mapping[str, Tensor], *, name: str = "") -> Tensor:
    """Return W [K, N] float16, rows in file order of the input features, exactly as the format defines it.

    N is the stored size, padding included. `tensors`, `name` and the errors are those of `exl2_check`.
    """
    exl2_check(tensors, name=name)  # before allocating: a broken file may claim any size
    parts = _exl2_parts(tensors, name)
    out = torch.empty((parts.q_invperm.shape[0], parts.q_weight.shape[1]), dtype=torch.float16)
    _native.exl2_dequantize(name, parts, out)
    return out


def exl2_groups(plan: str, in_features: int) -> list[Exl2Group]:
    """Return the groups of a plan such as "0.1:5b_32g/0.9:4b_32g".

    Args:
        plan: parts `share:bits b_group_size g`, joined by "/".
        in_features: rows of the matrix.

    Raises:
        FormatError: the plan is malformed.
    """
    return _groups(_native.exl2_groups("plan", plan, in_features))


def exl2_total_bits(plan: str, in_features: int, out_features: int) -> int:
    """Return the bits that the five tensors of a matrix take in a file, with columns padded to a multiple of 32.

    Args:
        plan: a plan as for `exl2_groups`.
        in_features: rows of the matrix.
        out_features: columns of the matrix.

    Raises:
        FormatError: the plan is malformed.
    """
    return _native.exl2_total_bits("plan", plan, in_features, out_features)


def importance_order(weight: Tensor) -> Tensor:
    """Return the input features of `weight` [out, in] by falling L2 norm, int64 [in].

    The order decides which rows get wide codes when there is no calibration data.
    """
    norms = torch.linalg.vector_norm(weight, dim=0, dtype=torch.float32)
    return torch.argsort(norms, descending=True, stable=True)


def exl2_quantize(
    weight: Tensor,
    plan: str | int = 4,
    group_size: int = 128,
    *,
    perm: Tensor | None = None,
    fast: bool = False,
    name: str = "",
) -> dict[str, Tensor]:
    """Quantize by round to nearest, without error compensation. Columns are padded to a multiple of 32.

    Args:
        weight: float32, float16 or bfloat16 [out, in], `in` a multiple of 32.
        plan: a width in bits, used with `group_size`, or a mixed plan such as "0.1:5b_32g/0.9:4b_32g".
        group_size: rows of a group.
        perm: int64 [in]. Packed row k takes input feature perm[k], most important first (see `importance_order`); None
            keeps the order.
        fast: skip the search for each group's best scale.
        name: name of the matrix in messages.

    Returns:
        q_weight, q_scale, q_scale_max, q_groups, q_invperm; bitwise identical at any thread count.

    Raises:
        FormatError: the plan or in_features is invalid, or the weight has NaN or infinity.
        ShapeError, DTypeError: an operand does not fit.
    """
    weight = _float_weight(weight, name)
    text = plan if isinstance(plan, str) else f"1:{plan}b_{group_size}g"
    out_features, in_features = weight.shape
    groups = _groups(_native.exl2_groups(name, text, in_features))
    result = _exl2_empty(groups, -(-out_features // 32) * 32)
    _native.exl2_quantize(name, weight, text, perm=_perm(perm, name), grid=not fast, parts=result)
    return result._asdict()


def exl2_pack(
    codes: Tensor,
    scale_codes: Tensor,
    q_scale_max: Tensor,
    groups: Sequence[tuple[int, int]],
    *,
    perm: Tensor | None = None,
    name: str = "",
) -> dict[str, Tensor]:
    """Pack codes into file tensors.

    Args:
        codes: uint8 [K, N], in packed row order, N a multiple of 8.
        scale_codes: uint8 [G, N] (0..15), the stored scale codes.
        q_scale_max: float16 [G].
        groups: (bits, rows) of each group in any order of widths; exllamav2 reads only falling widths.
        perm: as for `exl2_quantize`.
        name: name of the matrix in messages.

    Raises:
        FormatError: the groups are invalid.
        ShapeError, DTypeError: an operand does not fit.
    """
    for what, tensor, dtype, dims in (
        ("codes", codes, torch.uint8, 2),
        ("scale_codes", scale_codes, torch.uint8, 2),
        ("q_scale_max", q_scale_max, torch.float16, 1),
    ):
        _require(tensor, dtype, dims, f"{name or 'exl2_pack'}: {what}")
    if any(bits < 0 or rows < 0 for bits, rows in groups):
        raise FormatError(f"{name or 'exl2_pack'}: groups {list(groups)[:4]}: bits and rows are positive")
    result = _exl2_empty(groups, codes.shape[1])
    given = Exl2Codes(codes.contiguous(), scale_codes.contiguous(), q_scale_max.contiguous(), list(groups))
    _native.exl2_pack(name, given, _perm(perm, name), result)
    return result._asdict()


def _exl2_parts(tensors: Mapping[str, Tensor], name: str) -> Exl2Parts:
    return Exl2Parts(**{key: _file_tensor(tensors, key, dtype, dims, name) for key, (dtype, dims) in _EXL2.items()})


def _groups(found: Sequence[_native.Exl2Group]) -> list[Exl2Group]:
    return [Exl2Group(group.bits, group.rows) for group in found]


def _exl2_empty(groups: Sequence[tuple[int, int]], columns: int) -> Exl2Parts:
    words = sum(rows // 32 * bits for bits, rows in groups)
    shapes = {
        "q_weight": (words, columns),
        "q_scale": (len(groups), columns // 8),
        "q_scale_max": (len(groups),),
        "q_groups": (2 * len(groups),),
        "q_invperm": (sum(rows for _, rows in groups),),
    }
    return Exl2Parts(**{key: torch.empty(shape, dtype=_EXL2[key][0]) for key, shape in shapes.items()})


# GPTQ


def gptq_check(
    tensors: Mapping[str, Tensor],
    *,
    bits: int = 4,
    zeros: Zeros = "classic",
    group_size: int | None = None,
    name: str = "",
) -> MatrixSize:
    """Check a matrix completely and return its size.

    Args:
        tensors: as for `gptq_dequantize`.
        bits: 2, 3, 4 or 8.
        zeros: "classic" or "v2".
        group_size: as for `gptq_dequantize`.
        name: name of the matrix in messages.

    Raises:
        FormatError: the tensors violate the format, or an option is invalid.
    """
    parts = _gptq_parts(tensors, bits, name)
    size = _native.gptq_check(name, parts, GptqFormat(bits, _is_v2(zeros), _group_size(group_size)))
    return MatrixSize(size.in_features, size.out_features)


def gptq_dequantize(
    tensors: Mapping[str, Tensor],
    *,
    bits: int = 4,
    zeros: Zeros = "classic",
    group_size: int | None = None,
    name: str = "",
) -> Tensor:
    """Return W [K, N] float16, exactly as the format defines it.

    Args:
        tensors: qweight int32 [K bits / 32, N], qzeros int32 [G, N bits / 32], scales [G, N] (float16; float32 and
            bfloat16 are rounded), optional g_idx int32 [K] with the group of each row. A g_idx of zeros counts as none.
        bits: 2, 3, 4 or 8.
        zeros: "classic" stores the zero point minus one, "v2" the zero point.
        group_size: rows of a group. None or -1 takes the smallest power of two that gives the file's number of groups.
        name: name of the matrix in messages.

    Raises:
        FormatError: the tensors violate the format, or an option is invalid.
    """
    out = torch.empty(
        gptq_check(tensors, bits=bits, zeros=zeros, group_size=group_size, name=name), dtype=torch.float16
    )
    parts = _gptq_parts(tensors, bits, name)
    _native.gptq_dequantize(name, parts, GptqFormat(bits, _is_v2(zeros), _group_size(group_size)), out)
    return out


def gptq_quantize(
    weight: Tensor,
    *,
    bits: int = 4,
    group_size: int = 128,
    symmetric: bool = False,
    zeros: Zeros = "classic",
    perm: Tensor | None = None,
    name: str = "",
) -> dict[str, Tensor]:
    """Quantize by round to nearest; return qweight, qzeros, scales, g_idx.

    Args:
        weight: float32, float16 or bfloat16 [out, in], both multiples of 32.
        bits: 2, 3, 4 or 8.
        group_size: rows of a group, -1 for one group.
        symmetric: fix the zero point in the middle.
        zeros: "classic" or "v2".
        perm: int64 [in]; with it (act-order) rows perm[0:group_size] make group 0 and so on.
        name: name of the matrix in messages.

    Raises:
        FormatError: a setting is invalid, or the weight has NaN or infinity.
        ShapeError, DTypeError: an operand does not fit.
    """
    weight = _float_weight(weight, name)
    out_features, in_features = weight.shape
    if group_size == -1:
        group_size = in_features
    if bits not in (2, 3, 4, 8) or group_size < 1 or in_features % 32 or out_features % 32:
        raise FormatError(
            f"{name or 'matrix'}: {bits} bits, group size {group_size}, shape [{out_features}, {in_features}]; "
            "GPTQ has 2, 3, 4 and 8 bits, positive group sizes and sizes in multiples of 32"
        )
    groups = -(-in_features // group_size)
    result = GptqParts(
        qweight=torch.empty((in_features * bits // 32, out_features), dtype=torch.int32),
        qzeros=torch.empty((groups, out_features * bits // 32), dtype=torch.int32),
        scales=torch.empty((groups, out_features), dtype=torch.float16),
        g_idx=torch.empty(in_features, dtype=torch.int32),
    )
    format = GptqFormat(bits, _is_v2(zeros), group_size)
    _native.gptq_quantize(name, weight, format, symmetric=symmetric, perm=_perm(perm, name), parts=result)
    return result._asdict()


def _gptq_parts(tensors: Mapping[str, Tensor], bits: int, name: str) -> GptqParts:
    if bits not in (2, 3, 4, 8):
        raise FormatError(f"{name or 'matrix'}: {bits}-bit GPTQ is not a format; use 2, 3, 4 or 8")
    scales = tensors.get("scales")
    if scales is not None and scales.dtype in (torch.float32, torch.bfloat16):
        tensors = {**tensors, "scales": scales.half()}
    qweight, qzeros, scales = (_file_tensor(tensors, key, dtype, dims, name) for key, (dtype, dims) in _GPTQ.items())
    g_idx = _file_tensor(tensors, "g_idx", torch.int32, 1, name) if tensors.get("g_idx") is not None else None
    return GptqParts(qweight, qzeros, scales, g_idx)


def _is_v2(zeros: Zeros) -> bool:
    if zeros not in ("classic", "v2"):
        raise FormatError(f"zeros {zeros!r} is not a convention; use 'classic' or 'v2'")
    return zeros == "v2"


def _group_size(group_size: int | None) -> int | None:
    if group_size is None or group_size == -1:
        return None
    if group_size < 1:
        raise FormatError(f"group_size {group_size}; expected a positive number of rows, or -1 for one group")
    return group_size


# Checks


def _file_tensor(tensors: Mapping[str, Tensor], key: str, dtype: torch.dtype, dims: int, name: str) -> Tensor:
    """Return a tensor of a file. Raises FormatError, since a violation is a fault of the file."""
    tensor = tensors.get(key)
    if tensor is None:
        raise FormatError(f"{name or 'matrix'}: tensor {key} is missing; found {', '.join(sorted(tensors)) or 'none'}")
    if tensor.dtype != dtype or tensor.dim() != dims or tensor.device.type != "cpu":
        raise FormatError(
            f"{name or 'matrix'}: {key} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; "
            f"expected {dtype} with {dims} dimensions on the CPU"
        )
    return tensor.contiguous()


def _require(tensor: Tensor, dtype: torch.dtype, dims: int, what: str) -> None:
    if tensor.dtype != dtype or tensor.device.type != "cpu":
        raise DTypeError(f"{what} is {tensor.dtype} on {tensor.device}; expected {dtype} on the CPU")
    if tensor.dim() != dims:
        raise ShapeError(f"{what} has shape {list(tensor.shape)}; expected {dims} dimensions")


def _float_weight(weight: Tensor, name: str) -> Tensor:
    if weight.dtype not in _FLOATS or weight.device.type != "cpu":
        raise DTypeError(
            f"{name or 'weight'} is {weight.dtype} on {weight.device}; expected float32, float16 or bfloat16 on the CPU"
        )
    if weight.dim() != 2 or 0 in weight.shape:
        raise ShapeError(f"{name or 'weight'} has shape {list(weight.shape)}; expected [out_features, in_features]")
    return weight.detach().contiguous()


def _perm(perm: Tensor | None, name: str) -> Tensor | None:
    if perm is None:
        return None
    _require(perm, torch.int64, 1, f"{name or 'matrix'}: perm")
    return perm.contiguous()
