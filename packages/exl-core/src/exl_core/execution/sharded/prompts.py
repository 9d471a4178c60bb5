"""Prompts of a sharded model: one thread queues the launches of all devices.

As in captured steps (`launches.py`) every device has the whole hidden state as input of its matmuls, and keeps the
columns of it to which its parts of o and down add. Four times a layer each device stores its columns into the memory of
all devices. Results are bitwise identical to those of the modules' own passes over the same devices, but for the last
tokens that `last_id_only` asks for: fewer rows may take other kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl_kernels.peer import PeerResults
from exl_kernels.selection import is_decode_step

from ...device import out_of_memory_as_error
from ...layers import Embedding
from ...transfer import queueing, send
from ..eager import first_step, logits_of
from ..half import OutputTokens
from .launches import ResultRow, ShardLaunches, embedded, operators_for, run_shares

if TYPE_CHECKING:
    from ...contracts import ForwardResult
    from ...language_model import LanguageModel
    from ..forward_pass import CheckedPass
    from .context import TensorParallel

__all__ = ["ShardedPrompts", "Stores", "StreamBarrier", "takes_prompt"]


def takes_prompt(asked: CheckedPass) -> bool:
    """Return whether `ShardedPrompts` covers a pass on GPUs: its rows are prompts to attention, without adapters."""
    return not is_decode_step(asked.ids.shape[1]) and not asked.adapters


class ShardedPrompts:
    """The prompts of a model loaded by `load_tp` in one process."""

    def __init__(self, context: TensorParallel, shards: Sequence[ShardLaunches]) -> None:
        """shards: the launches of each device."""
        self._shards = shards
        self._barrier = StreamBarrier([context.device(shard) for shard in range(len(shards))])

    @torch.no_grad()
    def run(self, model: LanguageModel, asked: CheckedPass) -> ForwardResult:
        """Run a checked pass that `takes_prompt` covers; returns as `Executor.run`.

        Raises:
            DeviceError: a GPU ran out of memory.
        """
        context, batch = model.tp_context, asked.ids.shape[0]
        assert context is not None
        with out_of_memory_as_error("run the model"):
            first = first_step(model, asked, context)
            steps = first.shards
            embedding = model.modules[0]
            assert isinstance(embedding, Embedding)
            assert embedding.weight is not None
            x = embedded(embedding, asked.ids.reshape(-1).to(embedding.weight.device))
            output_tokens: OutputTokens = "none" if asked.preprocess_only else "last" if asked.last_id_only else "all"
            # Each device changes its own; the first one takes x itself.
            copies = [send(x, step.rows.device) for step in steps[1:]]
            spread = [x, *(whole.clone() if whole is x else whole for whole in copies)]
            stores = Stores(self._barrier, x.shape[0], ResultRow.of(self._shards[0].shape, x.device))
            ops = operators_for(self._shards, spread, invariant=first.invariant)
            hidden = run_shares(self._shards, spread, steps, stores.gather, ops, output_tokens)
            result: ForwardResult = {}
            if hidden is not None:
                logits = logits_of(model, hidden[0], invariant=first.invariant)
                result["logits"] = logits.view(batch, -1, logits.shape[1])
        if asked.cache is not None:  # last, so that a failed pass leaves the cache's length unchanged
            asked.cache.current_seq_len = asked.end()
        return result


class StreamBarrier:
    """Lets the current streams of all GPUs wait for one another. Its events serve all passes."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        on_gpus = self.devices[0].type == "cuda"
        self._events = [torch.cuda.Event() for _ in self.devices] if on_gpus else []  # type: ignore[no-untyped-call]

    def streams(self) -> list[torch.cuda.Stream]:
        """Return the current stream of each GPU; none of the CPU."""
        return [torch.cuda.current_stream(device) for device, _ in zip(self.devices, self._events, strict=False)]

    def wait(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """Queue the wait on `streams`. Call it under `queueing`."""
        for event, stream in zip(self._events, streams, strict=True):
            event.record(stream)
        for at, stream in enumerate(streams):
            for other, event in enumerate(self._events):
                if other != at:
                    stream.wait_event(event)


class Stores:
    """The results that the devices of one pass store into one another's memory, ordered by events.

    Torch's allocator may reuse the memory of the results after the pass: each stream waits for the others after each
    store, even if an exception is raised.
    """

    def __init__(self, barrier: StreamBarrier, rows: int, row: ResultRow) -> None:
        self._barrier, self._number = barrier, 0
        self._streams = barrier.streams()  # once: looking them up costs host time in every store
        self._results = PeerResults(barrier.devices, rows * row.even, rows * row.odd)
        with queueing:
            barrier.wait(self._streams)  # the memory may be in use by earlier work of its GPU

    def gather(
        self, made: Sequence[Tensor], begins: Sequence[int], full: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Return the columns of all devices, [rows, columns], on each device, until the second call after this one.

        Args:
            made: the columns of each device on it, [rows, width], contiguous.
            begins: first column of each device, and their number.
            full: not used.
        """
        number = self._number
        self._number += 1
        # The number that `PeerResults` checks is that of a step; here only its parity counts.
        with queueing:
            try:
                return [self._results.store(shard, own, begins, number % 2) for shard, own in enumerate(made)]
            finally:
                self._barrier.wait(self._streams)
