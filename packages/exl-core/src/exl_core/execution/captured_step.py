"""A captured step with all that its graph refers to, and its replay for the rows of one pass.

The classes of a captured step, from the recorded graph to the engine's prelaunched step:

| class | package | what it is | used in |
|---|---|---|---|
| `CapturedStep` | exl_core | the graph of one bucket, with the tensors that it refers to | many passes |
| `StepTensors` | exl_core | the graph's inputs on one device: ids, positions, slots, block table | many passes |
| `StagedTensors` | exl_core | `StepTensors` with pinned copies, through which the host fills them | many passes |
| `UnrecordedStep` | exl_core | a step whose `CapturedStep` is recorded when the pass runs | one pass |
| `ReplayInputs` | exl_core | the inputs of a replay on the host, all but the ids | one pass |
| `StepReplay` | exl_core | one replay of a `CapturedStep` for known pages; ids may come later | one pass |
| `TokenTarget` | exl_kernels.sampling | where the sampler writes the ids of a `StepReplay` | one pass |
| `PrelaunchedStep` | exl_generate | the jobs' next `StepReplay`, launched before the host has the tokens | one pass |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from exl_kernels.sampling import TokenTarget
from exl_kernels.staging import StepStage

from ..device import device_error
from ..errors import DeviceError
from ..lora.rows import RowAdapters
from .sections import SectionGraphs
from .step_inputs import ReplayInputs, StagedTensors

if TYPE_CHECKING:
    from exl_kernels.peer import ExchangeBuffers, PeerResults

    from ..contracts import Cache
    from .sharded.launches import ShardLaunches

__all__ = ["CapturedStep", "StepReplay", "UnrecordedStep", "on_cpu"]


@dataclass(kw_only=True)
class CapturedStep:
    """A captured step with everything that its addresses refer to."""

    graph: torch.cuda.CUDAGraph | SectionGraphs
    inputs: StagedTensors
    logits: Tensor | None  # float32 [tokens, padded vocabulary]; None where the bucket has none
    kept: tuple[Tensor, ...]  # rope tables, hidden states between devices, counters of attention, workspaces
    adapters: tuple[RowAdapters, ...] = ()  # on each device
    adapter_slots: list[int] = field(
        default_factory=list
    )  # contents of the adapters' tensor at this point of the stream
    views: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    buffers: ExchangeBuffers | PeerResults | None = None  # through which devices of a sharded model exchange results
    launches: Sequence[ShardLaunches] = ()  # of a sharded model: norm weights of each device
    hidden: Tensor | None = None  # [T, hidden] before the last norm, where the bucket has `last`

    def send_adapter_slots(self, adapter_slots: list[int]) -> None:
        """Queue the copy of the adapters of the first rows unless the GPUs have them; the other rows are padding."""
        if adapter_slots == self.adapter_slots:
            return
        padded = torch.tensor(
            adapter_slots + [-1] * (self.inputs.bucket.tokens - len(adapter_slots)), dtype=torch.int32
        )
        pinned = padded.pin_memory()  # torch keeps it until the streams have passed its copies
        for rows in self.adapters:
            rows.slots.copy_(pinned, non_blocking=True)
        self.adapter_slots = adapter_slots

    def logits_of(self, batch: int, q_len: int) -> Tensor:
        """Return a cached view [batch, q_len, columns], since making one costs host time in every step."""
        view = self.views.get((batch, q_len))
        if view is None:
            assert self.logits is not None, "the step only stores"
            with torch.inference_mode(False):
                view = self.views[batch, q_len] = self.logits[: batch * q_len].view(batch, q_len, -1)
        return view


class StepOwner(Protocol):
    """The owner of captured steps, as their replays see it: `DecodeGraphs`."""

    steps: int
    generation: int

    def clear(self) -> None:
        """Drop every captured step."""
        ...


class StepReplay:
    """A replay of a captured step for the rows of one pass. It must run before any other pass of its model, or never.

    The ids come from the host (`fill`), or from the sampler, which writes them on the GPU (`inputs`).

    Its logits are float32 [B, q, padded vocabulary], in memory that the model's next step overwrites: `is_current` says
    whether the logits are still valid. After `DecodeGraphs.clear` the step is dropped: it cannot run any more.
    """

    __slots__ = ("_cache", "_filled", "_generation", "_given", "_longest", "_number", "_owner", "captured")

    def __init__(self, owner: StepOwner, cache: Cache, captured: CapturedStep, given: ReplayInputs) -> None:
        #: what is replayed; passes of the same size share it
        self.captured = captured
        self._owner, self._cache, self._given = owner, cache, given
        self._longest = given.longest
        self._number = -1
        self._generation = owner.generation
        self._filled: tuple[StepStage, Tensor | None] | None = None  # the inputs, and the ids that are on the GPU

    @property
    def is_current(self) -> bool:
        """Whether the logits returned last are valid: the step was not dropped, and no other captured step has run."""
        return self._number == self._owner.steps and not self._dropped

    @property
    def _dropped(self) -> bool:
        """Whether the model's captured steps were dropped, whose memory and exchange buffers may be out of step."""
        return self._generation != self._owner.generation

    def run(self, ids: Tensor) -> Tensor | None:
        """Queue the step with its ids and return its logits.

        Args:
            ids: as for `fill`.

        Returns:
            The logits; None, with nothing queued, if the ids are invalid or the step was dropped.
        """
        if not self.fill(ids):
            return None
        self.send()
        return self.launch()

    def fill(
        self, ids: Tensor, counts: Sequence[int] = (), firsts: Sequence[int] = (), longest: int | None = None
    ) -> bool:
        """Check the inputs and pack them for `send`. Nothing is queued.

        Args:
            ids: [B, q], int64 on the CPU, or any integers on the model's GPU in stream order, which are clamped to the
                vocabulary.
            counts: tokens of each row that are no padding; () where all are.
            firsts: the first row of each row's sequence; () where each row is one.
            longest: tokens of the longest sequence after the step, where rows have padding.

        Returns:
            False if the ids or other inputs are invalid, or the step was dropped.
        """
        if self._dropped:
            return False
        there, given = ids.is_cuda, self._given
        tokens = None if there else on_cpu(ids, torch.int64)
        if (tokens is None and not there) or tuple(ids.shape) != given.shape:
            return False
        inputs = self.captured.inputs
        try:
            stage = inputs.fill(tokens, given, counts, firsts)
        except RuntimeError as error:
            raise _typed(error) from error
        if stage is None:
            return False
        self._filled = stage, ids if there else None
        self._longest = self._longest if longest is None else longest
        return True

    def send(self) -> None:
        """Queue the copy of the inputs that `fill` packed. Raises DeviceError."""
        assert self._filled is not None, "filled"
        stage, ids = self._filled
        self._filled = None
        try:
            stage.send(self.captured.inputs.buffer)
            if ids is not None:
                self._ids().copy_(ids.reshape(-1)).clamp_(0, self._given.limits.vocab - 1)
        except RuntimeError as error:
            raise _typed(error) from error

    def inputs(self) -> TokenTarget | None:
        """Return the inputs that work queued before `launch` must copy and fill in; None if the step is invalid or was
        dropped.

        The ids are int64 [B * q] on the model's GPU; the other inputs are staged for the copy.
        """
        if self._dropped:
            return None
        given = self._given
        inputs = self.captured.inputs.stage(given)
        return None if inputs is None else TokenTarget(self._ids(), given.limits.vocab, inputs)

    def _ids(self) -> Tensor:
        return self.captured.inputs.first_ids(self._given.shape[0] * self._given.shape[1])

    def launch(self) -> Tensor:
        """Queue the step after its inputs were copied and its ids filled in; return its logits.

        Raises:
            DeviceError: the GPU reported an error, or the step was dropped after `inputs`.
        """
        self._check_kept()
        self._owner.steps += 1
        self._replay()
        self._number = self._owner.steps
        return self.captured.logits_of(*self._given.shape)

    def store(self) -> None:
        """Queue a step that only stores keys and values, after `send`. The logits of other steps stay valid.

        Raises:
            DeviceError: as for `launch`.
        """
        self._check_kept()
        self._replay()

    def _check_kept(self) -> None:
        if self._generation != self._owner.generation:
            raise DeviceError("the captured step was dropped before its launch; prepare it again")

    def _replay(self) -> None:
        try:
            if self.captured.adapters:
                self.captured.send_adapter_slots(self._given.adapter_slots)
            self.captured.graph.replay()
        except BaseException as error:
            if self.captured.buffers is not None:
                # Some devices may run this step and others not: their exchanges would never match again.
                self._owner.clear()
            if isinstance(error, RuntimeError):
                raise _typed(error) from error
            raise
        self._cache.current_seq_len = self._longest


class UnrecordedStep(NamedTuple):
    """A step that a captured step covers, but none of its bucket has been recorded yet."""

    record: Callable[[], StepReplay | str]
    """Record it. Returns its replay, or the reason why it could not be recorded."""


def _typed(error: RuntimeError) -> Exception:
    return device_error("run a decode step", error) or error


def on_cpu(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the tensor as contiguous CPU memory of `dtype`; None if it is on another device."""
    if not tensor.is_cpu:
        return None
    return tensor if tensor.dtype == dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()
