"""Twin of `exl_kernels.rope`."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_rope"]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first R dimensions of each head of x [T, H, D] by table rows `positions` [T]; returns a new tensor."""
    half = cos.shape[1]
    c = cos[positions].to(x.dtype)[:, None, :]
    s = sin[positions].to(x.dtype)[:, None, :]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    a, b = first * c - second * s, second * c + first * s
    rotated = torch.stack((a, b), dim=-1).flatten(-2) if interleaved else torch.cat((a, b), dim=-1)
    return torch.cat((rotated, x[..., 2 * half :]), dim=-1)
