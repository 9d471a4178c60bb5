"""Check the inputs of a decode step of fixed sizes and pack them into one pinned buffer, in one native call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _native
from .cuda_ops import stream_of

__all__ = ["StepFields", "StepLimits", "StepStage"]

StepLimits = _native.StepLimits
"""Exclusive upper bounds of a step's ids (`vocab`), positions and page numbers (`pages`)."""

Sizes = tuple[int, int, int, int]
"""(batch, q_len, pages, page_size)."""

_DTYPES = {4: torch.int32, 8: torch.int64}


class StepFields(NamedTuple):
    """Views of a step's buffer, with T = batch * q_len tokens; `_native.StepSizes.fields` says where they are."""

    ids: Tensor
    """int64 [T]."""
    slots: Tensor
    """int64 [T]; -1: not stored."""
    rope_positions: Tensor
    """int64 [T]."""
    positions: Tensor
    """int32 [T]; -1: sees no keys."""
    block_table: Tensor
    """int32 [batch, pages], page numbers."""
    rows: Tensor
    """int32 [T], each token's row of `block_table`."""

    @staticmethod
    def of(buffer: Tensor, sizes: Sizes) -> StepFields:
        """Return the views of a buffer for sizes (batch, q_len, pages, page_size), uint8 [`StepStage.bytes(sizes)`]."""
        views = {
            field.name: buffer[field.offset : field.offset + field.size].view(_DTYPES[field.element])
            for field in _sizes(sizes).fields
        }
        views["block_table"] = views["block_table"].view(sizes[0], sizes[2])
        return StepFields(**views)


class StepStage:
    """One pinned buffer for steps of at most `batch` rows of `q_len` tokens in `pages` pages of `page_size` tokens.

    `fields` are views of the buffer. Missing rows are padding: token 0 at position -1, slot -1.
    """

    __slots__ = ("_native", "fields", "pinned")

    def __init__(self, sizes: Sizes) -> None:
        """Allocate the buffer for sizes (batch, q_len, pages, page_size)."""
        self.pinned = torch.zeros(self.bytes(sizes), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self.fields = StepFields.of(self.pinned, sizes)
        self._native = _native.StepStage(self.pinned, _sizes(sizes))

    @staticmethod
    def bytes(sizes: Sizes) -> int:
        """Return the bytes of the buffer for sizes (batch, q_len, pages, page_size)."""
        return _sizes(sizes).bytes

    def fill(self, ids: Tensor | None, past: Tensor, table: Tensor, limits: StepLimits) -> bool:
        """Pack a step into the buffer.

        Args:
            ids: int64 [b, q_len], contiguous, on the CPU, as are the others; None for zeros. -1 is allowed.
            past: int32 [b], tokens already stored.
            table: int32 [b, n], page numbers.
            limits: the bounds of ids, positions and page numbers.

        Returns:
            False, with the buffer unchanged, when an id, a position or a page number in use is out of range, or the
            step does not fit the sizes.
        """
        return self._native.fill(ids, past=past, table=table, limits=limits)

    def send(self, to: Tensor) -> None:
        """Queue the copy to `to`, uint8 of the same size on a GPU, on torch's current stream.

        The buffer must stay unchanged until the stream has passed the copy. Raises DeviceError.
        """
        self._native.send(to, stream_of(to))


def _sizes(sizes: Sizes) -> _native.StepSizes:
    batch, q_len, pages, page_size = sizes
    return _native.StepSizes(batch=batch, q_len=q_len, pages=pages, page_size=page_size)
