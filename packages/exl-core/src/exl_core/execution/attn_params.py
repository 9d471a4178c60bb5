"""How a chunk lies in the cache: one row of memory a sequence (`AttentionParams`), or pages (`PagedParams`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, UnsupportedError

__all__ = ["AttentionParams", "PagedParams"]


@dataclass
class AttentionParams:
    """Contiguous mode: sequence b occupies row b of the cache, `past_len` tokens are already there.

    input_mask: additive [batch, past_len + seq_len], 0 = attend, -inf (or very negative) = ignore that key.
    position_offsets: int [batch, 1] or [batch], added to the positions of RoPE, usually -(left padding).
    rope_offsets: int [batch, 1] or [batch], added as well: how far positions are from places in the cache behind the
    images before the chunk (or, if it begins inside an image, before that one). Without it the cache's own count holds.
    """

    batch_size: int = 1
    seq_len: int | None = None
    past_len: int | None = None
    input_mask: Tensor | None = None
    position_offsets: Tensor | None = None
    paged: bool = False
    alt_rope_embed: Any = None
    non_causal_attn: bool = False
    rope_offsets: Tensor | None = None

    def __post_init__(self) -> None:
        if isinstance(self.past_len, (list, tuple)):
            raise UnsupportedError("a list of past lengths (one cache a sequence) is not supported; use PagedParams")
        _check_rope(self.alt_rope_embed, self.rope_offsets, self.batch_size)
        if self.non_causal_attn:
            raise UnsupportedError("bidirectional attention is not built in this version")

    def is_causal(self) -> bool:
        """Whether nothing but causality restricts the keys."""
        return self.input_mask is None


@dataclass
class PagedParams:
    """Paged mode: the cache is a pool of pages, each sequence a list of page numbers.

    block_index: int32 [batch, max_pages], page numbers in logical order. cache_seqlens: int32 [batch], tokens already
    stored for each sequence; the q_len new ones of row b go to logical positions cache_seqlens[b] onwards.
    max_cache_seqlen: the largest of them (informative). q_len, equal for all rows, must match the ids.
    q_lens: int32 [batch], at least 1 each, for rows of different lengths: the ids are then [1, sum of q_lens], one row
    after the other, and so are results; q_len is 0 or that sum. For prompts of several sequences in one pass.
    rope_offsets: int [batch] or [batch, 1], added to the positions of RoPE, as in `AttentionParams`; None means 0.
    """

    batch_size: int
    block_index: Tensor
    cache_seqlens: Tensor
    max_cache_seqlen: int
    page_size: int = 256
    q_len: int = 0
    alt_rope_embed: Any = None
    rope_offsets: Tensor | None = None
    q_lens: Tensor | None = None

    def __post_init__(self) -> None:
        _check_rope(self.alt_rope_embed, self.rope_offsets, self.batch_size)
        tensors = [("block_index", self.block_index, 2), ("cache_seqlens", self.cache_seqlens, 1)]
        if self.q_lens is not None:
            tensors.append(("q_lens", self.q_lens, 1))
        for name, tensor, dims in tensors:
            if not isinstance(tensor, Tensor):
                raise InputError(f"PagedParams: {name} is a {type(tensor).__name__}, expected an int32 tensor")
            if tensor.dim() != dims or tensor.shape[0] != self.batch_size:
                raise InputError(
                    f"PagedParams: {name} has shape {list(tensor.shape)}, expected {dims} dimension(s), "
                    f"the first of size batch_size = {self.batch_size}"
                )
            if tensor.dtype not in (torch.int32, torch.int64):
                raise InputError(f"PagedParams: {name} is {tensor.dtype}, must be int32")
        if self.page_size < 1:
            raise InputError(f"PagedParams: page_size is {self.page_size}, must be at least 1")


def _check_rope(alt_rope_embed: Any, offsets: Tensor | None, batch: int) -> None:
    if alt_rope_embed is not None:
        raise UnsupportedError(
            "alt_rope_embed is not built in this version: positions of images come from their embeddings, others from "
            "rope_offsets"
        )
    if offsets is None:
        return
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int32, torch.int64):
        raise InputError("rope_offsets must be an int32 tensor [batch, 1]")
    if tuple(offsets.shape) not in ((batch,), (batch, 1)):
        raise InputError(f"rope_offsets has shape {list(offsets.shape)}, expected [batch = {batch}, 1]")
