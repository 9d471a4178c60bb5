"""The inputs of a decode step of fixed sizes, checked and laid out in one pinned buffer in one native call."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native
from .cuda_ops import stream_of

__all__ = ["StepStage"]

Sizes = tuple[int, int, int, int]


class StepStage:
    """One pinned buffer for steps of at most `batch` rows of `q_len` tokens in `pages` pages of `page_size` tokens.

    Layout, T = batch * q_len: int64 [T] ids, slots and rope positions, then int32 [T] positions and int32
    [batch, pages] page numbers. Rows that a step does not have are padding: token 0 at position -1, slot -1.
    """

    __slots__ = ("_native", "pinned")

    def __init__(self, sizes: Sizes) -> None:
        """sizes: (batch, q_len, pages, page_size)."""
        self.pinned = torch.zeros(self.bytes(sizes), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self._native = _native.StepStage(self.pinned, sizes)

    @staticmethod
    def bytes(sizes: Sizes) -> int:
        """Bytes of the buffer."""
        return int(_native.StepStage.bytes(sizes))

    def fill(self, ids: Tensor | None, past: Tensor, table: Tensor, limits: tuple[int, int, int]) -> bool:
        """Lays out a step: int64 ids [b, q_len] (None: zeros), int32 tokens already stored [b], int32 page numbers
        [b, n], contiguous and on the CPU. False, with the buffer as it was, when an id (-1 is allowed), a position or a
        page number in use is not below its limit, or the step does not fit the sizes."""
        return bool(self._native.fill(ids, past, table, limits))

    def send(self, to: Tensor) -> None:
        """Queues the copy to `to`, uint8 on a GPU and as long, on torch's current stream; the buffer must stay as it is
        until the stream has passed it. Raises DeviceError."""
        self._native.send(to, stream_of(to))
