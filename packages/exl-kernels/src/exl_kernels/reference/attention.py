"""Twin of `exl_kernels.attention`: one query token at a time, in the query's precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .kv import fp8_decode, hadamard_decode_exact

if TYPE_CHECKING:
    from ..kv import KVPages

__all__ = ["decode_exact", "paged_attention"]


def decode_exact(pages: KVPages, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of `slots` [n] as exact float64 [n, H, D], without half roundings."""
    page, offset = slots // pages.page_size, slots % pages.page_size
    parts = []
    for data, scales, bits in (
        (pages.key, pages.key_scales, pages.key_bits),
        (pages.value, pages.value_scales, pages.value_bits),
    ):
        stored = data[page, offset]
        if scales is not None:
            full = hadamard_decode_exact(stored, scales[page, offset], bits)
        elif stored.dtype == torch.uint8:
            full = fp8_decode(stored).double()
        else:
            full = stored.double()
        parts.append(full[..., : pages.head_dim])
    return parts[0], parts[1]


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
) -> Tensor:
    """Compute `exl_kernels.attention.paged_attention`; returns a new tensor of q's dtype."""
    out = torch.zeros_like(q)
    groups = q.shape[1] // pages.heads
    for t in range(q.shape[0]):
        row, last = int(rows[t]), int(positions[t])
        first = max(0, last - window + 1) if window else 0
        if last < 0:
            continue
        keys = torch.arange(first, last + 1)
        slots = block_table[row].long()[keys // pages.page_size] * pages.page_size + keys % pages.page_size
        k, v = (part.to(q.dtype).repeat_interleave(groups, dim=1) for part in decode_exact(pages, slots))
        logits = torch.einsum("hd,jhd->hj", q[t], k) * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if key_mask is not None:
            mask = key_mask[row, keys].to(q.dtype)
            excluded = mask == -torch.inf
            if bool(excluded.all()):
                continue
            logits = torch.where(excluded, -torch.inf, logits + mask)
            v = torch.where(excluded[:, None, None], 0.0, v)
        out[t] = torch.einsum("hj,jhd->hd", torch.softmax(logits, dim=-1), v)
    return out
