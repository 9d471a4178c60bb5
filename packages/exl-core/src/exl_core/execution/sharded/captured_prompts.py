"""Captured prompts of a sharded model: one graph for each device, and one for the embedding.

The graphs hold the launches of `prompts.py`. Instead of events, marks in the results order the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from exl_kernels.peer import PeerResults
from exl_kernels.selection import runs_packed

from ...layers import Embedding
from ..capturable import static_step
from ..half import OutputTokens
from ..many_rows import largest_weight
from ..recorder import Body, Recorder
from ..sections import DeviceCopy, SectionGraphs
from ..step_inputs import Bucket, StagedTensors, StepTensors
from .exchange_buffers import result_rows
from .launches import ResultRow, ShardLaunches, embedded, is_captured, operators_for, run_shares

if TYPE_CHECKING:
    from ...contracts import Cache
    from ...language_model import LanguageModel
    from ..batch import Step

__all__ = ["MarkedStores", "PromptGraphs", "embedding_body", "layers_body", "record_prompt", "refusal_of_memory"]


class MarkedStores:
    """The results of one step of one device, ordered by marks; `Stores` is the same of all devices, with events.

    `live`: kernels store, mark and wait. Otherwise they are only loaded: others may be in the midst of a step.
    """

    def __init__(self, results: PeerResults, shard: int, *, live: bool) -> None:
        self._results, self._shard, self._live = results, shard, live
        self._number = 0
        if live:
            results.begin_step(shard)

    def gather(
        self, made: Sequence[Tensor], begins: Sequence[int], full: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Return the columns of all devices on this one; arguments as for `Stores.gather`, of one device."""
        (own,) = made
        shard, number, live = self._shard, self._number, self._live
        self._number += 1
        self._results.store(shard, own if live else own[:0], begins, number, mark=live, wait=live)
        return [self._results.result_of(shard, number, own.shape[0], begins[-1], own.dtype)]


class PromptGraphs(NamedTuple):
    """A recorded prompt."""

    graphs: SectionGraphs
    inputs: StagedTensors
    kept: list[Tensor]
    """Tensors that the graphs refer to, other than workspaces."""
    hidden: Tensor
    """The hidden state of the last tokens [rows, hidden] on the home device, if the bucket ends with them."""


def refusal_of_memory(shards: Sequence[ShardLaunches], devices: Sequence[torch.device], bucket: Bucket) -> str | None:
    """Return why a prompt is not captured for lack of memory, or None. As much as it takes must stay free."""
    for share, device in zip(shards, devices, strict=True):
        if device.type != "cuda":
            continue
        row = ResultRow.of(share.shape, device)
        # The embedded ids and their columns, twice, or in float32 with two normed ones; both results and the features
        # of a half; one dequantized matrix.
        # Results have room for a power of two of rows.
        hidden = (5 if share.float_residual else 3) * row.odd
        needed = bucket.tokens * (hidden + row.even) + result_rows(bucket.tokens) * (row.even + row.odd)
        needed += 2 * largest_weight(share.halves)
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if 2 * needed > free:
            return (
                f"{device} has {free >> 20} MiB free; a captured prompt of {bucket.tokens} tokens takes "
                f"{needed >> 20}, and leaves as much"
            )
    return None


def record_prompt(
    model: LanguageModel,
    shards: Sequence[ShardLaunches],
    cache: Cache,
    bucket: Bucket,
    results: PeerResults,
    recorder: Recorder,
) -> PromptGraphs:
    """Record the graphs of a bucket that stores, or that ends with the last tokens' hidden state."""
    context = model.tp_context
    assert context is not None, "asked of sharded models"
    inputs = StagedTensors(bucket, context.home)
    graph, ids_embedded, held = recorder.capture(embedding_body(model, inputs), None, inputs.ids)
    parts: list[tuple[list[DeviceCopy], torch.cuda.CUDAGraph]] = [([], graph)]
    kept, hidden = [ids_embedded, held], ids_embedded
    pages = context.pages(cache, bucket.page_size, (bucket.batch, model.config.head_dim))
    invariant = runs_packed(bucket.tokens, decodes=False, packed=model.packed_rows)  # as of a pass without a graph
    for shard in reversed(range(len(shards))):
        device = context.device(shard)
        own: StepTensors = inputs
        x, copies_in = ids_embedded, list[DeviceCopy]()
        if shard:
            own, x = StepTensors(bucket, device), torch.zeros_like(ids_embedded, device=device)
            copies_in = [DeviceCopy(inputs.buffer, own.buffer), DeviceCopy(ids_embedded, x)]
        step = replace(static_step(model, cache, bucket, own, device, invariant=invariant), pages=pages[shard])
        _see_one_another(own)
        # The home device's graph is queued last, as in steps: a copy after it begins only when all others have ended.
        graph, hidden, held = recorder.capture(
            layers_body(shards[shard], x, step, bucket, results, shard), None, own.ids
        )
        parts.append((copies_in, graph))
        kept += [step.rows, step.cos, step.sin, *(step.alt or ()), x, hidden, held]
    return PromptGraphs(SectionGraphs(parts), inputs, kept, hidden)


def embedding_body(model: LanguageModel, inputs: StagedTensors) -> Body:
    """Return the launch of the embedding, as a body of a capture. It returns the hidden state [T, hidden]."""
    embedding = model.modules[0]
    assert isinstance(embedding, Embedding)

    def run(_: Tensor | None) -> Tensor:
        return embedded(embedding, inputs.ids)

    return run


def layers_body(share: ShardLaunches, x: Tensor, step: Step, bucket: Bucket, results: PeerResults, shard: int) -> Body:
    """Return the layers' launches of one device over the embedded ids x, as a body of a capture.

    It returns the hidden state of the last tokens; x where the step only stores.
    """
    output_tokens: OutputTokens = "last" if bucket.last else "none"

    def run(_: Tensor | None) -> Tensor:
        stores = MarkedStores(results, shard, live=is_captured(x.device))
        ops = operators_for([share], [x], invariant=step.invariant)
        found = run_shares([share], [x], [step], stores.gather, ops, output_tokens)
        return x if found is None else found[0].clone()  # the next pass overwrites the results

    return run


def _see_one_another(inputs: StepTensors) -> None:
    """Give the tokens of each row places from 0 on, for the first run, which is not recorded and stores nothing.

    Prompts have no padding, which these kernels of attention need not know.
    """
    q_len = inputs.bucket.q_len
    places = torch.arange(q_len, device=inputs.buffer.device).repeat(inputs.bucket.batch)
    inputs.positions.copy_(places)
    inputs.rope_positions.copy_(places)
