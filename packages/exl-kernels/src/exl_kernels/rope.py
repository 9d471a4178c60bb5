"""Rotary position embedding, in place. Arithmetic is float32; tables stay float32."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native, cuda_ops
from ._check import require_cpu, require_dtype
from .errors import ShapeError

__all__ = ["apply_rope"]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first R dimensions of every head of x in place; the other D - R dimensions stay.

    The pairs are (i, i + R/2) (NeoX), or (2i, 2i + 1) (GPT-J) if `interleaved`.

    Args:
        x: [T, H, D], contiguous, float32, on a GPU also float16 or bfloat16.
        cos: float32 [S, R/2], R even and at most D.
        sin: like cos.
        positions: int64 [T], rows of the tables.
        interleaved: rotate neighbouring dimensions.

    Returns:
        x.

    Raises:
        ShapeError: shapes do not fit, or, on the CPU, a position is outside the tables.
        DTypeError: an element type is not supported.
        UnsupportedError: x is neither on the CPU nor on a CUDA device.
    """
    if x.is_cuda:
        return cuda_ops.apply_rope(x, cos, sin, positions, interleaved=interleaved)
    try:
        _native.apply_rope(x, cos=cos, sin=sin, positions=positions, interleaved=interleaved)
    except (TypeError, ValueError):
        _check(x, cos, sin, positions)
        _native.apply_rope(
            x,
            cos=cos.contiguous(),
            sin=sin.contiguous(),
            positions=positions.contiguous(),
            interleaved=interleaved,
        )
    return x


def _check(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    require_cpu("apply_rope", x, cos, sin, positions)
    require_dtype("apply_rope: x", x, torch.float32)
    require_dtype("apply_rope: cos", cos, torch.float32)
    require_dtype("apply_rope: sin", sin, torch.float32)
    require_dtype("apply_rope: positions", positions, torch.int64)
    if x.dim() != 3 or not x.is_contiguous():
        raise ShapeError(f"apply_rope: x is {tuple(x.shape)}, expected contiguous [tokens, heads, head_dim]")
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[2]:
        raise ShapeError(
            f"apply_rope: cos {tuple(cos.shape)} and sin {tuple(sin.shape)}, "
            f"expected both [S, R/2] with R <= {x.shape[2]}"
        )
    if positions.shape != x.shape[:1]:
        raise ShapeError(f"apply_rope: positions {tuple(positions.shape)}, expected ({x.shape[0]},)")
