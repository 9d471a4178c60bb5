"""Argument checks of the operators' entry points: typed errors with the argument, its value and the expected one."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import DTypeError, ShapeError, UnsupportedError
from .selection import HEAD_DIM_STEP, MAX_HEAD_DIM

__all__ = ["require_cpu", "require_dtype", "require_gpu_head_dim", "require_out", "require_shape"]


def require_cpu(what: str, *tensors: Tensor | None) -> None:
    """Raise UnsupportedError for a tensor that is not in CPU memory."""
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "cpu":
            raise UnsupportedError(
                f"{what}: a tensor is on {tensor.device}; this operator runs on the CPU only, move it with .cpu()"
            )


def require_dtype(what: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Raise DTypeError unless the element type of `tensor` is one of `dtypes`."""
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise DTypeError(f"{what}: dtype {str(tensor.dtype).removeprefix('torch.')}, expected {wanted}")


def require_shape(what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ShapeError unless `tensor` has exactly `shape`."""
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{what}: shape {tuple(tensor.shape)}, expected {shape}")


def require_gpu_head_dim(what: str, head_dim: int) -> None:
    """Raise ShapeError unless attention on a GPU takes heads of `head_dim` dimensions."""
    if head_dim % HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM:
        raise ShapeError(
            f"{what}: head_dim {head_dim}; on a GPU it must be a multiple of {HEAD_DIM_STEP}, at most {MAX_HEAD_DIM}"
        )


def require_out(what: str, out: Tensor | None, like: Tensor) -> Tensor:
    """Return the output tensor: `out` after checks, or a new tensor like `like`. Raises ShapeError."""
    if out is None:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if out.shape != like.shape or out.dtype != like.dtype or out.device != like.device or not out.is_contiguous():
        raise ShapeError(
            f"{what}: out is {tuple(out.shape)} {out.dtype} on {out.device}, "
            f"expected contiguous {tuple(like.shape)} {like.dtype} on {like.device}"
        )
    return out
