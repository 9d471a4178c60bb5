"""Captured steps without a GPU: all of `exl_core.execution` but the recording, whose replay is the modules' own pass.

What a first run of padding leaves in the logits that it is given is NaN here. A copy to the GPU is made when the stream
comes to it: when a graph is replayed, or somebody waits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from exl_core import ExLlamaV2
from exl_core.execution import captured as graphs
from exl_core.execution import recorder, sections, select, step_inputs
from exl_core.execution.batch import Step
from exl_core.execution.captured import DecodeGraphs
from exl_core.execution.fused import JoinedLaunches
from exl_core.layers import Module
from exl_kernels.staging import StepStage

__all__ = ["Stream", "captured_on_cpu"]


class Stream:
    """Queued work, in order; `held`: nothing runs until somebody waits."""

    queue: ClassVar[list[Callable[[], object]]] = []
    held: ClassVar[bool] = False
    passed: ClassVar[int] = 0  # of all that was ever queued

    device = torch.device("cpu")

    def __init__(self, device: object = None) -> None: ...

    @classmethod
    def add(cls, work: Callable[[], object]) -> None:
        cls.queue.append(work)
        if not cls.held:
            cls.run()

    @classmethod
    def end(cls) -> int:
        return cls.passed + len(cls.queue)

    @classmethod
    def run(cls, to: int | None = None) -> None:
        """All that is queued, or what was queued up to a place."""
        while cls.queue and (to is None or cls.passed < to):
            work = cls.queue.pop(0)
            cls.passed += 1
            work()

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None:
        self.run()


class Event:
    """Waits for what was queued before the place where it was put last; for nothing before that."""

    def __init__(self) -> None:
        self._place = 0

    def record(self, stream: object = None) -> None:
        self._place = Stream.end()

    def synchronize(self) -> None:
        Stream.run(self._place)


class Graph:
    recording: ClassVar[Graph | None] = None
    body: Callable[[], None]

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        Graph.recording = self

    def capture_end(self) -> None:
        Graph.recording = None

    def replay(self) -> None:
        Stream.add(self.body)


class Modules(JoinedLaunches):
    """The modules' own pass, of those that the model has when it is recorded."""

    def __init__(self, model: ExLlamaV2, begin: int = 0, end: int | None = None) -> None:
        self._model, self._begin_at, self._end_at = model, begin, end

    def section(self, begin: int, end: int) -> JoinedLaunches:
        return Modules(self._model, begin, end)

    def refusal_of_rows(self, rows: int) -> str | None:
        return None

    def run(self, given: Tensor, step: Step, logits: Tensor | None = None) -> Tensor:
        hidden = self._model.config.hidden_size
        out = given.new_empty(len(given), hidden, dtype=torch.float32) if logits is None else logits
        if Graph.recording is None:
            Stream.add(lambda: out.fill_(float("nan")))
        else:
            modules = list(self._model.modules)[self._begin_at : self._end_at]
            Graph.recording.body = lambda: self._compute(modules, given, step, out)
        return out

    def store(self, ids: Tensor, step: Step) -> None:
        if Graph.recording is not None:
            modules = list(self._model.modules)[: self._model.last_kv_layer_idx + 1]
            Graph.recording.body = lambda: self._store(modules, ids, step)

    def states(self, ids: Tensor, step: Step) -> Tensor:
        out = torch.full((len(ids), self._model.config.hidden_size), float("nan"), dtype=torch.float32)
        if Graph.recording is not None:
            modules = list(self._model.modules)[: self._model.head_layer_idx - 1]
            Graph.recording.body = lambda: self._into(modules, ids, step, out)
        return out

    def _into(self, modules: list[Module], x: Tensor, step: Step, out: Tensor) -> None:
        with torch.inference_mode():
            for module in modules:
                x = module.forward(x, step)
            out.copy_(x)

    def _store(self, modules: list[Module], x: Tensor, step: Step) -> None:
        with torch.inference_mode():
            for module in modules:
                x = module.forward(x, step)

    def _compute(self, modules: list[Module], x: Tensor, step: Step, out: Tensor) -> None:
        assert bool((step.positions >= 0).all()), "these stand-ins know no padding: ask for 1, 2, 4, .. rows"
        self._into(modules, x, step, out)


def captured_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Every model on the CPU has captured steps, as those on a GPU have."""
    Stream.queue.clear()
    patch.setattr(Stream, "held", False)
    patch.setattr(select, "may_fuse", lambda model: True)
    patch.setattr(DecodeGraphs, "joined_launches", lambda graphs, model: "these stand-ins are for captured steps")
    patch.setattr(graphs, "refusal_of_model", lambda model: "a module is wrapped" if model.hooked else None)
    patch.setattr(graphs, "joined_launches_of", Modules)
    patch.setattr(recorder, "counters", lambda device: nullcontext(torch.zeros(1)))

    def send(stage: StepStage, to: Tensor) -> int:
        Stream.add(lambda: to.copy_(stage.pinned))
        return 0

    def copy(source: Tensor, target: Tensor) -> None:
        Stream.add(lambda: target.copy_(source))

    patch.setattr(StepStage, "send", send)
    patch.setattr(sections, "queue_copy", copy)
    patch.setattr(step_inputs, "stream_of", lambda memory: 0)
    cuda: dict[str, Any] = {
        "current_stream": Stream,
        "Stream": Stream,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": Graph,
        "Event": Event,
        "graph_pool_handle": lambda: (0, 0),
    }
    for name, stand_in in cuda.items():
        patch.setattr(torch.cuda, name, stand_in)
