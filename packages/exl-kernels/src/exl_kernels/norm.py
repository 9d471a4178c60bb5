"""RMSNorm and LayerNorm over the last dimension, also per head. Arithmetic is float32.

The native functions refuse what they cannot take as it is; only then does Python look closer, to convert (strides, half
weights) or to say what is wrong. So the common call costs one crossing. The other operators do the same.
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
    """x * (weight + weight_offset) / sqrt(mean(x^2) + eps) over the last dimension.

    x: [..., D], or [..., H, D] with a weight [H, D] (one norm a head); float32, on a GPU also float16 or bfloat16.
    weight: [D] or [H, D], float32 (fastest), float16 or bfloat16; weight_offset is added in float32 (Gemma: 1). out:
    like x, may be x itself. Returns out. Raises ShapeError, DTypeError, UnsupportedError (neither CPU nor CUDA).
    """
    if x.is_cuda:
        return cuda_ops.rms_norm(x, weight, eps, weight_offset=weight_offset, out=out)
    result = torch.empty_like(x) if out is None else out
    try:
        _native.rms_norm(x, weight, weight_offset, eps, result)
    except (TypeError, ValueError):
        _check("rms_norm", x, weight, None)
        result = require_out("rms_norm", out, x)
        _native.rms_norm(x.contiguous(), _float32(weight), weight_offset, eps, result)
    return result


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, out: Tensor | None = None) -> Tensor:
    """(x - mean) * weight / sqrt(mean((x - mean)^2) + eps) + bias over the last dimension.

    Shapes, dtypes and errors as `rms_norm`; bias has the weight's shape or is None.
    """
    if x.is_cuda:
        return cuda_ops.layer_norm(x, weight, bias, eps, out=out)
    result = torch.empty_like(x) if out is None else out
    try:
        _native.layer_norm(x, weight, bias, eps, result)
    except (TypeError, ValueError):
        _check("layer_norm", x, weight, bias)
        result = require_out("layer_norm", out, x)
        b = None if bias is None else _float32(bias)
        _native.layer_norm(x.contiguous(), _float32(weight), b, eps, result)
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
