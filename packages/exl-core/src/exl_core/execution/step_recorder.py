"""Records captured steps: the graphs of a step of one bucket, on each device, with all that they refer to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import DeviceError
from ..layers import Head
from ..lora.rows import RowAdapters
from .capturable import static_step
from .captured_step import CapturedStep
from .fused import JoinedLaunches
from .recorder import Recorder
from .sections import DeviceCopy, SectionGraphs, mirrored, sections_of
from .sharded.captured_prompts import record_prompt, refusal_of_memory
from .sharded.coverage import row_bytes
from .sharded.exchange_buffers import BuffersByRows, exchanges
from .sharded.launches import ResultRow, ShardLaunches
from .step_inputs import Bucket, StagedTensors, StepTensors

if TYPE_CHECKING:
    from ..contracts import Adapter, Cache
    from ..language_model import LanguageModel
    from .sharded.context import TensorParallel

__all__ = ["StepRecorder"]


class StepRecorder:
    """Records the captured steps of one model, which share memory, streams and exchange buffers."""

    def __init__(self) -> None:
        self._recorder = Recorder()
        self._buffers = BuffersByRows()

    def clear(self) -> None:
        """Drop memory that only captured steps use, after all of them were dropped."""
        self._recorder.clear()
        self._buffers.clear()

    def drop_pools(self) -> None:
        """Forget the pools of the graphs' memory, after the last graph was dropped."""
        self._recorder.drop_pools()

    def check_peers(self) -> None:
        """Raise DeviceError if a device of a sharded model waited in vain for another one. Waits for the GPUs."""
        self._buffers.check()

    def record(
        self,
        model: LanguageModel,
        joined: JoinedLaunches | str,
        cache: Cache,
        bucket: Bucket,
        sets: Sequence[tuple[Adapter, ...]] | None,
    ) -> CapturedStep:
        """Record a step with logits, a graph for each section of the model.

        Args:
            model: the model, on one device or several; not sharded.
            joined: its joined launches, or the reason why the modules' own passes run instead.
            cache: the cache of the pages.
            bucket: sizes of the step.
            sets: the combinations of adapters that rows can have; None for a step without adapters.
        """
        device = model.device
        assert device is not None
        assert isinstance(model.modules[-1], Head)
        inputs = StagedTensors(bucket, device)
        logits = self._recorder.logits_of(bucket.tokens, model.config.padded_vocab_size, device)
        sections = sections_of(model.placement)
        tensors, copies = mirrored(sections, inputs)
        steps = {name: static_step(model, cache, bucket, own, own.buffer.device) for name, own in tensors.items()}
        adapters: list[RowAdapters] = []
        if sets is not None:
            for name, step in steps.items():
                adapter_slots = torch.full((bucket.tokens,), -1, dtype=torch.int32, device=step.rows.device)
                adapters.append(RowAdapters(sets, adapter_slots, bucket.q_len))
                steps[name] = replace(step, loras=(adapters[-1],))

        kept = [t for step in steps.values() for t in (step.rows, step.cos, step.sin, *(step.alt or ()))]
        parts: list[tuple[list[DeviceCopy], torch.cuda.CUDAGraph]] = []
        state = tensors[sections[0].name].ids
        for section in sections:
            copies_in = [copies.pop(section.name)] if section.name in copies else []
            given = state
            if section.begin:
                given = torch.zeros_like(state, device=section.device)
                copies_in.append(DeviceCopy(state, given))
            body = section.body(model, joined, given, steps[section.name])
            out = logits if section is sections[-1] else None
            graph, state, held = self._recorder.capture(body, out, given)
            parts.append((copies_in, graph))
            kept += [state, held]
        whole = parts[0][1] if len(parts) == 1 else SectionGraphs(parts)
        return CapturedStep(
            graph=whole,
            inputs=inputs,
            logits=logits,
            kept=(*kept, *self._recorder.workspaces),
            adapters=tuple(adapters),
            adapter_slots=[-1] * bucket.tokens,
        )

    def record_prompt(self, model: LanguageModel, joined: JoinedLaunches, cache: Cache, bucket: Bucket) -> CapturedStep:
        """Record a step without logits of a model on one device; arguments as for `record`.

        Where the bucket has `last`, the step ends with the hidden states of all tokens.
        """
        assert model.device is not None
        inputs = StagedTensors(bucket, model.device)
        step = static_step(model, cache, bucket, inputs, inputs.buffer.device)

        def body(_: Tensor | None) -> Tensor:
            if bucket.last:
                return joined.states(inputs.ids, step)
            joined.store(inputs.ids, step)
            return inputs.ids

        graph, found, held = self._recorder.capture(body, None, inputs.ids)
        kept = (step.rows, step.cos, step.sin, *(step.alt or ()), held, *self._recorder.workspaces)
        hidden = found if bucket.last else None
        return CapturedStep(graph=graph, inputs=inputs, logits=None, kept=kept, hidden=hidden)

    def record_sharded(
        self, model: LanguageModel, shards: list[ShardLaunches], cache: Cache, bucket: Bucket
    ) -> CapturedStep:
        """Record a step or a prompt of a sharded model, a graph for each device, whose launches are `shards`."""
        context = model.tp_context
        assert context is not None, "a sharded model has one"
        records = self._record_sharded_prompt if not bucket.decodes else self._record_sharded_step
        return records(model, context, shards, cache, bucket)

    def _record_sharded_step(
        self,
        model: LanguageModel,
        context: TensorParallel,
        shards: list[ShardLaunches],
        cache: Cache,
        bucket: Bucket,
    ) -> CapturedStep:
        """Record graphs that wait for one another's results."""
        inputs = StagedTensors(bucket, context.home)
        logits = self._recorder.logits_of(bucket.tokens, model.config.padded_vocab_size, context.home)
        buffers = self._buffers.of_rows(context, bucket.tokens, row_bytes(model.modules, len(shards)))
        pages = context.pages(cache, bucket.page_size, (bucket.batch, model.config.head_dim))
        kept: list[Tensor] = []
        parts: list[tuple[list[DeviceCopy], torch.cuda.CUDAGraph]] = []
        for shard in reversed(range(len(shards))):
            device = context.device(shard)
            own = StepTensors(bucket, device) if shard else inputs
            # The home device's graph is queued last: it ends, and lets a later copy begin, only after the others.
            copies_in = [DeviceCopy(inputs.buffer, own.buffer)] if shard else []
            step = replace(static_step(model, cache, bucket, own, device), pages=pages[shard])
            body = shards[shard].body(own.ids, step, partial(exchanges, buffers, shard))
            graph, result, held = self._recorder.capture(body, None if shard else logits, own.ids)
            parts.append((copies_in, graph))
            kept += [step.rows, step.cos, step.sin, *(step.alt or ()), result, held]
        return CapturedStep(
            graph=SectionGraphs(parts),
            inputs=inputs,
            logits=logits,
            kept=(*kept, *self._recorder.workspaces),
            buffers=buffers,
            launches=shards,
        )

    def _record_sharded_prompt(
        self,
        model: LanguageModel,
        context: TensorParallel,
        shards: list[ShardLaunches],
        cache: Cache,
        bucket: Bucket,
    ) -> CapturedStep:
        devices = [context.device(shard) for shard in range(len(shards))]
        why = refusal_of_memory(shards, devices, bucket)
        if why is not None:
            raise DeviceError(why)
        row = ResultRow.of(shards[0].shape, context.home)
        results = self._buffers.results_of_rows(devices, bucket.tokens, row)
        made = record_prompt(model, shards, cache, bucket, results, self._recorder)
        kept = (*made.kept, *self._recorder.workspaces)
        return CapturedStep(
            graph=made.graphs,
            inputs=made.inputs,
            logits=None,
            kept=kept,
            buffers=results,
            launches=shards,
            hidden=made.hidden,
        )
