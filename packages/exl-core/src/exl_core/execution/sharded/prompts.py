"""Passes of many rows over a sharded model: one thread queues the launches of all devices.

As in captured steps (`launches.py`) every device has the whole hidden state as input of its matmuls, and keeps the
columns of it to which its parts of o and down add. Four times a layer copies bring the columns of all devices to each
of them. Results are bitwise identical to those of the modules' own passes over the same devices, but for the last
tokens that `last_id_only` asks for: fewer rows may take other kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exl_kernels.activation import gated_activation
from exl_kernels.fused import embed
from exl_kernels.kv import store_kv
from exl_kernels.linear.fused import FusedLinear
from exl_kernels.norm import rms_norm
from exl_kernels.rope import apply_rope
from exl_kernels.selection import PACKED_ROWS

from ...device import out_of_memory_as_error
from ...layers import Embedding, Head, Norm
from ..batch import DECODE_TOKENS
from ..eager import first_step
from .heads import ShardedHeads
from .launches import ShardLaunches, ShardLayer
from .transfer import queueing, send

if TYPE_CHECKING:
    from ...language_model import LanguageModel
    from ..batch import Step
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

    def run(self, model: LanguageModel, asked: ForwardPass) -> dict[str, Any]:
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
            hidden = _Pass(self._shards, steps, self._copies).hidden(x, asked)
            result = {}
            if hidden is not None:
                result["logits"] = head.forward(norm.forward(hidden), first).view(batch, -1, head.padded_vocab_size)
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


class _Pass:
    """The launches of one pass. `steps`: the step on each device, with the pages of its heads."""

    def __init__(self, shards: Sequence[ShardLaunches], steps: Sequence[Step], copies: Copies) -> None:
        self._shards, self._steps, self._copies = shards, steps, copies

    def hidden(self, first: Tensor, asked: ForwardPass) -> Tensor | None:
        """Return the hidden state behind the layers [T, hidden] on the home device, None without logits.

        first: the embedded ids, [T, hidden], on the home device.
        """
        shape = self._shards[0].shape
        x = [send(first, step.rows.device) for step in self._steps]
        begins = shape.hidden.begins
        own = [whole[:, begins[i] : begins[i + 1]].contiguous() for i, whole in enumerate(x)]
        layers = list(zip(*(launches.layers for launches in self._shards), strict=True))
        for layer in layers:
            last = layer is layers[-1]
            if last and asked.preprocess_only:
                self._each(_store, layer, x)
                return None
            mixed = self._each(_attended, layer, x)
            if last and asked.last_id_only:
                mixed, own = ([_last(t, asked.ids.shape[0]) for t in parts] for parts in (mixed, own))
            mixed = self._copies.gather(mixed, shape.heads.begins)
            x = self._added([parts.o for parts in layer], mixed, own)
            inner = [_gated(parts.up, whole) for parts, whole in zip(layer, x, strict=True)]
            inner = self._copies.gather(inner, shape.inner.begins)
            x = self._added([parts.down for parts in layer], inner, own)
        return x[0]

    def _each(self, run: Any, layer: Sequence[ShardLayer], x: Sequence[Tensor]) -> list[Any]:
        return [run(parts, whole, step) for parts, whole, step in zip(layer, x, self._steps, strict=True)]

    def _added(self, matmuls: Sequence[FusedLinear], x: Sequence[Tensor], own: Sequence[Tensor]) -> list[Tensor]:
        """Add the matmuls of x to each device's columns of the hidden state; return the whole of it on each device."""
        for matmul, whole, columns in zip(matmuls, x, own, strict=True):
            columns.add_(matmul.matrices[0].matmul(whole))
        return self._copies.gather(own, self._shards[0].shape.hidden.begins)


def _normed(matmul: FusedLinear, x: Tensor) -> Tensor:
    norm = matmul.norm
    assert norm is not None, "of the first matmul of a half"
    return rms_norm(x, norm.weight, norm.eps)


def _attended(layer: ShardLayer, x: Tensor, step: Step) -> Tensor:
    h = _normed(layer.qkv, x)
    q, k, v = (matrix.matmul(h) for matrix in layer.qkv.matrices)
    return layer.attend(q, k, v, step)


def _store(layer: ShardLayer, x: Tensor, step: Step) -> None:
    """Store keys and values of x in the cache without attention."""
    a, h = layer.attention, _normed(layer.qkv, x)
    k, v = (matrix.matmul(h).view(x.shape[0], -1, a.head_dim) for matrix in layer.qkv.matrices[1:])
    if layer.head_norms is not None:
        k = rms_norm(k, layer.head_norms.k, layer.head_norms.eps)
    if a.rope != "none":
        apply_rope(k, *step.table(a.rope), step.rope_positions, interleaved=a.interleaved)
    store_kv(step.pages(a.layer_idx), k, v, step.slots)


def _gated(matmul: FusedLinear, x: Tensor) -> Tensor:
    """Return the gated features of x: norm, gate, up and activation."""
    h = _normed(matmul, x)
    gate, up = (matrix.matmul(h) for matrix in matmul.matrices)
    assert matmul.activation is not None, "of a gated MLP"
    return gated_activation(gate, up, matmul.activation, out=gate)


def _last(x: Tensor, batch: int) -> Tensor:
    """Return x [T, width] of the last token of each of `batch` rows."""
    return x.view(batch, -1, x.shape[1])[:, -1].contiguous()
