"""Threads that share GPUs: a step's graphs, which wait for one another, are queued on all GPUs before other copies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from exl_core import transfer
from exl_core.execution import sections
from exl_core.execution.sections import SectionGraphs
from exl_core.execution.sharded.context import TensorParallel
from exl_core.execution.sharded.exchange import LocalExchange
from exl_core.execution.sharded.shares import Shares
from exl_core.placement import Placement

pytestmark = pytest.mark.covers("core: tensor-parallel")

HOME, OTHER = torch.device("cuda:0"), torch.device("cuda:1")
NAMES = [str(HOME), str(OTHER)]


class Queue:
    """The order of all work, and its lock. `tried`: set when a copy was queued or has to wait for the lock."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.tried = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.tried.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class OnGpu:
    """A tensor of a GPU that is not there; `queue` gets its copies to other GPUs."""

    dtype = torch.float16

    def __init__(self, device: torch.device, queue: Queue) -> None:
        self.device, self.queue = device, queue

    def to(self, device: torch.device, dtype: torch.dtype) -> OnGpu:
        if device != self.device:
            self.queue.order.append("copy")
            self.queue.tried.set()
        return OnGpu(device, self.queue)

    def cpu(self) -> OnGpu:
        return OnGpu(torch.device("cpu"), self.queue)


class Graph:
    """A graph of a step: while the first is queued, another thread tries to queue its copy."""

    def __init__(self, name: str, queue: Queue, meanwhile: Callable[[], object]) -> None:
        self._name, self._queue, self._meanwhile = name, queue, meanwhile

    def replay(self) -> None:
        self._queue.order.append(self._name)
        self._meanwhile()


@pytest.mark.parametrize("way", ["result", "input", "layers"])
def test_a_copy_of_another_thread_is_not_queued_between_the_graphs_of_a_step(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The copy on the first GPU would wait for the second GPU's graph, and that graph for the graph after the copy."""
    monkeypatch.setattr(transfer, "is_direct", lambda source, target: True)
    queue = Queue()
    monkeypatch.setattr(transfer, "queueing", queue)
    monkeypatch.setattr(sections, "queueing", queue)
    x: Any = OnGpu(HOME, queue)
    context = TensorParallel(NAMES, Shares((0.5, 0.5), (0.5, 0.5)), 2)
    ways: dict[str, Callable[[], object]] = {
        "result": lambda: LocalExchange(2).collect([(1, (1, 1))], [OnGpu(OTHER, queue)], x),  # type: ignore[list-item]
        "input": lambda: context.spread(x)(1),
        "layers": lambda: Placement(NAMES).carry(x, 1),
    }
    copier = threading.Thread(target=ways[way])

    def meanwhile() -> None:
        copier.start()
        queue.tried.wait()

    step: Any = [((), Graph("first", queue, meanwhile)), ((), Graph("second", queue, lambda: None))]
    SectionGraphs(step).replay()
    copier.join()
    assert queue.order == ["first", "second", "copy"]


def test_copies_through_host_memory_do_not_hold_up_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait on the host for their GPU, which may take long; no GPU waits for another one in them."""
    monkeypatch.setattr(transfer, "is_direct", lambda source, target: False)
    with transfer.queueing:
        found: Any = transfer.send(OnGpu(HOME, Queue()), OTHER)  # type: ignore[arg-type]
    assert found.device == OTHER
