"""A GPU without memory, or lost: typed errors that say what to do, and what survives them; needs a GPU."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Cache_Q4, ExLlamaV2Config, PagedParams
from exl_core.errors import DeviceError

pytestmark = pytest.mark.cuda

FOLDER = Path(__file__).parent.parent / "golden" / "data" / "pylib-4m-exl2-4.5"


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("EXL_DEVICE", "cuda:0")
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def leave(megabytes: int) -> None:
    """Allow torch so much more than it holds now."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + megabytes * 2**20) / total)


@pytest.mark.usefixtures("on_gpu")
def test_out_of_memory_at_load_leaves_room_for_something_smaller() -> None:
    model = ExLlamaV2(ExLlamaV2Config(FOLDER))
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    leave(1)
    with pytest.raises(DeviceError, match="not enough GPU memory to load"):
        model.load()
    assert not model.loaded
    gc.collect()
    assert torch.cuda.memory_allocated() == before, "a failed load keeps memory"
    torch.cuda.set_per_process_memory_fraction(1.0)
    model.load()
    leave(24)
    with pytest.raises(DeviceError, match="smaller max_seq_len or a quantized cache"):
        ExLlamaV2Cache(model, max_seq_len=256 * 1024)
    cache = ExLlamaV2Cache_Q4(model, max_seq_len=1024)
    torch.cuda.set_per_process_memory_fraction(1.0)
    params = PagedParams(1, torch.arange(4, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int32), 0, 256, 1)
    assert model.forward_chunk(torch.tensor([[3]]), cache, attn_params=params)["logits"].isfinite().all()


@pytest.mark.usefixtures("on_gpu")
def test_out_of_memory_at_capture_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ExLlamaV2(ExLlamaV2Config(FOLDER))
    model.load()
    cache = ExLlamaV2Cache(model, max_seq_len=1024)
    params = PagedParams(1, torch.arange(4, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int32), 0, 256, 1)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("exl_core.decode.graphs.StepInputs", full)
        eager = model.forward_chunk(torch.tensor([[3]]), cache, attn_params=params)["logits"].clone()
        assert "could not be captured" in (model.decode.reason or "")
    model.decode.clear()
    assert torch.equal(model.forward_chunk(torch.tensor([[3]]), cache, attn_params=params)["logits"], eager)
    assert model.decode.count == 1


LOST = """
import sys, torch
from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, PagedParams
from exl_core.errors import DeviceError
from exl_kernels.norm import rms_norm
model = ExLlamaV2(ExLlamaV2Config(sys.argv[1]))
model.load()
cache = ExLlamaV2Cache(model, max_seq_len=1024)
params = PagedParams(1, torch.arange(4, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int32), 0, 256, 1)
model.forward_chunk(torch.tensor([[3]]), cache, attn_params=params)
x = torch.ones(2, 64, device="cuda")
try:  # an assertion on the device loses the context
    print(torch.zeros(3, device="cuda")[torch.tensor([10], device="cuda")])
except RuntimeError:
    pass
for call in (
    lambda: model.forward_chunk(torch.tensor([[3]]), cache, attn_params=params),
    lambda: model.forward_chunk(torch.tensor([[3] * 20]), cache, attn_params=params),
    lambda: rms_norm(x, x[0], 1e-5, out=x),
):
    try:
        call()
        print("no error")
    except DeviceError as error:
        print("DeviceError", error)
"""


def test_a_lost_device_is_a_typed_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOST, str(FOLDER)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "EXL_DEVICE": "cuda:0"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("DeviceError", "no error"))]
    assert len(lines) == 3, done.stdout + done.stderr
    for line in lines:
        assert line.startswith("DeviceError")
        assert "context is lost" in line
        assert "restart the process" in line
