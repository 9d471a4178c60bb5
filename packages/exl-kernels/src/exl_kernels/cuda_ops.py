"""CUDA implementations of the elementary operators; `norm`, `rope` and `activation` call them when `x.is_cuda`.

Every function launches on torch's current stream of the tensors' GPU and returns at once; inside `torch.cuda.graph` the
launch is captured. Arithmetic is FP32, and results are rounded once to the dtype of the activations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exl_kernels import _native
from exl_kernels.device import launch_of
from exl_kernels.errors import DTypeError, ShapeError, UnsupportedError
from exl_kernels.selection import FUSED_ACTIVATIONS

__all__ = ["activation", "apply_rope", "gated_activation", "layer_norm", "read_all", "rms_norm"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def stream_of(x: Tensor) -> int:
    """Return the driver's handle of the current stream of the GPU that holds `x`."""
    # torch.compile's launchers do the same: building a Stream object is slow on the host.
    return int(torch._C._cuda_getCurrentRawStream(x.get_device()))


def launch_on(x: Tensor) -> _native.Launch:
    """Return the launch settings of the current stream of the GPU that holds `x`."""
    return launch_of(torch._C._cuda_getCurrentRawStream(x.get_device()))


def check_operand(name: str, t: Tensor, like: Tensor | None = None) -> None:
    """Raise DTypeError or ShapeError unless a tensor is contiguous, floating-point, and on a GPU (that of `like`)."""
    if not t.is_cuda:
        raise DTypeError(f"{name} is on {t.device}: expected a CUDA tensor")
    if like is not None and t.device != like.device:
        raise DTypeError(f"{name} is on {t.device}, the other operands are on {like.device}: move it with .to()")
    if t.dtype not in _FLOATS:
        raise DTypeError(f"{name} has dtype {t.dtype}: expected float16, bfloat16 or float32")
    if not t.is_contiguous():
        raise ShapeError(f"{name} is not contiguous (strides {tuple(t.stride())}): call .contiguous()")


def _output(out: Tensor | None, like: Tensor) -> Tensor:
    if out is None:
        return torch.empty_like(like)
    check_operand("out", out, like)
    if out.shape != like.shape or out.dtype != like.dtype:
        raise ShapeError(
            f"out is {tuple(out.shape)} {out.dtype}: expected {tuple(like.shape)} {like.dtype}, as the activations"
        )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0, out: Tensor | None = None) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension.

    Args:
        x: [.., D], float16, bfloat16 or float32, on a GPU.
        weight: [D], or [H, D] for a norm per head of x [.., H, D]; any of the three dtypes.
        eps: added to the mean square.
        weight_offset: 1.0 for models that store weight - 1.
        out: like x; may be x itself.

    Raises:
        DTypeError, ShapeError: an operand does not fit.
        DeviceError: the launch failed, or CUDA cannot be used.
    """
    _check_norm(x, weight)
    out = _output(out, x)
    if x.numel():
        _native.cuda_rms_norm(x, weight=weight, out=out, eps=eps, weight_offset=weight_offset, launch=launch_on(x))
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Compute (x - mean) / sqrt(var + eps) * weight + bias over the last dimension; errors as for `rms_norm`.

    `bias` has the shape of the weight or is None. Weight and bias of different dtypes are converted to float32.
    """
    _check_norm(x, weight)
    if bias is not None:
        check_operand("bias", bias, x)
        if bias.shape != weight.shape:
            raise ShapeError(f"bias is {tuple(bias.shape)}: expected {tuple(weight.shape)}, as the weight")
        if bias.dtype != weight.dtype:
            weight, bias = weight.float(), bias.float()
    out = _output(out, x)
    if x.numel():
        _native.cuda_layer_norm(x, weight=weight, bias=bias, out=out, eps=eps, launch=launch_on(x))
    return out


