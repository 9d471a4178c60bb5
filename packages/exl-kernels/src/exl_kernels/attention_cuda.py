"""Attention and cache pages on a GPU; `attention` and `kv` come here when their tensors are there.

Halves enter the matrix products (queries and softmax weights are rounded to half, Hadamard codes times their scale
too), sums and softmax are float32. The order of arithmetic depends on a token's own position only
(kernels/attention.cuh): a token's result is the same to the bit alone or in a batch, in any chunking and at any page
placement, and the two kernels (one for few tokens, one for many) give the same bits, so that no setting is needed.

Nothing is read back from the GPU: what the CPU refuses (slots, rows, positions, page numbers out of range) is passed
over here: such slots are not stored and load as zeros, such rows see nothing, such pages read as zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import _native
from ._check import require_dtype, require_out, require_shape
from .cuda_ops import check_operand, stream_of
from .device import programmatic_launch
from .errors import DTypeError, ShapeError

if TYPE_CHECKING:
    from .kv import KVPages

__all__ = ["load_kv", "paged_attention", "store_kv"]

WORKSPACE_FLOATS = 1 << 26
"""Most floats that one launch's partial results take (256 MiB); more tokens are done one part after another."""


def store_kv(pages: KVPages, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """`kv.store_kv` on a GPU: k, v [T, H, D] of one float type, codes bit for bit those of the CPU."""
    shape = (slots.shape[0], pages.heads, pages.head_dim)
    for name, tensor in (("k", k), ("v", v)):
        require_shape(f"store_kv: {name}", tensor, shape)
    k, v, slots = k.contiguous(), v.contiguous(), slots.contiguous()
    check_operand("store_kv: k", k)
    check_operand("store_kv: v", v, k)
    if v.dtype != k.dtype:
        raise DTypeError(f"store_kv: k is {k.dtype}, v is {v.dtype}; expected one type")
    _one_device("store_kv", pages, k, slots)
    if slots.numel():
        _native.cuda_kv_transfer(pages.native(), k, v, slots, False, stream_of(k), programmatic_launch())


def load_kv(pages: KVPages, slots: Tensor) -> tuple[Tensor, Tensor]:
    """`kv.load_kv` on a GPU: float32 [T, H, D] on the pages' device."""
    _one_device("load_kv", pages, slots)
    shape = (slots.shape[0], pages.heads, pages.head_dim)
    k, v = (torch.empty(shape, dtype=torch.float32, device=pages.device) for _ in range(2))
    if slots.numel():
        _native.cuda_kv_transfer(pages.native(), k, v, slots.contiguous(), True, stream_of(k), programmatic_launch())
    return k, v


def paged_attention(
    q: Tensor,
    pages: KVPages,
    block_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
    key_mask: Tensor | None,
    out: Tensor | None,
    max_keys: int | None,
) -> Tensor:
    """`attention.paged_attention` on a GPU, its arguments checked but for devices; q float16, bfloat16 or float32."""
    require_dtype("paged_attention: q", q, torch.float16, torch.bfloat16, torch.float32)
    _one_device("paged_attention", pages, q, block_table, rows, positions, key_mask)
    out = require_out("paged_attention", out, q)
    tokens, q_heads = q.shape[:2]
    if not tokens:
        return out
    block_table, rows, positions = block_table.contiguous(), rows.contiguous(), positions.contiguous()
    key_mask = None if key_mask is None else key_mask.contiguous()
    native, stream = pages.native(), stream_of(q)
    batch, max_pages = block_table.shape
    limit = max_pages * pages.page_size if max_keys is None else max_keys
    _, splits, floats = _native.cuda_attention_plan(native, tokens, q_heads, batch, max_pages, limit)
    part = tokens if floats <= WORKSPACE_FLOATS else max(1, tokens * WORKSPACE_FLOATS // floats)
    space = torch.empty(floats * part // tokens, dtype=torch.float32, device=q.device) if floats else None
    for i in range(0, tokens, part):
        _native.cuda_paged_attention(
            q[i : i + part],
            native,
            block_table,
            rows[i : i + part],
            positions[i : i + part],
            scale,
            window,
            softcap,
            key_mask,
            out[i : i + part],
            splits,
            space,
            stream,
            programmatic_launch(),
        )
    return out


def _one_device(what: str, pages: KVPages, *tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.device != pages.device:
            raise DTypeError(f"{what}: a tensor is on {tensor.device}, the pages are on {pages.device}; use one device")
    if pages.head_dim % 8 or pages.head_dim > 256:
        raise ShapeError(f"{what}: head_dim {pages.head_dim}; on a GPU it must be a multiple of 8, at most 256")
