"""The exchanges of captured steps of a sharded model: buffers by number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl_kernels.peer import ExchangeBuffers, PeerResults, exchange_buffer_bytes, free_deleted
from exl_kernels.selection import PACKED_ROWS

from ...transfer import is_direct
from .coverage import RowBytes
from .launches import Gather, ResultRow

if TYPE_CHECKING:
    from .context import TensorParallel

__all__ = [
    "BuffersByRows",
    "bytes_by_rows",
    "exchanges",
    "refusal_of_access",
    "refusal_of_rows",
    "result_rows",
]


def refusal_of_rows(rows: int) -> str | None:
    """Return why steps of so many rows have no exchange buffers, or None. `bytes_by_rows` plans for all that have."""
    return None if rows <= PACKED_ROWS else f"the step has {rows} rows, more than {PACKED_ROWS}"


def bytes_by_rows(rows: int, row: RowBytes) -> tuple[int, int]:
    """Return the bytes of exchange buffers for steps of 1 to `rows` rows, of the first GPU and of each other one."""
    sizes = [1 << power for power in range(_power(min(rows, PACKED_ROWS)) + 1)]
    first = sum(exchange_buffer_bytes(most * row.shared, most * row.logits) for most in sizes)
    return first, sum(exchange_buffer_bytes(most * row.shared) for most in sizes)


def _power(rows: int) -> int:
    return (rows - 1).bit_length()


def result_rows(rows: int) -> int:
    """Return the rows for which the results of prompts of up to `rows` rows have room: a power of two."""
    return 1 << _power(rows)


def refusal_of_access(context: TensorParallel) -> str | None:
    """Return why the devices cannot store into one another's memory; None if they can, which this opens."""
    places = [context.device(shard) for shard in range(len(context.names))]
    for one in places:
        for other in places:
            if one == other:
                continue
            if not (torch.cuda.can_device_access_peer(one, other) and is_direct(one, other)):
                return f"{one} cannot access the memory of {other}"
    return None


class BuffersByRows:
    """Memory of exchanges of a sharded model, one for steps of up to 1, 2, 4, .. rows, made on first use.

    Steps of few rows exchange through buffers, prompts store into results.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, ExchangeBuffers] = {}
        self._results: dict[int, PeerResults] = {}

    def clear(self) -> None:
        """Drop all memory. Waits for the GPUs: a step may still be under way."""
        if self._buffers or self._results:
            self._buffers.clear()
            self._results.clear()
            free_deleted()

    def check(self) -> None:
        """Raise DeviceError if a device gave up waiting for another one in any step. Waits for the GPUs."""
        for buffers in self._buffers.values():
            buffers.check()
        for results in self._results.values():
            results.check()

    def results_of_rows(self, devices: Sequence[torch.device], rows: int, row: ResultRow) -> PeerResults:
        """Return the results for prompts of up to `rows` rows."""
        most = result_rows(rows)
        if most not in self._results:
            self._results[most] = PeerResults(devices, most * row.even, most * row.odd)
            for device in {*devices}:  # marks must be zeros before another GPU stores there
                torch.cuda.synchronize(device)
        return self._results[most]

    def of_rows(self, context: TensorParallel, rows: int, row: RowBytes) -> ExchangeBuffers:
        """Return the buffers for steps of up to `rows` rows. Their last exchange is of the logits."""
        most = 1 << _power(rows)
        if most not in self._buffers:
            devices = [context.device(shard) for shard in range(len(context.names))]
            self._buffers[most] = ExchangeBuffers(devices, most * row.shared, {0: most * row.logits})
        return self._buffers[most]


class Exchanges:
    """The exchanges of one step of one device: a `Gather`, which numbers them.

    `live`: kernels send and wait. Otherwise they are only loaded: others may be in the midst of a step.
    """

    def __init__(self, buffers: ExchangeBuffers, shard: int, live: bool) -> None:
        self._buffers, self._shard, self._live = buffers, shard, live
        self._number = 0
        if live:
            buffers.begin_step(shard)

    def __call__(
        self, own: Tensor, begins: Sequence[int], full: Tensor | None, receivers: Sequence[int] | None
    ) -> Tensor:
        """Gather the columns of all devices; see `Gather`."""
        if full is None:
            full = own.new_empty(own.shape[0], begins[-1])
        live = self._live
        self._buffers.gather(self._shard, own, full, begins, self._number, receivers, send=live, receive=live)
        self._number += 1
        return full


def exchanges(buffers: ExchangeBuffers, shard: int, live: bool) -> Gather:
    """Return the exchanges of one step of one device; arguments as for `Exchanges`."""
    return Exchanges(buffers, shard, live)
