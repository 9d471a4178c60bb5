"""Short prompts as rows of a decode step: windows of equal length over the tokens of each sequence.

A decode step of several tokens a row stores all keys and values of a layer before attention reads them. So windows of
one sequence may be rows of one step, and each token sees the keys of the windows before its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exl_kernels.selection import DECODE_TOKENS

from .arguments import per_row, row_lengths
from .attn_params import PagedParams

__all__ = ["WINDOWS", "PromptWindows", "windows_of"]

WINDOWS = (DECODE_TOKENS, 4)
"""Lengths of windows, the preferred one first: as rows of decode steps. Few lengths need few captured steps."""


@dataclass(frozen=True, slots=True)
class PromptWindows:
    """The tokens of a pass in windows, sequence by sequence."""

    ids: Tensor
    """int64 [windows, length]; 0 after the end of a sequence."""
    params: PagedParams
    """One row for each window."""
    counts: list[int]
    """Tokens of each window before the end of its sequence."""
    firsts: list[int]
    """The first window of each window's sequence."""
    longest: int
    """Tokens of the longest sequence after the pass."""

    @property
    def ends(self) -> list[int]:
        """The last token of each sequence, by its number among `ids`."""
        length, last = self.ids.shape[1], [*self.firsts[1:], -1]
        return [
            window * length + count - 1
            for window, (count, first, following) in enumerate(zip(self.counts, self.firsts, last, strict=True))
            if following != first
        ]


def windows_of(ids: Tensor, params: PagedParams, most: int) -> PromptWindows | None:
    """Cut a pass into windows.

    Args:
        ids: int64 [B, q], or [1, T] with `params.q_lens`, on the CPU.
        params: paged parameters.
        most: tokens of all windows.

    Returns:
        The windows; None where they have more than `most` tokens, or the ids are not as described.

    Raises:
        InputError: ids and parameters do not fit.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype != torch.int64 or not ids.is_cpu:
        return None
    if not 1 <= ids.numel() <= most:
        return None
    lengths: list[int] = row_lengths(params, *ids.shape).tolist()
    for width in WINDOWS:
        if width * sum(-(-length // width) for length in lengths) <= most:
            return _cut(ids.reshape(-1), params, lengths, width)
    return None


def _cut(ids: Tensor, params: PagedParams, lengths: list[int], width: int) -> PromptWindows:
    past: list[int] = params.cache_seqlens.tolist()
    rows: list[int] = []
    starts: list[int] = []
    counts: list[int] = []
    firsts: list[int] = []
    for row, (length, stored) in enumerate(zip(lengths, past, strict=True)):
        first = len(rows)
        for begin in range(0, length, width):
            rows.append(row)
            firsts.append(first)
            starts.append(stored + begin)
            counts.append(min(width, length - begin))
    padded = ids.new_zeros(len(rows), width)
    for window, part in zip(padded, torch.split(ids, counts), strict=True):
        window[: len(part)] = part
    of_rows = torch.tensor(rows)
    offsets = params.rope_offsets
    windows = PagedParams(
        batch_size=len(rows),
        block_index=params.block_index[of_rows],
        cache_seqlens=torch.tensor(starts, dtype=torch.int32),
        max_cache_seqlen=max(starts),
        page_size=params.page_size,
        q_len=width,
        rope_offsets=None if offsets is None else per_row("rope_offsets", offsets, len(lengths))[of_rows],
    )
    longest = max(stored + length for stored, length in zip(past, lengths, strict=True))
    return PromptWindows(padded, windows, counts, firsts, longest)
