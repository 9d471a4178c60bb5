"""Launching: torch's streams, captured graphs, dependent launch, foreign devices and streams; needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from exl_kernels import _native, cuda_ops
from exl_kernels.activation import gated_activation
from exl_kernels.device import cuda_status, programmatic_launch, require_cuda, set_programmatic_launch
from exl_kernels.errors import DeviceError
from exl_kernels.norm import rms_norm

pytestmark = pytest.mark.cuda

UNDER_A_TOOL = "EXL_SANITIZER" in os.environ  # as in attention_cases.py


@pytest.fixture(params=[False, True], ids=["plain", "programmatic"])
def launch_mode(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = programmatic_launch()
    set_programmatic_launch(request.param)
    yield request.param
    set_programmatic_launch(before)


def chain(x: torch.Tensor, w: torch.Tensor, length: int) -> torch.Tensor:
    """A dependent chain in which every kernel reads what the one before wrote, over two alternating buffers."""
    a, b = x.clone(), torch.empty_like(x)
    for _ in range(length):
        rms_norm(a, w, 1e-6, out=b)
        gated_activation(b, b, "silu", out=a)
    return a


def test_status_matches_torch() -> None:
    status = cuda_status()
    assert status.reason is None
    assert len(status.devices) == torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    device = status.devices[0]
    assert device.name == properties.name
    assert device.sm_count == properties.multi_processor_count
    assert device.compute_capability == (properties.major, properties.minor)
    assert require_cuda("cuda").index == torch.cuda.current_device()


def test_a_chain_on_a_side_stream(launch_mode: bool) -> None:
    x, w = torch.randn(7, 2048, device="cuda"), torch.rand(2048, device="cuda") + 0.5
    length = 10 if UNDER_A_TOOL else 50
    want = chain(x, w, length)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = chain(x, w, length)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(got, want)


def test_capture_and_replay(launch_mode: bool) -> None:
    x, w = torch.randn(7, 2048, device="cuda", dtype=torch.float16), torch.rand(2048, device="cuda") + 0.5
    chain(x, w, 1)  # loads the kernels, which a capture cannot
    static = x.clone()
    graph = torch.cuda.CUDAGraph()
    length = 10 if UNDER_A_TOOL else 100
    with torch.cuda.graph(graph):
        out = chain(static, w, length)
    for seed in range(3):
        torch.manual_seed(seed)
        fresh = torch.randn_like(x)
        static.copy_(fresh)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, chain(fresh, w, length))


def test_programmatic_launch_changes_no_bit() -> None:
    x, w = torch.randn(132, 4096, device="cuda", dtype=torch.float16), torch.rand(4096, device="cuda") + 0.5
    before = programmatic_launch()
    results = []
    for enabled in (False, True, True, True):
        set_programmatic_launch(enabled)
        results.append(chain(x, w, 200))
    set_programmatic_launch(before)
    assert all(torch.equal(r, results[0]) for r in results)


OTHER_PROBE = """
.version 7.0
.target sm_75
.address_size 64
.visible .entry probe_read(.param .u64 p, .param .u64 count) { ret; }
.visible .entry probe_empty() { ret; }
"""
READS = """
import torch
from exl_kernels import cuda_ops
from exl_kernels.errors import DeviceError
buffer, sink = (torch.zeros(n, dtype=torch.uint8, device="cuda:0") for n in (1 << 20, 16))
try:
    cuda_ops.read_all(buffer, sink)
except DeviceError as error:
    print(error)
"""


def test_an_image_of_other_parameters_is_rejected(tmp_path: Path) -> None:
    """Where `EXL_CUDA_IMAGES` names kernels of other sources. Drivers of CUDA 12.4 and later tell their parameters."""
    (tmp_path / "probe.fatbin").write_bytes(OTHER_PROBE.encode() + b"\0")
    emulated = "import emulated_plugin\n" if "emulated_plugin" in sys.modules else ""
    done = subprocess.run(
        [sys.executable, "-c", emulated + READS],
        env={**os.environ, "EXL_CUDA_IMAGES": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
    )
    words = "probe_read of the loaded image takes parameters of [8, 8] bytes, in this build's sources of [8, 8, 8]"
    assert words in done.stdout, done.stderr


def test_launches_are_counted_and_the_benchmarks_probes_run() -> None:
    stream = torch.cuda.current_stream().cuda_stream
    _native.cuda_probe_empty(0, _native.Launch(stream, False))
    before = _native.cuda_launches()
    buffer, sink = (torch.zeros(n, dtype=torch.uint8, device="cuda:0") for n in (1 << 20, 16))
    for _ in range(3):
        _native.cuda_probe_empty(0, _native.Launch(stream, False))
    cuda_ops.read_all(buffer, sink)
    torch.cuda.synchronize()
    now = _native.cuda_launches()
    assert {name: now[name] - before[name] for name in now if now[name] != before[name]} == {
        "probe_empty": 3,
        "probe_read": 1,
    }


def test_a_foreign_stream_is_refused() -> None:
    x = torch.randn(2, 64, device="cuda")
    if torch.cuda.device_count() < 2:
        with pytest.raises(DeviceError, match="cuda:7 does not exist"):
            require_cuda("cuda:7")
        return
    with torch.cuda.device(1):
        other = torch.cuda.Stream()
    launch = _native.Launch(other.cuda_stream, False)
    with pytest.raises(DeviceError, match="another GPU"):
        _native.cuda_rms_norm(x, weight=x[0], out=torch.empty_like(x), eps=1e-6, weight_offset=0.0, launch=launch)


def test_tensors_of_the_second_gpu_need_no_device_guard() -> None:
    last = torch.cuda.device_count() - 1
    x = torch.randn(3, 256, device=f"cuda:{last}")
    w = torch.rand(256, device=x.device)
    got = rms_norm(x, w, 1e-6)
    assert got.device == x.device
    assert torch.equal(got.cpu(), rms_norm(x.cpu().cuda(), w.cpu().cuda(), 1e-6).cpu())
    assert torch.cuda.current_device() == 0


def test_launches_from_another_thread() -> None:
    import threading

    x, w = torch.randn(3, 256, device="cuda"), torch.rand(256, device="cuda")
    want, got = rms_norm(x, w, 1e-6), []
    thread = threading.Thread(target=lambda: got.append(rms_norm(x, w, 1e-6)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(got[0], want)
