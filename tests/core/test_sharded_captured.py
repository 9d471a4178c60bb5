"""Captured steps of a sharded model without a GPU: a replayed graph is a thread, all of which meet at each exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from captured_on_cpu import Graph, captured_on_cpu
from joined_on_cpu import FusedDouble, joined_on_cpu
from test_sharded_launches import OTHER_NORMS, PAGE, sharded, write, write_other
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Cache_TP, PagedParams
from exl_core.device import Device
from exl_core.errors import DeviceError
from exl_core.execution import captured
from exl_core.execution.sharded import exchange_buffers
from exl_core.execution.sharded.launches import ShardLaunches
from exl_core.loading.parallel_plan import plan_parallel
from exl_core.loading.sizes import CacheSize
from exl_kernels.peer import exchange_buffer_bytes

pytestmark = pytest.mark.covers("core: tensor-parallel")


SIZES = {
    "hidden_size": 384,
    "intermediate_size": 288,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 32,
    "vocab_size": 288,
}


class Buffers:
    """`ExchangeBuffers` of threads; as those of GPUs they are of no use once a GPU had another number of steps."""

    made: ClassVar[list[Buffers]] = []
    lost = False

    def __init__(self, devices: Sequence[torch.device], size: int, odd: Mapping[int, int]) -> None:
        self.sizes = [(size, max(size, odd.get(gpu, 0))) for gpu in range(len(devices))]
        self.nbytes = [exchange_buffer_bytes(size, odd.get(gpu, 0)) for gpu in range(len(devices))]
        self.steps = [0] * len(devices)
        self._brought: list[Tensor] = [torch.empty(0)] * len(devices)
        self._barrier = threading.Barrier(len(devices))
        Buffers.made.append(self)

    def begin_step(self, gpu: int) -> None:
        self.steps[gpu] += 1

    def gather(
        self,
        gpu: int,
        own: Tensor,
        full: Tensor,
        begins: Sequence[int],
        number: int,
        receivers: Sequence[int] | None,
        *,
        send: bool,
        receive: bool,
    ) -> None:
        assert send
        assert receive
        nbytes = full.numel() * (2 if receivers is None else 4)  # activations are half on a GPU
        for to in range(len(self.steps)) if receivers is None else receivers:
            assert nbytes <= self.sizes[to][number % 2]
        self._brought[gpu] = own
        self._barrier.wait()
        assert len(set(self.steps)) == 1, "marks of other steps never match"
        if receivers is None or gpu in receivers:
            full.copy_(torch.cat(self._brought, 1))
        self._barrier.wait()

    def check(self) -> None:
        if self.lost:
            raise DeviceError("waited in vain")


class Threads:
    """The graphs of a step that were replayed and wait for the others."""

    running: ClassVar[list[threading.Thread]] = []


def body(
    made: ShardLaunches, ids: Tensor, step: Any, exchanges: Callable[[bool], Any]
) -> Callable[[Tensor | None], Tensor]:
    def replay(logits: Tensor | None) -> None:
        with torch.inference_mode():
            made.run(ids, step, exchanges(True), logits)

    def run(logits: Tensor | None) -> Tensor:
        def begin() -> None:
            Threads.running.append(threading.Thread(target=replay, args=(logits,)))
            Threads.running[-1].start()
            while logits is not None and Threads.running:  # the last graph of a step is that of the first device
                Threads.running.pop().join()

        if Graph.recording is not None:
            Graph.recording.body = begin
        return ids if logits is None else logits

    return run


@pytest.fixture
def model(lab: Any, monkeypatch: pytest.MonkeyPatch) -> ExLlamaV2:
    """A model over three devices, whose steps are captured."""
    return capturing(monkeypatch, write(lab, "exl2", "LlamaForCausalLM", **SIZES))


def capturing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> ExLlamaV2:
    """The model over three devices, whose steps are captured."""
    made = sharded(monkeypatch, folder, [8.0, 8.0, 8.0])
    joined_on_cpu(monkeypatch)
    captured_on_cpu(monkeypatch)
    Buffers.made.clear()
    monkeypatch.setattr(captured, "refusal_of_access", lambda context: None)
    monkeypatch.setattr(exchange_buffers, "ExchangeBuffers", Buffers)
    monkeypatch.setattr(exchange_buffers, "free_deleted", lambda: None)
    monkeypatch.setattr(ShardLaunches, "body", body)
    return made


def steps_of(model: ExLlamaV2, ids: Tensor) -> Tensor:
    """Logits of steps of one token a row."""
    batch, count = ids.shape
    cache, found = ExLlamaV2Cache_TP(model, max_seq_len=2 * PAGE * batch), []
    table = torch.arange(2 * batch, dtype=torch.int32).view(batch, 2)
    for at in range(count):
        params = PagedParams(batch, table, torch.full((batch,), at, dtype=torch.int32), at, PAGE, 1)
        found.append(model.forward_chunk(ids[:, at : at + 1], cache, attn_params=params)["logits"].clone())
    return torch.cat(found, 1)


def eager(model: ExLlamaV2, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr("exl_core.execution.select.may_fuse", lambda model: False)
        return steps_of(model, ids)


def test_captured_steps_are_those_of_the_modules(lab: Any, model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over three devices; the exchange buffers have the bytes that a load plan counts for these numbers of rows."""
    for batch in (1, 2, 4, 8, 16):
        ids = lab.ids(batch, 6, vocab=288)
        steps = model.decode.steps
        found = steps_of(model, ids)
        assert model.decode.steps - steps == 6, model.decode.reason
        assert torch.equal(found, eager(model, ids, monkeypatch))
    assert [buffers.steps for buffers in Buffers.made] == [[6, 6, 6]] * 5
    held = [sum(buffers.nbytes[gpu] for buffers in Buffers.made) for gpu in range(3)]
    places = [Device(f"cuda:{at}", 8 << 30) for at in range(3)]
    plans = [
        plan_parallel(model.config, model.modules, places, CacheSize("fp16", 256), [8.0] * 3, separate=separate)[0]
        for separate in (False, True)
    ]
    planned = [shared.tables - alone.tables for shared, alone in zip(*(plan.devices for plan in plans), strict=True)]
    assert planned == held
    assert held[1] == held[2] < held[0]
    assert 4 * SIZES["vocab_size"] == Buffers.made[0].sizes[0][1]


