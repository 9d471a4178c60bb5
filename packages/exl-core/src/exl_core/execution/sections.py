"""The sections of a model that is split by layers, and captured steps that run one graph on each of its devices.

A step is one chain: the ids go from the last device, which samples them, to the first one; the hidden state goes from
device to device. The host queues graphs and copies and waits for nothing. Streams and the events of the copies order
everything: a device overwrites what it handed over only after it has received what depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..layers import Head
from ..placement import Placement
from ..transfer import is_direct, queueing
from .batch import Step
from .fused import JoinedLaunches
from .step_inputs import StagedTensors, StepTensors

if TYPE_CHECKING:
    from ..language_model import LanguageModel

__all__ = ["DeviceCopy", "Section", "SectionGraphs", "mirrored", "queue_copy", "sections_of"]


@dataclass(frozen=True, slots=True)
class Section:
    """Modules `begin` to `end` - 1 of a model, which are on one device."""

    begin: int
    end: int
    name: str
    """Name of the device in device maps."""
    device: torch.device

    def body(
        self, model: LanguageModel, joined: JoinedLaunches | str | None, given: Tensor, step: Step
    ) -> Callable[[Tensor | None], Tensor]:
        """Return the work of the section: joined launches, or the modules' own passes.

        Args:
            model: the loaded model.
            joined: the joined launches of the whole model, if it has any.
            given: ids int64 [T] on the device, or the hidden state [T, hidden], which is changed in place.
            step: the step with its tensors on the device.

        Returns:
            A function that takes the tensor for the logits, None unless the section has the head, and returns it or
            the hidden state.
        """
        modules = model.modules[self.begin : self.end]
        launches: JoinedLaunches | None = None
        if isinstance(joined, JoinedLaunches):
            launches = joined if len(modules) == len(model.modules) else joined.section(self.begin, self.end)

        def run(logits: Tensor | None) -> Tensor:
            if launches is not None:
                return launches.run(given, step, logits)
            x = given
            for module in modules:
                if logits is not None and isinstance(module, Head):
                    return module.forward(x, step, out=logits)
                x = module.forward(x, step)
            return x

        return run


def sections_of(placement: Placement) -> list[Section]:
    """Return the longest runs of modules that are on one device."""
    names = placement.names
    borders = [0, *(index for index in range(1, len(names)) if placement.crosses(index)), len(names)]
    return [Section(begin, end, names[begin], placement.device(begin)) for begin, end in pairwise(borders)]


class DeviceCopy:
    """A copy from a tensor of one device to a tensor of another, both at fixed addresses, contiguous and of one type.

    The copy goes through pinned memory where direct copies between the two GPUs fail.
    """

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source, self._target = source, target
        self._through: Tensor | None = None
        if not is_direct(source.device, target.device):
            self._through = torch.empty_like(source, device="cpu", pin_memory=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def queue(self) -> None:
        """Queue the copy after the current work of both devices' streams."""
        if self._through is None:
            queue_copy(self._source, self._target)
            return
        queue_copy(self._source, self._through)
        self._arrived.record(torch.cuda.current_stream(self._source.device))
        torch.cuda.current_stream(self._target.device).wait_event(self._arrived)
        queue_copy(self._through, self._target)


def queue_copy(source: Tensor, target: Tensor) -> None:
    """Queue a copy. Call it under `queueing`: between GPUs torch orders it with the current streams of both."""
    target.copy_(source, non_blocking=True)


class SectionGraphs:
    """The graphs of a captured step in the order of the layers, each after the copies that it needs.

    It takes the place of the one graph of a step on one device.
    """

    def __init__(self, parts: Sequence[tuple[Sequence[DeviceCopy], torch.cuda.CUDAGraph]]) -> None:
        self._parts = list(parts)

    def replay(self) -> None:
        """Queue the whole step on the current stream of each device.

        One step at a time: graphs of a sharded model wait for one another, so all devices must get steps in one order.
        """
        with queueing:
            for copies_in, graph in self._parts:
                for copy in copies_in:
                    copy.queue()
                graph.replay()


def mirrored(
    sections: Sequence[Section], inputs: StagedTensors
) -> tuple[dict[str, StepTensors], dict[str, DeviceCopy]]:
    """Return the inputs of a step on each device, by its name, and the copies that fill those of the other devices.

    The last device, which samples the ids, has `inputs` itself.
    """
    tensors: dict[str, StepTensors] = {sections[-1].name: inputs}
    copies: dict[str, DeviceCopy] = {}
    for section in sections[:-1]:
        if section.name not in tensors:
            own = tensors[section.name] = StepTensors(inputs.bucket, section.device)
            copies[section.name] = DeviceCopy(inputs.buffer, own.buffer)
    return tensors, copies
