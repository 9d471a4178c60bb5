"""Twins of `exl_kernels.activation`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["activation", "gated_activation"]


def activation(x: Tensor, kind: str) -> Tensor:
    """Apply the function called `kind` to x, in x's precision."""
    if kind == "silu":
        return x * torch.sigmoid(x)
    if kind == "gelu":
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1.0 + torch.tanh(inner))
    if kind == "quickgelu":
        return x * torch.sigmoid(1.702 * x)
    if kind == "gelu_erf":
        return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))
    if kind == "relu2":
        return x.clamp(min=0.0) ** 2
    if kind == "sigmoid":
        return torch.sigmoid(x)
    if kind == "tanh":
        return torch.tanh(x)
    raise ValueError(f"unknown activation {kind!r}")


def gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """Compute activation(gate) * up, in gate's precision."""
    return activation(gate, kind) * up