@pytest.mark.parametrize("family", OTHER_NORMS)
def test_captured_steps_with_other_norms_are_too(
    lab: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str
) -> None:
    model = capturing(monkeypatch, write_other(tmp_path, family, **SIZES))
    for batch in (1, 4, 16):
        ids, steps = lab.ids(batch, 4, vocab=288), model.decode.steps
        found = steps_of(model, ids)
        assert model.decode.steps - steps == 4, model.decode.reason
        assert torch.equal(found, eager(model, ids, monkeypatch))


@pytest.mark.parametrize("apart", ["k_proj", "o_proj", "up_proj", "down_proj"])
def test_a_matmul_that_no_kernel_joins_runs_alone_in_the_captured_step(
    lab: Any, model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch, apart: str
) -> None:
    """The other matmuls of the step stay joined, and results are bitwise those of the modules."""
    ids, calls = lab.ids(2, 3, vocab=288), []
    for key in (None, apart):
        monkeypatch.setattr(FusedDouble, "apart", key)
        monkeypatch.setattr(FusedDouble, "calls", 0)
        model.decode.clear()
        steps = model.decode.steps
        found = steps_of(model, ids)
        assert model.decode.steps - steps == 3, model.decode.reason
        assert torch.equal(found, eager(model, ids, monkeypatch))
        calls.append(FusedDouble.calls)
    assert calls[0] * 3 == calls[1] * 4, "three of the four matmuls of a layer"


def test_a_step_that_some_devices_did_not_get_is_the_last_of_its_buffers(
    lab: Any, model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose devices waited in vain. Later steps are recorded anew."""
    ids = lab.ids(2, 6, vocab=288)
    expected, replay = steps_of(model, ids), Graph.replay
    cache = ExLlamaV2Cache_TP(model, max_seq_len=4 * PAGE)
    params = PagedParams(
        2, torch.arange(4, dtype=torch.int32).view(2, 2), torch.zeros(2, dtype=torch.int32), 0, PAGE, 1
    )
    assert torch.equal(model.forward_chunk(ids[:, :1], cache, attn_params=params)["logits"], expected[:, :1])
    pending = model.prelaunchable_step(1, cache, params)
    assert pending is not None
    queued: list[Graph] = []

    def interrupted(graph: Graph) -> None:
        queued.append(graph)
        if len(queued) == 2:
            raise KeyboardInterrupt
        Buffers.made[-1].begin_step(2)  # the graph of the last device, which is queued first

    with monkeypatch.context() as patch:
        patch.setattr(Graph, "replay", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pending.run(ids[:, :1])
    assert Graph.replay is replay
    assert pending.run(ids[:, :1]) is None
    assert torch.equal(steps_of(model, ids), expected)
    assert len(Buffers.made) == 2
    Buffers.made[-1].lost = True
    with pytest.raises(DeviceError, match="in vain"):
        model.check_peers()
    model.check_peers()
    assert torch.equal(steps_of(model, ids), expected)
    assert len(Buffers.made) == 3
