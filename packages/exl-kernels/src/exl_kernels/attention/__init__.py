"""Attention over paged keys and values: causal, grouped heads, window, softcap, additive mask.

A query token's result is the same to the bit whatever else is in the call, however the prompt was cut into calls,
wherever its pages lie, and at any thread count.
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
    """softmax(mask(softcap(scale * q k^T))) v for T query tokens of any mix of sequences.

    q: float32 [T, Hq, D], Hq a multiple of the pages' heads. block_table: int32 [B, max_pages], page numbers in
    logical order; entries beyond a sequence's last visible key are never read. rows: int32 [T], the token's row of
    block_table. positions: int32 [T]: the token sees keys j <= positions[t] (store its own key first), and j >
    positions[t] - window if window > 0; a negative position sees nothing. softcap s > 0: s * tanh(logit / s), before
    masking. key_mask: float32 [B, S], S > every position, added to the logits; -inf takes the key out altogether.
    Returns out, [T, Hq, D]; a token that sees no key gets zeros.

    Keys and values enter as their codes stand for, without the half roundings of the codec's own decode (`load_kv`).
    On a GPU (all tensors on the pages' device) q and out may also be float16 or bfloat16; `attention_cuda` says what
    differs. max_keys: every position is below it; it sizes the GPU's launch, which the block table's width does
    otherwise, and changes no result.
    Raises ShapeError (also for rows, positions or page numbers out of range), DTypeError, UnsupportedError.
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
        tables = _native.AttentionTables(block_table, rows, positions, key_mask)
        _native.paged_attention(q, pages.native(), tables, scale, window, softcap, result)
    except (TypeError, ValueError, OverflowError):
        _check(q, pages, block_table, rows, positions, window, softcap, key_mask)
        result = require_out("paged_attention", out, q)
        mask = None if key_mask is None else key_mask.contiguous()
        tables = _native.AttentionTables(block_table.contiguous(), rows.contiguous(), positions.contiguous(), mask)
        _native.paged_attention(q, pages.native(), tables, scale, window, softcap, result)
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
