"""Graph timing, the read roof and the line to print, shared by the GPU benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from exl_kernels.cuda_ops import read_all
from exl_kernels.device import cuda_status
from exl_kernels.selection import Card


@dataclass(frozen=True)
class Timing:
    """Microseconds: median, tenth and ninetieth percentile of the samples."""

    p50: float
    p10: float
    p90: float


def graph_of(body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`body` run once eagerly and then captured."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def timed_events() -> tuple[Any, Any]:
    """Return two events that record times. torch has no types for their constructor."""
    make: Any = torch.cuda.Event
    return make(enable_timing=True), make(enable_timing=True)


def time_graph(body: Callable[[], object], launches: int, *, samples: int = 20, sample_ms: float = 8.0) -> Timing:
    """Time of one of the `launches` in `body`, by events around replays of its graph; warmed up by time."""
    graph = graph_of(body)
    start, end = timed_events()

    def once(replays: int) -> float:
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / replays

    replays = max(1, int(sample_ms * 1e3 / max(once(1), 1.0)))
    until = time.perf_counter() + 0.1
    while time.perf_counter() < until:
        once(replays)
    taken = sorted(once(replays) / launches for _ in range(samples))
    return Timing(taken[len(taken) // 2], taken[len(taken) // 10], taken[len(taken) * 9 // 10])


def read_roof(gigabytes: float = 4.0) -> float:
    """Read bandwidth of this GPU in bytes a second, over a buffer of random bytes far larger than its caches."""
    words = int(gigabytes * 2**30) // 4
    buffer = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device="cuda")
    sink = torch.zeros(16, dtype=torch.uint8, device="cuda")

    def body() -> None:
        read_all(buffer, sink)

    return buffer.nbytes / (time_graph(body, 1, sample_ms=15.0).p50 * 1e-6)


def environment() -> dict[str, object]:
    """The keys every line carries: GPU (with its code, where older), driver, torch, commit, date."""
    status = cuda_status()
    gpu, device = torch.cuda.get_device_name(), torch.cuda.current_device()
    major, minor = torch.cuda.get_device_capability(device)
    if (code := Card.device(device).code) != 10 * major + minor:
        gpu += f", code for sm_{code}"
    commit = os.environ.get("EXL_COMMIT")
    if commit is None:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    now = time.gmtime()
    return {
        "gpu": gpu,
        "driver_cuda": status.driver_version,
        "torch": torch.__version__,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d", now),
        "time": time.strftime("%H:%M:%S", now),
    }


def emit(line: dict[str, object]) -> None:
    """One JSON object on one line."""
    rounded = {
        k: round(v, 4 if abs(v) < 10 else 1) if isinstance(v, float) and abs(v) > 1e-3 else v for k, v in line.items()
    }
    print(json.dumps(rounded), flush=True)