def _check_norm(x: Tensor, weight: Tensor) -> None:
    check_operand("x", x)
    check_operand("weight", weight, x)
    if weight.dim() not in (1, 2) or x.dim() < weight.dim() or x.shape[-weight.dim() :] != weight.shape:
        raise ShapeError(
            f"weight is {tuple(weight.shape)}: expected the last one or two dimensions of x {tuple(x.shape)}"
        )


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first R dimensions of each head of x [T, H, D] in place and return x.

    Args:
        x: [T, H, D], float16, bfloat16 or float32, on a GPU.
        cos: [S, R/2] float32; R <= D.
        sin: like cos.
        positions: [T] int64. A position outside 0..S-1 leaves its token unchanged: detecting it would take a read-back.
        interleaved: pairs are (2i, 2i + 1) rather than (i, i + R/2).
    """
    check_operand("x", x)
    for name, table in (("cos", cos), ("sin", sin)):
        check_operand(name, table, x)
        if table.dim() != 2 or table.dtype != torch.float32 or table.shape != cos.shape:
            raise ShapeError(
                f"{name} is {tuple(table.shape)} {table.dtype}: expected float32 [S, R/2], cos and sin alike"
            )
    if x.dim() != 3 or 2 * cos.shape[1] > x.shape[2]:
        raise ShapeError(f"x is {tuple(x.shape)}: expected [T, H, D] with D >= R = {2 * cos.shape[1]}")
    if positions.device != x.device or positions.dtype != torch.int64:
        raise DTypeError(f"positions is {positions.dtype} on {positions.device}: expected int64 on {x.device}")
    if positions.shape != x.shape[:1] or not positions.is_contiguous():
        raise ShapeError(f"positions is {tuple(positions.shape)}: expected contiguous [{x.shape[0]}]")
    if x.numel() and cos.numel():
        _native.cuda_rope(x, cos=cos, sin=sin, positions=positions, interleaved=interleaved, launch=launch_on(x))
    return x


def gated_activation(gate: Tensor, up: Tensor, kind: str, *, out: Tensor | None = None) -> Tensor:
    """Compute f(gate) * up elementwise; `kind` is "silu", "gelu" (tanh form) or "quickgelu". out may be gate or up."""
    _check_kind(kind)
    check_operand("gate", gate)
    check_operand("up", up, gate)
    if up.shape != gate.shape or up.dtype != gate.dtype:
        raise ShapeError(f"up is {tuple(up.shape)} {up.dtype}: expected {tuple(gate.shape)} {gate.dtype}, as gate")
    out = _output(out, gate)
    _native.cuda_activation(gate, up=up, out=out, kind=kind, launch=launch_on(gate))
    return out


def activation(x: Tensor, kind: str, *, out: Tensor | None = None) -> Tensor:
    """Compute f(x), elementwise; `kind` is "silu", "gelu" (tanh approximation) or "quickgelu". `out` may be x."""
    _check_kind(kind)
    check_operand("x", x)
    out = _output(out, x)
    _native.cuda_activation(x, up=None, out=out, kind=kind, launch=launch_on(x))
    return out


def softcap(x: Tensor, cap: float) -> Tensor:
    """Compute cap * tanh(x / cap) in place; x is float32."""
    check_operand("x", x)
    if x.dtype != torch.float32:
        raise DTypeError(f"softcap: x has dtype {x.dtype}: expected float32")
    _native.cuda_softcap(x, cap, launch_on(x))
    return x


def read_all(buffer: Tensor, sink: Tensor) -> None:
    """Read all of a buffer, to measure the read bandwidth of a GPU.

    Args:
        buffer: any dtype, contiguous; a multiple of 16 bytes.
        sink: uint8, at least 4 elements on the same GPU; its content afterwards means nothing.
    """
    _native.cuda_probe_read(buffer, sink, stream_of(buffer))


def _check_kind(kind: str) -> None:
    if kind not in FUSED_ACTIVATIONS:
        raise UnsupportedError(f"unknown activation {kind!r}, expected one of {', '.join(FUSED_ACTIVATIONS)}")
