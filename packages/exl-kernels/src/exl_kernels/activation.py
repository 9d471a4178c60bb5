"""Activations of the MLP. Arithmetic is float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from . import _native, cuda_ops
from ._check import require_cpu, require_dtype, require_out
from .errors import ShapeError, UnsupportedError

__all__ = ["ActivationKind", "activation", "gated_activation", "softcap"]

ActivationKind = Literal["silu", "gelu", "quickgelu", "gelu_erf", "relu2", "sigmoid", "tanh"]
_KINDS = get_args(ActivationKind)


# On a GPU these kinds are torch's operators: they are rare, and torch computes each element independently, too.
_BY_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_erf": torch.nn.functional.gelu,
    "relu2": lambda x: torch.nn.functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def _like(x: Tensor, result: Tensor, out: Tensor | None) -> Tensor:
    return result.to(x.dtype) if out is None else out.copy_(result)


def activation(x: Tensor, kind: ActivationKind, *, out: Tensor | None = None) -> Tensor:
    """Apply an activation function elementwise. An element's result does not depend on its place in the tensor.

    Args:
        x: float32, any shape; on a GPU also float16 or bfloat16.
        kind: "silu", "gelu" (tanh form), "quickgelu" (x * sigmoid(1.702 x)), "gelu_erf" (exact form, error below
            1e-7 |x|), "relu2" (max(x, 0)^2), "sigmoid" or "tanh".
        out: like x, may be x itself.

    Returns:
        `out`, or a new tensor.

    Raises:
        DTypeError: an element type is not supported.
        ShapeError: out does not fit x.
        UnsupportedError: the kind is unknown, or x is neither on the CPU nor on a CUDA device.
    """
    if x.is_cuda and kind in _BY_TORCH:
        return _like(x, _BY_TORCH[kind](x.float()), out)
    if x.is_cuda:
        return cuda_ops.activation(x, kind, out=out)
    result = torch.empty_like(x) if out is None else out
    try:
        _native.activate(kind, x, up=None, out=result)
    except (TypeError, ValueError):
        _check("activation", kind, x)
        result = require_out("activation", out, x)
        _native.activate(kind, x.contiguous(), up=None, out=result)
    return result


def softcap(x: Tensor, cap: float) -> Tensor:
    """Compute cap * tanh(x / cap) elementwise, in place.

    Args:
        x: float32, contiguous, on the CPU or a GPU.
        cap: bound of the results, positive.

    Returns:
        x.

    Raises:
        DTypeError: x is not float32.
        ShapeError: x is not contiguous.
        UnsupportedError: the cap is not positive, or x is neither on the CPU nor on a CUDA device.
    """
    if not cap > 0.0:
        raise UnsupportedError(f"softcap: cap is {cap}; expected a positive number")
    if x.is_cuda:
        return cuda_ops.softcap(x, cap)
    require_cpu("softcap", x)
    require_dtype("softcap: x", x, torch.float32)
    if not x.is_contiguous():
        raise ShapeError(f"softcap: x {tuple(x.shape)} has strides {x.stride()}; expected a contiguous tensor")
    return activation(x.div_(cap), "tanh", out=x).mul_(cap)


def gated_activation(gate: Tensor, up: Tensor, kind: ActivationKind, *, out: Tensor | None = None) -> Tensor:
    """Compute activation(gate) * up, elementwise.

    Args:
        gate: float32, on a GPU also float16 or bfloat16.
        up: like gate.
        kind: as for `activation`.
        out: like gate, may be gate or up itself.

    Returns:
        `out`, or a new tensor.

    Raises:
        DTypeError: an element type is not supported.
        ShapeError: shapes differ.
        UnsupportedError: the kind is unknown, or gate is neither on the CPU nor on a CUDA device.
    """
    if gate.is_cuda and kind in _BY_TORCH:
        return _like(gate, _BY_TORCH[kind](gate.float()) * up.float(), out)
    if gate.is_cuda:
        return cuda_ops.gated_activation(gate, up, kind, out=out)
    result = torch.empty_like(gate) if out is None else out
    try:
        _native.activate(kind, gate, up=up, out=result)
    except (TypeError, ValueError):
        _check("gated_activation", kind, gate, up)
        if gate.shape != up.shape:
            text = f"gated_activation: gate {tuple(gate.shape)} and up {tuple(up.shape)} differ in shape"
            raise ShapeError(text) from None
        result = require_out("gated_activation", out, gate)
        _native.activate(kind, gate.contiguous(), up=up.contiguous(), out=result)
    return result


def _check(what: str, kind: str, *inputs: Tensor) -> None:
    require_cpu(what, *inputs)
    for x in inputs:
        require_dtype(f"{what}: input", x, torch.float32)
    if kind not in _KINDS:
        raise UnsupportedError(f"{what}: unknown kind {kind!r}, expected one of {', '.join(_KINDS)}")
