"""Passes of many rows over a sharded model: one thread queues the launches of all devices.

As in captured steps (`launches.py`) every device has the whole hidden state as input of its matmuls, and keeps the
columns of it to which its parts of o and down add. Four times a layer copies bring the columns of all devices to each
of them. Results are bitwise identical to those of the modules' own passes over the same devices, but for the last
tokens that `last_id_only` asks for: fewer rows may take other kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl_kernels.fused import embed
from exl_kernels.selection import PACKED_ROWS

from ...device import out_of_memory_as_error
from ...layers import Embedding, Head, Norm
from ..batch import DECODE_TOKENS
from ..eager import first_step
from ..half import OutputTokens
from .heads import ShardedHeads
from .launches import ShardLaunches, rounded_for, run_shares
from .transfer import queueing, send

if TYPE_CHECKING:
    from ...contracts import ForwardResult
    from ...language_model import LanguageModel
    from ..forward_pass import ForwardPass
    from .context import TensorParallel

__all__ = ["Copies", "Prompts", "takes_prompt"]

WIDE = 8  # bytes that a thread copies at once, if columns allow it


def takes_prompt(asked: ForwardPass) -> bool:
    """Return whether `Prompts` covers a pass of a model on GPUs: many rows, no decode step, no adapters."""
    many = asked.ids.numel() > PACKED_ROWS and asked.ids.shape[1] > DECODE_TOKENS
    return many and not (asked.adapters or asked.loras or asked.row_loras)


class Prompts:
    """The prompts of a model loaded by `load_tp` in one process. Owns the streams between its devices."""

    def __init__(self, context: TensorParallel, shards: Sequence[ShardLaunches]) -> None:
        """shards: the launches of each device."""
        self._shards = shards
        self._copies = Copies([context.device(shard) for shard in range(len(shards))])

    @torch.no_grad()
    def run(self, model: LanguageModel, asked: ForwardPass) -> ForwardResult:
        """Run a checked pass that `takes_prompt` covers; returns as `Executor.run`.

        Raises:
            DeviceError: a GPU ran out of memory.
        """
        context, batch = model.tp_context, asked.ids.shape[0]
        assert context is not None
        with out_of_memory_as_error("run the model"):
            first = first_step(model, asked, context)
            heads = first.sharding
            assert isinstance(heads, ShardedHeads), "built for a sharded model"
            steps = [
                replace(context.step_on(first, shard), pages=pages, sharding=None)
                for shard, pages in enumerate(heads.pages)
            ]
            embedding, norm, head = model.modules[0], model.modules[-2], model.modules[-1]
            assert isinstance(embedding, Embedding)
            assert isinstance(norm, Norm)
            assert isinstance(head, Head)
            assert embedding.weight is not None
            ids = asked.ids.reshape(-1).to(embedding.weight.device)
            x = embed(embedding.weight, ids, factor=embedding.scale, dtype="float16")
            output_tokens: OutputTokens = "none" if asked.preprocess_only else "last" if asked.last_id_only else "all"
            spread = [send(x, step.rows.device) for step in steps]
            gather = self._copies.gather
            ops = rounded_for(self._shards, spread)
            hidden = run_shares(self._shards, spread, steps, lambda made, to, _: gather(made, to), ops, output_tokens)
            result: ForwardResult = {}
            if hidden is not None:
                result["logits"] = head.forward(norm.forward(hidden[0]), first).view(batch, -1, head.padded_vocab_size)
        if asked.cache is not None:  # last, so that a failed pass leaves the cache's length unchanged
            asked.cache.current_seq_len = asked.end()
        return result


@dataclass(frozen=True, slots=True)
class _Link:
    """The way from one GPU to another: a stream of each, and events behind the copies on them."""

    source: int
    target: int
    leaves: torch.cuda.Stream
    arrives: torch.cuda.Stream
    left: torch.cuda.Event
    arrived: torch.cuda.Event


class Copies:
    """Copies of columns between devices. Between GPUs each direction of each link has streams of its own.

    Streams and events serve all passes: each pass waits for the copies before it, also where one was interrupted.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._links: list[_Link] = []
        self._ready: list[torch.cuda.Event] = []
        if self._devices[0].type != "cuda":
            return
        numbers = range(len(self._devices))
        self._ready = [_event() for _ in numbers]
        for source, target in ((a, b) for a in numbers for b in numbers if a != b):
            streams = _stream(self._devices[source]), _stream(self._devices[target])
            self._links.append(_Link(source, target, *streams, _event(), _event()))

    def gather(self, made: Sequence[Tensor], begins: Sequence[int]) -> list[Tensor]:
        """Return the columns of all devices, [rows, columns], on each device.

        Args:
            made: the columns of each device on it, [rows, width], contiguous.
            begins: first column of each device, and their number.
        """
        place = [slice(begins[shard], begins[shard + 1]) for shard in range(len(made))]
        full = [own.new_empty(own.shape[0], begins[-1]) for own in made]
        with queueing:  # a step whose graphs another thread queues must not wait for these copies in part
            try:
                self._send(made, full, place)
                for shard, whole in enumerate(full):
                    for other, own in enumerate(made):
                        if other == shard or not self._links:
                            copy_columns(whole, place[other], own)
            finally:
                # Also after a partial failure: queued copies still use memory that others may get from here on.
                self._join()
        return full

    def _send(self, made: Sequence[Tensor], full: Sequence[Tensor], place: Sequence[slice]) -> None:
        """Queue the copies of all links behind the current work of the GPUs."""
        for event, device in zip(self._ready, self._devices, strict=False):
            event.record(torch.cuda.current_stream(device))
        for link in self._links:
            link.leaves.wait_event(self._ready[link.source])
            link.leaves.wait_event(self._ready[link.target])
            # torch orders a copy with the current streams of both devices: those of the link, so that links do not wait
            # for one another.
            with torch.cuda.stream(link.arrives), torch.cuda.stream(link.leaves):
                copy_columns(full[link.target], place[link.source], made[link.source])

    def _join(self) -> None:
        """Let the current streams wait for the copies. The source's too: `made` may be overwritten or freed next.

        So torch's allocator needs no record of the other streams: memory is freed on streams that wait for the copies.
        """
        for link in self._links:
            for at, stream, event in ((link.source, link.leaves, link.left), (link.target, link.arrives, link.arrived)):
                event.record(stream)
                torch.cuda.current_stream(self._devices[at]).wait_event(event)


def copy_columns(full: Tensor, columns: slice, own: Tensor) -> None:
    """Queue the copy of `own` to columns of `full`, on another device or not."""
    per = WIDE // own.element_size()
    if own.element_size() < WIDE and not any(at % per for at in (columns.start, columns.stop, full.shape[1])):
        full, own = full.view(torch.int64), own.view(torch.int64)
        columns = slice(columns.start // per, columns.stop // per)
    full[:, columns].copy_(own, non_blocking=True)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
