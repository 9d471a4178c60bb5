"""Launches that join the elementwise operators between two matmuls of a layer, with bitwise identical results.

Each is bitwise identical to the composition of the operators in `norm`, `rope` and `kv`, which also run on the CPU.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from . import _native
from ._check import require_gpu_head_dim, require_shape
from .attention.cuda import flat_rows
from .cuda_ops import check_operand, launch_on, stream_of
from .device import launch_of
from .errors import DTypeError, ShapeError, UnsupportedError
from .kv import KVPages, store_kv
from .linear.fused import FusedNorm
from .linear.matmul_input import MatmulInput
from .norm import rms_norm
from .rope import apply_rope
from .selection import LIMITS

__all__ = ["add_post_norm", "add_rms_norm", "embed", "layer_norm_packed", "norm_parts", "rope_store"]

_DTYPES = {"float16": torch.float16, "float32": torch.float32}


def embed(
    table: Tensor, ids: Tensor, *, factor: float = 1.0, dtype: Literal["float16", "float32"] = "float16"
) -> Tensor:
    """Gather rows of an embedding table, multiplied by `factor` in float32.

    Args:
        table: [rows, D], any float type.
        ids: int64 [T]; an id outside the table reads the nearest row.
        factor: scale of the embeddings.
        dtype: element type of the result on a GPU; on the CPU it is always float32.

    Returns:
        [T, D], multiplied in float32 and rounded once.

    Raises:
        DTypeError, ShapeError: an operand does not fit.
    """
    if not table.is_cuda:
        rows = table[ids.clamp(0, table.shape[0] - 1)].float()
        return rows if factor == 1.0 else rows * factor
    check_operand("embed: table", table)
    if ids.dtype != torch.int64 or ids.device != table.device:
        raise DTypeError(f"embed: ids are {ids.dtype} on {ids.device}, expected int64 on {table.device}")
    if table.dim() != 2 or ids.dim() != 1:
        raise ShapeError(f"embed: table {tuple(table.shape)}, ids {tuple(ids.shape)}; expected [rows, D] and [T]")
    out = torch.empty((ids.shape[0], table.shape[1]), dtype=_DTYPES[dtype], device=table.device)
    if out.numel():
        _native.cuda_embed(table, ids=ids.contiguous(), out=out, factor=factor, launch=launch_on(table))
    return out


def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0, out: Tensor | None = None
) -> Tensor:
    """Add y to x in place, rounded to its type, and return `rms_norm` of x.

    Args:
        x: [..., D], contiguous; changed in place.
        y: like x.
        weight: float32 [D].
        eps: added to the mean square.
        weight_offset: added to the weight.
        out: like x, or None for a new tensor.

    Raises:
        DTypeError, ShapeError, UnsupportedError: as `rms_norm`.
    """
    require_shape("add_rms_norm: y", y, tuple(x.shape))
    if not x.is_cuda:
        return rms_norm(x.add_(y), weight, eps, weight_offset=weight_offset, out=out)
    out = torch.empty_like(x) if out is None else out
    for name, operand in (("x", x), ("y", y), ("out", out), ("weight", weight)):
        check_operand(f"add_rms_norm: {name}", operand, x)
    if weight.dtype != torch.float32 or weight.shape != x.shape[-1:]:
        raise ShapeError(f"add_rms_norm: weight {tuple(weight.shape)} {weight.dtype}, expected float32 {x.shape[-1:]}")
    if y.dtype != x.dtype or out.dtype != x.dtype:
        raise DTypeError(f"add_rms_norm: x is {x.dtype}, y {y.dtype}, out {out.dtype}; expected one type")
    if x.numel():
        _native.cuda_add_rms_norm(
            x, y=y, weight=weight, out=out, eps=eps, weight_offset=weight_offset, launch=launch_on(x)
        )
    return out


def add_post_norm(
    x: Tensor,
    y: Tensor,
    post: FusedNorm | None,
    norm: FusedNorm | None,
    *,
    out: Tensor | None = None,
    into: MatmulInput | None = None,
) -> Tensor | None:
    """Add post(y) to x in place, in the type of x, and return norm(x) in the type of y, or None without `norm`.

    Args:
        x: [T, D] float16 or float32, contiguous; changed in place.
        y: [T, D] float16, on the CPU float32, contiguous.
        post: norm of y, or None.
        norm: norm of the sum, or None.
        out: like y, or None for a new tensor.
        into: on a GPU, norm(x) goes there instead, packed; T is at most its columns. The function returns its scratch.

    Raises:
        DTypeError, ShapeError: an operand does not fit.
        UnsupportedError: `into` without `norm`, with `out`, or on the CPU.
    """
    require_shape("add_post_norm: y", y, tuple(x.shape))
    if into is not None and (norm is None or out is not None or not x.is_cuda):
        raise UnsupportedError("add_post_norm: into needs a norm and a GPU, and takes the place of out")
    if not x.is_cuda:
        x += y if post is None else rms_norm(y.to(x.dtype), post.weight, post.eps, weight_offset=post.offset)
        return None if norm is None else rms_norm(x, norm.weight, norm.eps, weight_offset=norm.offset, out=out)
    if x.dim() != 2 or x.dtype not in (torch.float16, torch.float32) or y.dtype != torch.float16:
        raise DTypeError(f"add_post_norm: x is {x.dtype} of {x.dim()} dimensions, y {y.dtype}; expected two, half y")
    if norm is not None and into is None and out is None:
        out = torch.empty_like(y)
    for name, operand in (("x", x), ("y", y), ("out", out)):
        if operand is not None:
            check_operand(f"add_post_norm: {name}", operand, x)
    if out is not None and (out.dtype != y.dtype or out.shape != x.shape):
        raise ShapeError(f"add_post_norm: out {tuple(out.shape)} {out.dtype}; expected {tuple(x.shape)} {y.dtype}")
    norms = []
    for name, one in (("post", post), ("norm", norm)):
        if one is not None and (one.weight.dtype != torch.float32 or one.weight.shape != x.shape[1:]):
            raise ShapeError(
                f"add_post_norm: weight of {name} {tuple(one.weight.shape)}, expected float32 [{x.shape[1]}]"
            )
        norms.append(None if one is None else _native.NormPrologue(one.weight, one.eps, one.offset))
    if into is not None:
        _check_packs("add_post_norm", into, x)
        packed = into.native()
        _native.cuda_add_post_norm(x, y=y, post=norms[0], norm=norms[1], into=packed, launch=launch_on(x))
        return into.scratch
    if x.numel():
        _native.cuda_add_post_norm(x, y=y, post=norms[0], norm=norms[1], out=out, launch=launch_on(x))
    return out


def norm_parts(x: Tensor, first: Tensor, second: Tensor, eps: float) -> Tensor:
    """Compute `norm.rms_norm` of two parts of each row, in place.

    Args:
        x: [T, D] float16, on the CPU float32, contiguous; a row begins with the parts.
        first: float32 [E], the weight of the first E elements.
        second: float32 [F], the weight of the next F elements.
        eps: added to the mean squares.

    Returns:
        x.

    Raises:
        DTypeError, ShapeError: an operand does not fit.
    """
    expected = torch.float16 if x.is_cuda else torch.float32
    if x.dtype != expected or x.dim() != 2:
        raise DTypeError(f"norm_parts: x is {x.dtype} of {x.dim()} dimensions, expected {expected} of two")
    for name, one in (("first", first), ("second", second)):
        if one.dtype != torch.float32 or one.dim() != 1:
            raise ShapeError(f"norm_parts: {name} is {one.dtype} {tuple(one.shape)}; expected float32 of one dimension")
    if not (first.shape[0] and second.shape[0]) or first.shape[0] + second.shape[0] > x.shape[1]:
        raise ShapeError(f"norm_parts: rows of {x.shape[1]} for parts of {first.shape[0]} and {second.shape[0]}")
    if not x.is_cuda:
        for begin, weight in ((0, first), (len(first), second)):
            part = x[:, begin : begin + len(weight)]
            part.copy_(rms_norm(part.contiguous(), weight, eps))
        return x
    check_operand("norm_parts: x", x)
    if x.numel():
        _native.cuda_rms_norm_parts(x, first=first, second=second, eps=eps, launch=launch_on(x))
    return x


def layer_norm_packed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, into: MatmulInput) -> Tensor:
    """Compute `norm.layer_norm` of x, packed as the input of a matmul, on a GPU.

    Args:
        x: [T, D] float16, contiguous; T at most the columns of `into`.
        weight: float32 [D].
        bias: like weight, or None.
        eps: added to the variance.
        into: the packed input.

    Returns:
        The scratch memory of `into`.

    Raises:
        DTypeError, ShapeError: an operand does not fit.
    """
    check_operand("layer_norm_packed: x", x)
    if x.dim() != 2:
        raise ShapeError(f"layer_norm_packed: x is {tuple(x.shape)}, expected [T, D]")
    if x.dtype != torch.float16:
        raise DTypeError(f"layer_norm_packed: x is {x.dtype}, expected float16")
    for name, one in (("weight", weight), ("bias", bias)):
        if one is None:
            continue
        check_operand(f"layer_norm_packed: {name}", one, x)
        if one.dtype != torch.float32 or one.shape != x.shape[1:]:
            raise ShapeError(
                f"layer_norm_packed: {name} is {one.dtype} {tuple(one.shape)}; expected float32 [{x.shape[-1]}]"
            )
    _check_packs("layer_norm_packed", into, x)
    try:
        packed = into.native()
        _native.cuda_layer_norm_packed(x, weight=weight, bias=bias, eps=eps, into=packed, launch=launch_on(x))
    except ValueError as error:
        raise ShapeError(
            f"layer_norm_packed: x is {tuple(x.shape)}, into has {into.columns} columns and "
            f"{into.scratch.numel()} bytes: {error}; use the result of FusedLinear.input_of"
        ) from None
    return into.scratch


def _check_packs(what: str, into: MatmulInput, x: Tensor) -> None:
    rows, width = x.shape
    if not 1 <= rows <= into.columns or into.matrix.in_features != width or width > LIMITS.most_packed_width:
        raise ShapeError(
            f"{what}: x is {tuple(x.shape)}, into has {into.columns} columns of {into.matrix.in_features} "
            f"features; expected 1 to {into.columns} rows of as many features, at most {LIMITS.most_packed_width}"
        )
    if x.data_ptr() % 16:
        raise ShapeError(f"{what}: x begins at {x.data_ptr():#x}; rows that are packed are aligned to 16 bytes")


def rope_store(
    pages: KVPages,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotation: _native.Rotation,
    slots: Tensor,
) -> None:
    """Rotate q and k in place (`apply_rope`), then store k and v (`store_kv`).

    On a GPU the kernel reads the slots and the rotation's tensors before the preceding launches have ended, as with
    `early` of `attend_own`. These tensors must have been written before those launches began. A copy that the host has
    waited for is such a write, and so is work before the launch of the captured graph that contains this call.

    Args:
        pages: keys and values of one layer.
        q: [T, Hq, D]. On a GPU q, k and v may be views of wider rows, such as those of one fused matmul.
        k: [T, H, D], on a GPU with the same stride between tokens as v.
        v: [T, H, D].
        rotation: its tensors are those of `apply_rope`.
        slots: as for `store_kv`.

    Raises:
        ShapeError, DTypeError, UnsupportedError: an operand does not fit.
    """
    if not q.is_cuda:
        for t in (q, k):
            apply_rope(t, rotation.cos, rotation.sin, rotation.positions, interleaved=rotation.interleaved)
        store_kv(pages, k, v, slots)
        return
    for name, operand in (("cos", rotation.cos), ("sin", rotation.sin)):
        check_operand(f"rope_store: {name}", operand, q)
    tokens = slots.shape[0]
    for name, operand, heads in (("q", q, -1), ("k", k, pages.heads), ("v", v, pages.heads)):
        if operand.device != q.device or operand.dtype != q.dtype:
            raise DTypeError(f"rope_store: {name} is {operand.dtype} on {operand.device}, q {q.dtype} on {q.device}")
        require_shape(f"rope_store: {name}", operand, (tokens, q.shape[1] if heads < 0 else heads, pages.head_dim))
    if not tokens:
        return
    if k.stride(0) != v.stride(0) and tokens > 1:
        raise ShapeError(
            f"rope_store: k and v are {k.stride(0)} and {v.stride(0)} elements a token apart; use one stride"
        )
    if pages.device != q.device:
        raise DTypeError(f"rope_store: q is on {q.device}, the pages are on {pages.device}; use one device")
    require_gpu_head_dim("rope_store", pages.head_dim)
    try:
        (flat_q, q_stride), (flat_k, stride), (flat_v, _) = (
            flat_rows("rope_store", name, t) for name, t in (("q", q), ("k", k), ("v", v))
        )
        new_keys = _native.NewKeys(key=flat_k, value=flat_v, stride=stride, rotation=rotation, slots=slots, early=True)
        launch = launch_of(stream_of(q))
        _native.cuda_rope_store(
            pages.native_cuda(), flat_q, q_stride=q_stride, q_heads=q.shape[1], new_keys=new_keys, launch=launch
        )
    except ValueError as error:
        raise ShapeError(f"rope_store: {error}") from None
