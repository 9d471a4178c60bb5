"""Twins of `exl_kernels.norm`."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["layer_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """Compute x * (weight + weight_offset) / sqrt(mean(x^2) + eps) over the last dimension, in x's precision."""
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale * (weight.to(x.dtype) + weight_offset)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Compute (x - mean) * weight / sqrt(var + eps) + bias over the last dimension, in x's precision."""
    centred = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = centred * scale * weight.to(x.dtype)
    return y if bias is None else y + bias.to(x.dtype)
