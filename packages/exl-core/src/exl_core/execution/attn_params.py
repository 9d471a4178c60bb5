"""Places of a chunk's tokens in the cache: one row a sequence (`AttentionParams`), or pages (`PagedParams`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exl_kernels.selection import is_decode_step

from ..errors import InputError, UnsupportedError

__all__ = ["AttentionParams", "PagedParams"]


@dataclass
class AttentionParams:
    """Contiguous mode: sequence b is in row b of the cache, after `past_len` stored tokens.

    Attributes:
        batch_size: number of sequences.
        seq_len: new tokens of each sequence; None for the number of ids.
        past_len: stored tokens of each sequence; None for `cache.current_seq_len`.
        input_mask: additive [batch, past_len + seq_len]; 0 attends to a key, -inf (or very negative) ignores it. With
            stored tokens it may be narrower: later keys are attended to.
        position_offsets: int [batch, 1] or [batch], added to the positions of RoPE, usually -(left padding).
        paged: False.
        alt_rope_embed: not supported.
        non_causal_attn: not supported.
        rope_offsets: int [batch, 1] or [batch], also added to the positions of RoPE: the offset of positions from
            places in the cache after the images before the chunk (or, if the chunk begins inside an image, before that
            image).
            Default: the cache's own record.

    Raises:
        UnsupportedError: an option is not supported.
        InputError: rope_offsets has a wrong shape.
    """

    batch_size: int = 1
    seq_len: int | None = None
    past_len: int | None = None
    input_mask: Tensor | None = None
    position_offsets: Tensor | None = None
    paged: bool = False
    alt_rope_embed: object = None
    non_causal_attn: bool = False
    rope_offsets: Tensor | None = None

    def __post_init__(self) -> None:
        if isinstance(self.past_len, (list, tuple)):
            raise UnsupportedError("a list of past lengths (one cache a sequence) is not supported; use PagedParams")
        _check_rope(self.alt_rope_embed, self.rope_offsets, self.batch_size)
        if self.non_causal_attn:
            raise UnsupportedError("bidirectional attention is not supported")

    def is_causal(self) -> bool:
        """Return whether only causality restricts the keys."""
        return self.input_mask is None


@dataclass
class PagedParams:
    """Paged mode: the cache is a pool of pages, each sequence a list of page numbers.

    Attributes:
        batch_size: number of sequences.
        block_index: int32 [batch, max_pages], page numbers in logical order.
        cache_seqlens: int32 [batch], tokens already stored for each sequence. The q_len new tokens of row b go to
            logical positions cache_seqlens[b] onwards.
        max_cache_seqlen: the largest of cache_seqlens (informative).
        page_size: tokens of a page.
        q_len: new tokens of each row, equal to that of the ids; 0 for any.
        alt_rope_embed: not supported.
        rope_offsets: int [batch] or [batch, 1], added to the positions of RoPE, as in `AttentionParams`; None means 0.
        q_lens: int32 [batch], at least 1 each, for rows of different lengths, such as prompts of several sequences. Ids
            and results are then [1, sum of q_lens], one row after the other; q_len is 0 or that sum.

    Raises:
        UnsupportedError: an option is not supported.
        InputError: a tensor has a wrong shape or type.
    """

    batch_size: int
    block_index: Tensor
    cache_seqlens: Tensor
    max_cache_seqlen: int
    page_size: int = 256
    q_len: int = 0
    alt_rope_embed: object = None
    rope_offsets: Tensor | None = None
    q_lens: Tensor | None = None

    @property
    def position_offsets(self) -> Tensor | None:
        """None: pages need no padding."""
        return None

    def decodes(self, q_len: int) -> bool:
        """Return whether a pass of `q_len` tokens a row is a decode step: few tokens, as many of each sequence.

        Such a pass may be captured, and its rows are batch-invariant whatever their number.
        """
        return self.q_lens is None and is_decode_step(q_len)

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


def _check_rope(alt_rope_embed: object, offsets: Tensor | None, batch: int) -> None:
    if alt_rope_embed is not None:
        raise UnsupportedError(
            "alt_rope_embed is not supported: positions of images come from their embeddings, others from rope_offsets"
        )
    if offsets is None:
        return
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int32, torch.int64):
        raise InputError("rope_offsets must be an int32 tensor [batch, 1]")
    if tuple(offsets.shape) not in ((batch,), (batch, 1)):
        raise InputError(f"rope_offsets has shape {list(offsets.shape)}, expected [batch = {batch}, 1]")
