"""A GPU without memory, or lost: typed errors that say what to do, and what survives them; needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, PagedParams

pytestmark = pytest.mark.cuda

FOLDER = Path(__file__).parent.parent / "golden" / "data" / "pylib-4m-exl2-4.5"

BEGIN = """
import sys, torch
from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Cache_Q4, ExLlamaV2Config, PagedParams
from exl_core.errors import DeviceError
from exl_kernels.norm import rms_norm

def say(call):
    try:
        call()
        print("fine", flush=True)
    except DeviceError as error:
        print("DeviceError", str(error).replace(chr(10), " "), flush=True)

def allow(megabytes):
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + megabytes * 2**20) / total)

def step(q_len):
    params = PagedParams(1, torch.arange(4, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int32), 0, 256, q_len)
    return model.forward_chunk(torch.full((1, q_len), 3), cache, attn_params=params)["logits"]

model = ExLlamaV2(ExLlamaV2Config(sys.argv[1]))
"""
MEMORY = (
    BEGIN
    + """
allow(1)
say(model.load)
print("left", model.loaded, torch.cuda.memory_allocated(), flush=True)
torch.cuda.set_per_process_memory_fraction(1.0)
say(model.load)
allow(32)
say(lambda: ExLlamaV2Cache(model, max_seq_len=256 * 1024))
torch.cuda.empty_cache()
cache = ExLlamaV2Cache_Q4(model, max_seq_len=1024)
torch.cuda.set_per_process_memory_fraction(1.0)
print("finite", bool(step(1).isfinite().all()))
"""
)
LOST = (
    BEGIN
    + """
model.load()
cache = ExLlamaV2Cache(model, max_seq_len=1024)
step(1)
x = torch.ones(2, 64, device="cuda")
try:  # an assertion on the device loses the context
    print(torch.zeros(3, device="cuda")[torch.tensor([10], device="cuda")])
except RuntimeError:
    pass
say(lambda: step(1))
say(lambda: step(20))
say(lambda: rms_norm(x, x[0], 1e-5, out=x))
"""
)


def lines_of(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script, str(FOLDER)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "EXL_DEVICE": "cuda:0"},
    )
    print(done.stdout, done.stderr[:4000])
    return [
        line for line in done.stdout.splitlines() if line.split(" ")[0] in ("DeviceError", "fine", "left", "finite")
    ]


def test_out_of_memory_at_load_leaves_room_for_something_smaller() -> None:
    failed, left, loaded, cache, finite = lines_of(MEMORY)
    assert "not enough GPU memory to load" in failed
    assert "use a smaller model" in failed
    assert left == "left False 0", "a failed load keeps memory"
    assert loaded == "fine"
    assert "smaller max_seq_len or a quantized cache" in cache
    assert finite == "finite True"


def test_a_lost_device_is_a_typed_error() -> None:
    lines = lines_of(LOST)
    assert len(lines) == 3
    for line in lines:
        assert line.startswith("DeviceError")
        assert "context is lost" in line
        assert "restart the process" in line


def test_out_of_memory_at_capture_runs_that_bucket_eagerly_and_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXL_DEVICE", "cuda:0")
    model = ExLlamaV2(ExLlamaV2Config(FOLDER))
    model.load()
    cache = ExLlamaV2Cache(model, max_seq_len=1024)

    def step(batch: int) -> torch.Tensor:
        pages = torch.arange(batch, dtype=torch.int32)[:, None]
        params = PagedParams(batch, pages, torch.zeros(batch, dtype=torch.int32), 0, 256, 1)
        return model.forward_chunk(torch.full((batch, 1), 3), cache, attn_params=params)["logits"].clone()

    alone = step(1)
    assert model.decode.count == 1

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("exl_core.execution.step_recorder.StagedTensors", full)
        eager = step(2)
        assert "could not be captured" in (model.decode.reason or "")
        (failure,) = model.decode.failures
        assert (failure.kind, failure.bucket.batch, failure.tries) == (torch.OutOfMemoryError, 2, 1)
        assert torch.equal(step(1), alone)
        assert model.decode.reason is None, "other steps are as before"
        for _ in range(failure.pause):
            step(2)
        assert model.decode.failures[0].tries == 1
        step(2)
        assert model.decode.failures[0].tries == 2
        assert model.decode.failures[0].pause == 2 * failure.pause
    for _ in range(model.decode.failures[0].pause):
        step(2)
    assert model.decode.count == 1
    assert torch.equal(step(2), eager)
    assert (model.decode.count, model.decode.failures) == (2, [])
