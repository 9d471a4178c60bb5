"""The inputs of a captured step: ids, positions, slots and the block table, in memory that never moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from exl_kernels.cuda_ops import stream_of
from exl_kernels.staging import StepFields, StepLimits, StepStage

__all__ = ["Bucket", "ReplayInputs", "StagedTensors", "StepTensors", "passed"]

STAGES = 4
"""Number of pinned copies of the inputs in each of two halves of a ring. An event tells when all copies of a half have
been read; meanwhile steps fill the other half before the host has to wait."""

_unread: dict[tuple[torch.device, int], list[list[StepStage]]] = {}
"""Pinned copies of deleted inputs, by the stream that they were sent on. The stream may not have read them yet, and
torch would reuse pinned memory without an owner."""


@contextmanager
def passed(memory: Tensor) -> Iterator[Callable[[], None]]:
    """Free the pinned copies of deleted inputs after a wait.

    Inside the block the caller waits for torch's current stream on the GPU of `memory` and then calls the yielded
    function. That call frees the copies whose inputs were deleted before the block.
    """
    key = (memory.device, stream_of(memory))
    gone = _unread.pop(key, [])
    try:
        yield gone.clear
    finally:
        if gone:
            _unread.setdefault(key, []).extend(gone)


class Bucket(NamedTuple):
    """Fixed sizes of a captured step: rows of the batch, tokens a row, pages a row, tokens a page."""

    batch: int
    q_len: int
    pages: int
    page_size: int
    stores: bool = False
    """The step only stores keys and values: it has no logits."""
    last: bool = False
    """The step ends with hidden states for the head: it has no logits either."""

    @property
    def decodes(self) -> bool:
        """Whether the step has logits. Otherwise it stores a prompt."""
        return not (self.stores or self.last)

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self.batch * self.q_len


class ReplayInputs(NamedTuple):
    """The inputs of one replay of a captured step, all but the ids."""

    shape: tuple[int, int]
    """Rows, and tokens a row."""
    past: Tensor
    """int32 [rows] on the CPU, tokens already stored."""
    table: Tensor
    """int32 [rows, pages] on the CPU, page numbers."""
    limits: StepLimits
    """The bounds of ids, positions and page numbers."""
    offsets: Tensor | None
    """int64 [rows], added to the rope positions of each row, or None: after images positions are not places."""
    longest: int
    """Tokens of the longest sequence after the step."""
    adapter_slots: list[int]
    """The slot of each token's adapters, -1 for none; [] where no row has adapters."""


class StepTensors:
    """The inputs of one bucket on a device: views of one buffer, as `StepFields`.

    Rows of the bucket beyond the batch, and tokens of a row beyond its count, are padding: token 0 at position -1,
    which sees no keys, and slot -1, which is not stored. Initially all rows are padding.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        self.buffer = torch.zeros(StepStage.bytes(_sizes(bucket)), dtype=torch.uint8, device=device)
        fields = StepFields.of(self.buffer, _sizes(bucket))
        self.ids, self.slots, self.rope_positions = fields.ids, fields.slots, fields.rope_positions
        self.positions, self.block_table, self.rows = fields.positions, fields.block_table, fields.rows
        self.slots.fill_(-1)
        self.positions.fill_(-1)
        self.rows.copy_(torch.arange(bucket.batch, dtype=torch.int32).repeat_interleave(bucket.q_len))


class StagedTensors(StepTensors):
    """The inputs of one bucket on the device, and their transfer: one pinned buffer, one copy a step."""

    _sent: int | None = None  # the stream of the last copy; also where the constructor failed

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        super().__init__(bucket, device)
        self._stages = [StepStage(_sizes(bucket)) for _ in range(2 * STAGES)]
        self._read = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._next = 0
        self._firsts: dict[int, Tensor] = {}

    def __del__(self) -> None:
        # No waiting here: a garbage collection may call this method during a capture.
        if self._sent is not None:
            _unread.setdefault((self.buffer.device, self._sent), []).append(self._stages)

    def first_ids(self, count: int) -> Tensor:
        """Return a cached view of the first `count` ids, since making one costs host time in every step."""
        found = self._firsts.get(count)
        if found is None:
            with torch.inference_mode(False):
                found = self._firsts[count] = self.ids[:count]
        return found

    def fill(
        self,
        ids: Tensor | None,
        given: ReplayInputs,
        counts: Sequence[int] = (),
        firsts: Sequence[int] = (),
    ) -> StepStage | None:
        """Pack a step into the next pinned copy, to be sent to `buffer` before the next steps.

        Args:
            ids: int64 [b, q] on the CPU; None for zeros.
            given: the other inputs. The sums of rope positions and `offsets` must be from 0 to the place.
            counts: tokens of each row that are no padding; () where all are.
            firsts: the first row of each row's sequence, whose line of the table its tokens then read, so that
                attention reads the keys of a sequence once; () where each row reads its own.

        Returns:
            The copy; None when a value is invalid or exceeds the bucket or the limits.
        """
        stage, (half, place) = self._stages[self._next], divmod(self._next, STAGES)
        if place == 0:
            # All work that reads the copies of the finished half has been queued by now.
            self._read[1 - half].record(torch.cuda.current_stream(self.buffer.device))
            self._read[half].synchronize()  # the copies of this half have been read
        if not stage.fill(ids, given.past, given.table, given.limits):
            return None
        if given.offsets is not None:
            q_len = self.bucket.q_len
            stage.fields.rope_positions[: q_len * len(given.past)] += given.offsets.repeat_interleave(q_len)
        if counts:
            self._pad(stage, counts)
        if firsts:
            rows = stage.fields.rows.view(-1, self.bucket.q_len)
            rows[: len(firsts)] = torch.tensor(firsts, dtype=torch.int32)[:, None]
        self._sent = stream_of(self.buffer)
        self._next = (self._next + 1) % (2 * STAGES)
        return stage

    def stage(self, given: ReplayInputs) -> tuple[Tensor, Tensor] | None:
        """Prepare the copy of a step without ids, which the caller queues on the current stream before the next step.

        Returns source and target, uint8; None as for `fill`.
        """
        stage = self.fill(None, given)
        return None if stage is None else (stage.pinned, self.buffer)

    def _pad(self, stage: StepStage, counts: Sequence[int]) -> None:
        """Turn the tokens of each row after its first `counts` into padding."""
        q_len, slots, positions = self.bucket.q_len, stage.fields.slots, stage.fields.positions
        for row, count in enumerate(counts):
            if count < q_len:
                padding = slice(row * q_len + count, (row + 1) * q_len)
                slots[padding] = positions[padding] = -1


def _sizes(bucket: Bucket) -> tuple[int, int, int, int]:
    return bucket.batch, bucket.q_len, bucket.pages, bucket.page_size
