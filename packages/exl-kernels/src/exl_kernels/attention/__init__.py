"""Attention over paged keys and values: causal, grouped heads, window, softcap, additive mask.

A query token's result is bitwise identical in any batch, any chunking of the prompt, any placement of its pages, and
any number of threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _native
from .._check import require_cpu, require_dtype, require_out
from ..errors import ShapeError
from . import cuda as attention_cuda

if TYPE_CHECKING:
    from ..kv import KVPages

__all__ = ["paged_attention"]


def paged_attention(
    q: Tensor,
    pages: KVPages,
    block_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    key_mask: Tensor | None = None,
    out: Tensor | None = None,
    max_keys: int | None = None,
) -> Tensor:
    """Compute softmax(mask(softcap(scale * q k^T))) v for T query tokens of any mix of sequences.

    Keys and values enter as the exact values of their codes, without the half roundings of the codec's own decode
    (`load_kv`). On a GPU all tensors are on the pages' device; `exl_kernels.attention.cuda` lists the differences.

    Args:
        q: [T, Hq, D], Hq a multiple of the pages' heads; float32, on a GPU also float16 or bfloat16.
        pages: keys and values of one layer.
        block_table: int32 [B, max_pages], page numbers in logical order. Entries beyond a sequence's last visible key
            are never read.
        rows: int32 [T], the token's row of block_table.
        positions: int32 [T]. Token t sees keys j <= positions[t], so store its own key first. A negative position sees
            no key.
        scale: factor of the logits.
        window: if > 0, the token sees only keys j > positions[t] - window.
        softcap: if s > 0, logits become s * tanh(logit / s) before masking.
        key_mask: float32 [B, S], S > every position, added to the logits; -inf removes the key.
        out: like q, or None for a new tensor.
        max_keys: exclusive upper bound of the positions. The bound sizes the launch on a GPU (default: the width of the
            block table) and changes no result.

    Returns:
        [T, Hq, D]; zeros for a token that sees no key.

    Raises:
        ShapeError: shapes do not fit, or, on the CPU, a row, position or page number is out of range.
        DTypeError: an element type or a device does not fit.
        UnsupportedError: the pages are neither on the CPU nor on a CUDA device.
    """
    if pages.device.type == "cuda":
        _check(q, pages, block_table, rows, positions, window, softcap, key_mask)
        return attention_cuda.paged_attention(
            q,
            pages,
            block_table,
            rows,
            positions,
            scale=scale,
            window=window,
            softcap=softcap,
            key_mask=key_mask,
            out=out,
            max_keys=max_keys,
        )
    result = torch.empty_like(q) if out is None else out
    try:
        tables = _native.AttentionTables(block_table, rows=rows, positions=positions, key_mask=key_mask)
        _native.paged_attention(q, pages.native(), tables, scale=scale, window=window, softcap=softcap, out=result)
    except (TypeError, ValueError, OverflowError):
        _check(q, pages, block_table, rows, positions, window, softcap, key_mask)
        result = require_out("paged_attention", out, q)
        mask = None if key_mask is None else key_mask.contiguous()
        tables = _native.AttentionTables(
            block_table.contiguous(), rows=rows.contiguous(), positions=positions.contiguous(), key_mask=mask
        )
        _native.paged_attention(q, pages.native(), tables, scale=scale, window=window, softcap=softcap, out=result)
    return result


def _check(
    q: Tensor,
    pages: KVPages,
    block_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    window: int,
    softcap: float,
    key_mask: Tensor | None,
) -> None:
    what = "paged_attention"
    if pages.device.type == "cpu":
        require_cpu(what, q, block_table, rows, positions, key_mask)
        require_dtype(f"{what}: q", q, torch.float32)
    for name, tensor in (("block_table", block_table), ("rows", rows), ("positions", positions)):
        require_dtype(f"{what}: {name}", tensor, torch.int32)
    if q.dim() != 3 or q.shape[2] != pages.head_dim or q.shape[1] % pages.heads or not q.is_contiguous():
        raise ShapeError(
            f"{what}: q {tuple(q.shape)}, expected contiguous [tokens, heads, {pages.head_dim}], "
            f"heads a multiple of {pages.heads}"
        )
    if block_table.dim() != 2:
        raise ShapeError(f"{what}: block_table {tuple(block_table.shape)}, expected [batch, max_pages]")
    if rows.shape != q.shape[:1] or positions.shape != q.shape[:1]:
        raise ShapeError(
            f"{what}: rows {tuple(rows.shape)}, positions {tuple(positions.shape)}, expected ({q.shape[0]},)"
        )
    if window < 0 or softcap < 0:
        raise ShapeError(f"{what}: window {window}, softcap {softcap}; expected 0 (off) or more")
    if key_mask is not None:
        require_dtype(f"{what}: key_mask", key_mask, torch.float32)
        if key_mask.dim() != 2 or key_mask.shape[0] != block_table.shape[0]:
            raise ShapeError(f"{what}: key_mask {tuple(key_mask.shape)}, expected [{block_table.shape[0]}, keys]")
