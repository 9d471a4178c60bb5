"""What a captured step reads: ids, positions, slots and the block table, in memory that never moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Bucket", "StepInputs"]

STAGES = 4
"""Pinned copies of the inputs: so many steps may be queued before the host waits for the first to be read."""


@dataclass(frozen=True)
class Bucket:
    """Sizes that a captured step is fixed to: rows of the batch, tokens a row, pages a row, tokens a page."""

    batch: int
    q_len: int
    pages: int
    page_size: int

    @property
    def tokens(self) -> int:
        return self.batch * self.q_len


class StepInputs:
    """The inputs of one bucket on the device, and the way there: one pinned buffer, one copy a step.

    Rows of the bucket beyond the batch are padding: token 0 at position -1, which sees nothing, and slot -1, which is
    stored nowhere.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        t = bucket.tokens
        # int64: ids, slots, rope positions; int32: positions, block table.
        self._bytes = 3 * 8 * t + 4 * t + 4 * bucket.batch * bucket.pages
        self._device = torch.zeros(self._bytes, dtype=torch.uint8, device=device)
        longs = self._device[: 24 * t].view(torch.int64)
        ints = self._device[24 * t :].view(torch.int32)
        self.ids, self.slots, self.rope_positions = longs[:t], longs[t : 2 * t], longs[2 * t :]
        self.positions, self.block_table = ints[:t], ints[t:].view(bucket.batch, bucket.pages)
        self.rows = torch.arange(bucket.batch, dtype=torch.int32, device=device).repeat_interleave(bucket.q_len)
        self._stages = [_Stage(self._bytes, bucket) for _ in range(STAGES)]
        self._next = 0
        self._offsets = np.arange(bucket.q_len, dtype=np.int64)
        self.clear()

    def clear(self) -> None:
        """Every row padding."""
        self._stages[0].clear()
        self._send(self._stages[0])

    def fill(self, ids: NDArray[np.int64], past: NDArray[np.int64], table: NDArray[np.int32]) -> None:
        """Queues the copy of a checked step: ids [b, q], tokens already stored [b], page numbers [b, n]."""
        stage = self._stages[self._next]
        self._next = (self._next + 1) % STAGES
        stage.wait()
        batch = ids.shape[0]
        size = self.bucket.page_size
        positions = past[:, None] + self._offsets
        width = min(table.shape[1], self.bucket.pages)
        stage.ids[:batch] = ids
        stage.positions[:batch] = positions
        stage.rope_positions[:batch] = positions
        page = table[np.arange(batch)[:, None], positions // size]
        stage.slots[:batch] = page * np.int64(size) + positions % size
        stage.table[:batch, :width] = table[:, :width]
        if stage.used > batch:
            stage.pad(batch)
        stage.used = batch
        self._send(stage)

    def _send(self, stage: _Stage) -> None:
        self._device.copy_(stage.pinned, non_blocking=True)
        stage.sent.record()


class _Stage:
    """One pinned buffer, seen as the arrays it is made of, and the event that says when it was read."""

    def __init__(self, size: int, bucket: Bucket) -> None:
        self.pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        self.sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.used = 0
        raw, t = self.pinned.numpy(), bucket.tokens
        longs, ints = raw[: 24 * t].view(np.int64), raw[24 * t :].view(np.int32)
        shape = (bucket.batch, bucket.q_len)
        self.ids, self.slots = longs[:t].reshape(shape), longs[t : 2 * t].reshape(shape)
        self.rope_positions = longs[2 * t :].reshape(shape)
        self.positions, self.table = ints[:t].reshape(shape), ints[t:].reshape(bucket.batch, bucket.pages)
        self.pad(0)

    def clear(self) -> None:
        self.pad(0)
        self.used = 0

    def pad(self, first: int) -> None:
        self.ids[first:] = 0
        self.slots[first:] = -1
        self.rope_positions[first:] = 0
        self.positions[first:] = -1
        self.table[first:] = 0

    def wait(self) -> None:
        """Until the copy that was queued from here has been made."""
        self.sent.synchronize()
