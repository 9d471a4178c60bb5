"""Activations of the MLP. Arithmetic is float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from . import _native, cuda_ops
from ._check import require_cpu, require_dtype, require_out
from .errors import ShapeError, UnsupportedError

__all__ = ["ActivationKind", "activation", "gated_activation"]

ActivationKind = Literal["silu", "gelu", "quickgelu", "gelu_erf", "relu2", "sigmoid", "tanh"]
_KINDS = get_args(ActivationKind)


# On a GPU these are torch's operators: rare, and there an element's result does not depend on its place either.
_BY_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_erf": torch.nn.functional.gelu,
    "relu2": lambda x: torch.nn.functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def _like(x: Tensor, result: Tensor, out: Tensor | None) -> Tensor:
    return result.to(x.dtype) if out is None else out.copy_(result)


def activation(x: Tensor, kind: ActivationKind, *, out: Tensor | None = None) -> Tensor:
    """silu(x), gelu(x) in its tanh form, quickgelu(x) = x * sigmoid(1.702 x), gelu_erf(x) in the exact form (error
    below 1e-7 |x|), relu2(x) = max(x, 0)^2, sigmoid(x) or tanh(x).

    x: float32, any shape, on the CPU; on a GPU also float16 or bfloat16. out: like x, may be x itself. Returns out. An
    element's result does not depend on its place. Raises DTypeError, ShapeError, UnsupportedError.
    """
    if x.is_cuda and kind in _BY_TORCH:
        return _like(x, _BY_TORCH[kind](x.float()), out)
    if x.is_cuda:
        return cuda_ops.activation(x, kind, out=out)
    result = torch.empty_like(x) if out is None else out
    try:
        _native.activate(kind, x, None, result)
    except (TypeError, ValueError):
        _check("activation", kind, x)
        result = require_out("activation", out, x)
        _native.activate(kind, x.contiguous(), None, result)
    return result


def gated_activation(gate: Tensor, up: Tensor, kind: ActivationKind, *, out: Tensor | None = None) -> Tensor:
    """activation(gate) * up, elementwise.

    gate, up: of one shape, float32, on a GPU also float16 or bfloat16. out: like gate, may be gate or up itself.
    Returns out. Errors as `activation`.
    """
    if gate.is_cuda and kind in _BY_TORCH:
        return _like(gate, _BY_TORCH[kind](gate.float()) * up.float(), out)
    if gate.is_cuda:
        return cuda_ops.gated_activation(gate, up, kind, out=out)
    result = torch.empty_like(gate) if out is None else out
    try:
        _native.activate(kind, gate, up, result)
    except (TypeError, ValueError):
        _check("gated_activation", kind, gate, up)
        if gate.shape != up.shape:
            text = f"gated_activation: gate {tuple(gate.shape)} and up {tuple(up.shape)} differ in shape"
            raise ShapeError(text) from None
        result = require_out("gated_activation", out, gate)
        _native.activate(kind, gate.contiguous(), up.contiguous(), result)
    return result


def _check(what: str, kind: str, *inputs: Tensor) -> None:
    require_cpu(what, *inputs)
    for x in inputs:
        require_dtype(f"{what}: input", x, torch.float32)
    if kind not in _KINDS:
        raise UnsupportedError(f"{what}: unknown kind {kind!r}, expected one of {', '.join(_KINDS)}")
