"""Buffers of sampling on a GPU when memory runs out, without a GPU: a call that fails leaves the next one alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_kernels import _native
from exl_kernels.sampling import Plan, Row, Sampled
from exl_kernels.sampling import cuda as sampling_cuda


class Memory:
    """Allocates on the CPU; the allocation with number `fails` finds none."""

    def __init__(self) -> None:
        self.made = 0
        self.fails = -1

    def instead_of(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*size: int, pin_memory: bool = False, device: object = None, dtype: Any = None) -> Tensor:
            self.made += 1
            if self.made == self.fails:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return make(*size, dtype=dtype)

        return allocate


class Stream:
    cuda_stream = 0

    def __init__(self, device: object = None) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...


def fill(_: _native.SamplingWorkspace, rows: list[Row], *__: Any) -> SimpleNamespace:
    """Stand in for the native function: the bytes that a call needs, here as many as its masks have words."""
    needed = sum(0 if row.mask is None else len(row.mask) for row in rows)
    return SimpleNamespace(bytes=needed, count=len(rows))


def launch(workspace: _native.SamplingWorkspace, staged: SimpleNamespace, *_: Any) -> None:
    if workspace.rows < staged.count:
        raise ValueError("the workspace has fewer rows than there are requests")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    found = Memory()
    monkeypatch.setattr(sampling_cuda, "_places", {})
    monkeypatch.setattr(sampling_cuda, "stream_of", lambda memory: 0)
    for name in ("empty", "zeros"):
        monkeypatch.setattr(torch, name, found.instead_of(getattr(torch, name)))
    for name in ("Event", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(_native, "cuda_sample_fill", fill)
    monkeypatch.setattr(_native, "cuda_sample_launch", launch)
    monkeypatch.setattr(_native, "cuda_sample_answers", lambda workspace, count: [Sampled(7, 1.0)] * count)
    return found


def rows(count: int, width: int, mask: int = 1) -> list[Row]:
    words: Any = range(mask)
    return [Row(Plan(size=width), torch.ones(width), mask=words) for _ in range(count)]


@pytest.mark.parametrize(
    ("count", "width", "mask"), [(4, 100, 1), (1, 9000, 1), (1, 100, 1 << 19)], ids=["rows", "columns", "staging"]
)
def test_a_call_without_memory_leaves_buffers_that_fit_each_other(
    memory: Memory, count: int, width: int, mask: int
) -> None:
    """Whichever allocation fails, the error says so, and later calls of that size or less are answered."""
    small, large = rows(1, 100), rows(count, width, mask)
    sampling_cuda.launch(small).collect()
    before = memory.made
    failures = 0
    for number in (1, 2, 3, 4):
        memory.made, memory.fails = 0, number
        try:
            sampling_cuda.launch(large).collect()
        except torch.OutOfMemoryError:
            failures += 1
            assert len(sampling_cuda.launch(small).collect()) == 1
        else:
            break
    assert before >= 6
    assert failures >= 2, "nothing has grown"
    memory.fails = -1
    assert len(sampling_cuda.launch(large).collect()) == count
    assert len(sampling_cuda.launch(small).collect()) == 1


@pytest.mark.parametrize("wrong", ["device_copy", "shaped", "maxima", "sums", "wide", "tails"])
def test_buffers_that_do_not_fit_each_other_are_refused(wrong: str) -> None:
    buffers = {
        "tails": torch.zeros(2, 2, 4096, dtype=torch.int32),
        "staging": torch.zeros(64, dtype=torch.uint8),
        "device_copy": torch.zeros(64, dtype=torch.uint8),
        "shaped": torch.zeros(2, 4096),
        "maxima": torch.zeros(2, 2048, dtype=torch.int32),
        "sums": torch.zeros(2, 2048, dtype=torch.int64),
        "wide": torch.zeros(_native.SamplingWorkspace.wide_bytes(2), dtype=torch.uint8),
    }
    assert _native.SamplingWorkspace(**buffers).rows == 2
    with pytest.raises(ValueError, match=wrong):
        _native.SamplingWorkspace(**buffers | {wrong: buffers[wrong][1:]})
    with pytest.raises(ValueError, match=wrong):
        _native.SamplingWorkspace(**buffers | {wrong: buffers[wrong].double()})


def test_an_interrupted_launch_is_waited_for_before_its_buffers_are_filled_again(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    one = rows(1, 100)
    sampling_cuda.launch(one).collect()
    assert waited == []
    with monkeypatch.context() as patch:
        patch.setattr(_native, "cuda_sample_launch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sampling_cuda.launch(one)
    sampling_cuda.launch(one).collect()
    assert len(waited) == 1
    sampling_cuda.launch(one).collect()
    assert len(waited) == 1


def test_a_launch_that_is_not_collected_yet_keeps_its_answers(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers hold one launch: the next one reads the answers out first. Waiting for one launch waits only once."""
    events: list[str] = []

    class Event(Stream):
        def synchronize(self) -> None:
            events.append("wait")

    def launch_one(workspace: _native.SamplingWorkspace, *_: Any) -> None:
        events.append("launch")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("wait for all"))
    monkeypatch.setattr(_native, "cuda_sample_launch", launch_one)
    monkeypatch.setattr(
        _native, "cuda_sample_answers", lambda workspace, count: [Sampled(events.count("launch"), 1.0)] * count
    )
    first = sampling_cuda.launch(rows(1, 100))
    assert events == ["launch"]
    second = sampling_cuda.launch(rows(2, 100))
    assert events == ["launch", "wait", "launch"]
    assert second.collect() == [Sampled(2, 1.0)] * 2
    assert first.collect() == [Sampled(1, 1.0)]
    assert events == ["launch", "wait", "launch", "wait"]


def test_a_launch_that_fails_is_waited_for_before_the_next(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    with monkeypatch.context() as patch:
        patch.setattr(_native, "cuda_sample_launch", lambda *_: (_ for _ in ()).throw(RuntimeError("no launch")))
        with pytest.raises(RuntimeError, match="no launch"):
            sampling_cuda.launch(rows(1, 100))
    assert waited == []
    assert len(sampling_cuda.launch(rows(1, 100)).collect()) == 1
    assert len(waited) == 1
