"""RMSNorm and LayerNorm over the last dimension, also per head. Arithmetic is float32.

The native functions reject operands that they cannot take directly. Only then does Python convert the operands
(strides, half weights) or say what is wrong with them, so the common call crosses into native code once. The other
operators do the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native, cuda_ops
from ._check import require_cpu, require_dtype, require_out
from .errors import ShapeError

__all__ = ["layer_norm", "rms_norm"]

_WEIGHTS = (torch.float32, torch.float16, torch.bfloat16)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0, out: Tensor | None = None) -> Tensor:
    """Compute x * (weight + weight_offset) / sqrt(mean(x^2) + eps) over the last dimension.

    Args:
        x: [..., D], or [..., H, D] with a weight [H, D]; float32, on a GPU also float16 or bfloat16.
        weight: [D], or [H, D] for one norm a head; float32 (fastest), float16 or bfloat16.
        eps: added to the mean square.
        weight_offset: added to the weight in float32 (1 for Gemma).
        out: like x, may be x itself.

    Returns:
        `out`, or a new tensor.

    Raises:
        ShapeError: the weight or out does not fit x.
        DTypeError: an element type is not supported.
        UnsupportedError: x is neither on the CPU nor on a CUDA device.
    """
    if x.is_cuda:
        return cuda_ops.rms_norm(x, weight, eps, weight_offset=weight_offset, out=out)
    result = torch.empty_like(x) if out is None else out
    try:
        _native.rms_norm(x, weight=weight, offset=weight_offset, eps=eps, out=result)
    except (TypeError, ValueError):
        _check("rms_norm", x, weight, None)
        result = require_out("rms_norm", out, x)
        _native.rms_norm(x.contiguous(), weight=_float32(weight), offset=weight_offset, eps=eps, out=result)
    return result


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Compute (x - mean) * weight / sqrt(mean((x - mean)^2) + eps) + bias over the last dimension.

    Args:
        x: as for `rms_norm`.
        weight: as for `rms_norm`.
        bias: like the weight, or None.
        eps: added to the variance.
        out: like x, may be x itself.

    Returns:
        `out`, or a new tensor.

    Raises:
        ShapeError: the weight, bias or out does not fit x.
        DTypeError: an element type is not supported.
        UnsupportedError: x is neither on the CPU nor on a CUDA device.
    """
    if x.is_cuda:
        return cuda_ops.layer_norm(x, weight, bias, eps, out=out)
    result = torch.empty_like(x) if out is None else out
    try:
        _native.layer_norm(x, weight=weight, bias=bias, eps=eps, out=result)
    except (TypeError, ValueError):
        _check("layer_norm", x, weight, bias)
        result = require_out("layer_norm", out, x)
        b = None if bias is None else _float32(bias)
        _native.layer_norm(x.contiguous(), weight=_float32(weight), bias=b, eps=eps, out=result)
    return result


def _float32(weight: Tensor) -> Tensor:
    return weight.to(torch.float32).contiguous()


def _check(what: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    require_cpu(what, x, weight, bias)
    require_dtype(f"{what}: x", x, torch.float32)
    require_dtype(f"{what}: weight", weight, *_WEIGHTS)
    if weight.dim() not in (1, 2) or x.dim() < weight.dim() or x.shape[-weight.dim() :] != weight.shape:
        raise ShapeError(
            f"{what}: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}; "
            "expected x's last one or two dimensions"
        )
    if bias is not None:
        require_dtype(f"{what}: bias", bias, *_WEIGHTS)
        if bias.shape != weight.shape:
            raise ShapeError(f"{what}: bias {tuple(bias.shape)}, expected the weight's {tuple(weight.shape)}")
