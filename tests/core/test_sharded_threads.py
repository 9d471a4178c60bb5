"""Threads that share GPUs: a step's graphs, which wait for one another, are queued on all GPUs before other copies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from exl_core.execution.sections import SectionGraphs
from exl_core.execution.sharded import LocalExchange, Shares, TensorParallel, transfer
from exl_core.placement import Placement

pytestmark = pytest.mark.covers("core.md: tensor-parallel")

HOME, OTHER = torch.device("cuda:0"), torch.device("cuda:1")
NAMES = [str(HOME), str(OTHER)]


class OnGpu:
    """A tensor of a GPU that is not there; `queued` gets its copies to other GPUs."""

    dtype = torch.float16

    def __init__(self, device: torch.device, queued: list[str]) -> None:
        self.device, self.queued = device, queued

    def to(self, device: torch.device, dtype: torch.dtype) -> OnGpu:
        if device != self.device:
            self.queued.append("copy")
        return OnGpu(device, self.queued)

    def cpu(self) -> OnGpu:
        return OnGpu(torch.device("cpu"), self.queued)


class Graph:
    """A graph of a step: while the first is queued, another thread tries to queue its copy."""

    def __init__(self, name: str, queued: list[str], meanwhile: Callable[[], object]) -> None:
        self._name, self._queued, self._meanwhile = name, queued, meanwhile

    def replay(self) -> None:
        self._queued.append(self._name)
        self._meanwhile()


@pytest.mark.parametrize("way", ["result", "input", "layers"])
def test_a_copy_of_another_thread_is_not_queued_between_the_graphs_of_a_step(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The first GPU would wait with the copy for the second one's graph, and that for the graph behind the copy."""
    monkeypatch.setattr(transfer, "_arrives", lambda source, target: True)
    queued: list[str] = []
    x: Any = OnGpu(HOME, queued)
    context = TensorParallel(NAMES, Shares((0.5, 0.5), (0.5, 0.5)), 2)
    ways: dict[str, Callable[[], object]] = {
        "result": lambda: LocalExchange(2).collect([(1, (1, 1))], [OnGpu(OTHER, queued)], x),  # type: ignore[list-item]
        "input": lambda: context.spread(x)(1),
        "layers": lambda: Placement(NAMES).carry(x, 1),
    }
    copier = threading.Thread(target=ways[way])

    def meanwhile() -> None:
        copier.start()
        copier.join(0.2)  # ends only if the copy was queued

    step: Any = [((), Graph("first", queued, meanwhile)), ((), Graph("second", queued, lambda: None))]
    SectionGraphs(step).replay()
    copier.join()
    assert queued == ["first", "second", "copy"]


def test_copies_through_host_memory_do_not_hold_up_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait on the host for their GPU, which may take long; no GPU waits for another one in them."""
    monkeypatch.setattr(transfer, "_arrives", lambda source, target: False)
    with transfer.queueing:
        found: Any = transfer.send(OnGpu(HOME, []), OTHER)  # type: ignore[arg-type]
    assert found.device == OTHER
