"""What a captured step reads: ids, positions, slots and the block table, in memory that never moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_kernels.cuda_ops import stream_of
from exl_kernels.staging import StepStage

__all__ = ["Bucket", "StepInputs", "passed"]

STAGES = 4
"""Steps that have their pinned copies of the inputs before an event says that all have been read. There are two such
rounds of copies, so that as many steps more may be queued before the host waits."""

_unread: dict[tuple[torch.device, int], list[list[StepStage]]] = {}
"""Pinned copies of inputs that are gone, by the stream they were sent on. It may not have come to them yet, and torch
gives pinned memory that nobody holds to the next who asks."""


@contextmanager
def passed(memory: Tensor) -> Iterator[Callable[[], None]]:
    """Within it the caller waits for torch's current stream on the GPU of `memory`, and then calls what it gives: the
    copies of inputs that were gone when it was entered are free for others."""
    key = (memory.device, stream_of(memory))
    gone = _unread.pop(key, [])
    try:
        yield gone.clear
    finally:
        if gone:
            _unread.setdefault(key, []).extend(gone)


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
    stored nowhere. So are all rows at the beginning.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        t, sizes = bucket.tokens, (bucket.batch, bucket.q_len, bucket.pages, bucket.page_size)
        size = StepStage.bytes(sizes)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        # As `StepStage` lays them out.
        longs, ints = self._device[: 24 * t].view(torch.int64), self._device[24 * t :].view(torch.int32)
        self.ids, self.slots, self.rope_positions = longs[:t], longs[t : 2 * t], longs[2 * t :]
        self.positions, self.block_table = ints[:t], ints[t:].view(bucket.batch, bucket.pages)
        self.slots.fill_(-1)
        self.positions.fill_(-1)
        self.rows = torch.arange(bucket.batch, dtype=torch.int32, device=device).repeat_interleave(bucket.q_len)
        self._stages = [StepStage(sizes) for _ in range(2 * STAGES)]
        self._read = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._next = 0
        self._sent: int | None = None  # the stream of the last copy
        self._firsts: dict[int, Tensor] = {}

    def __del__(self) -> None:
        # No waiting here: this may be a garbage collection in the middle of a capture.
        sent = getattr(self, "_sent", None)
        if sent is not None:
            _unread.setdefault((self._device.device, sent), []).append(self._stages)

    def first_ids(self, count: int) -> Tensor:
        """The first `count` ids, a view made once: making it costs the host 3 us a step."""
        found = self._firsts.get(count)
        if found is None:
            with torch.inference_mode(False):
                found = self._firsts[count] = self.ids[:count]
        return found

    def send(
        self,
        ids: Tensor | None,
        past: Tensor,
        table: Tensor,
        limits: tuple[int, int, int],
        offsets: Tensor | None = None,
    ) -> bool:
        """Queues the copy of a step: int64 ids [b, q] (None: zeros), int32 tokens already stored [b], int32 page
        numbers [b, n], all on the CPU. offsets: int64 [b], added to the rope positions of each row, which must stay
        from 0 to their place (behind images positions are not places). False, and nothing is queued, when anything is
        wrong or larger than the bucket or the limits (ids, positions, pages)."""
        stage = self._fill(ids, past, table, limits, offsets)
        if stage is None:
            return False
        stage.send(self._device)
        return True

    def stage(
        self, past: Tensor, table: Tensor, limits: tuple[int, int, int], offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """As `send` without ids, but the copy is the caller's to queue, on the current stream and before the step after
        this: from the first to the second, uint8."""
        stage = self._fill(None, past, table, limits, offsets)
        return None if stage is None else (stage.pinned, self._device)

    def _fill(
        self,
        ids: Tensor | None,
        past: Tensor,
        table: Tensor,
        limits: tuple[int, int, int],
        offsets: Tensor | None,
    ) -> StepStage | None:
        """The next pinned copy, laid out; None as `send` says."""
        stage, (half, place) = self._stages[self._next], divmod(self._next, STAGES)
        if place == 0:
            # Whatever reads the copies of the round that has ended has been queued by now.
            self._read[1 - half].record(torch.cuda.current_stream(self._device.device))
            self._read[half].synchronize()  # those of this round have been read
        if not stage.fill(ids, past, table, limits):
            return None
        if offsets is not None:
            t, q_len = self.bucket.tokens, self.bucket.q_len
            rope = stage.pinned[16 * t : 24 * t].view(torch.int64)
            rope[: q_len * len(past)] += offsets.repeat_interleave(q_len)
        self._sent = stream_of(self._device)
        self._next = (self._next + 1) % (2 * STAGES)
        return stage
