"""The roofs of this GPU: read and copy bandwidth, cost of an empty graph node, host cost of a launch. JSON lines."""

from __future__ import annotations

import time

import torch
from gpu_timing import emit, environment, read_roof, time_graph

from exl_kernels import _native, cuda_ops


def host_microseconds(call: object, count: int = 2000) -> float:
    """Time the host spends on one of `count` calls; the GPU is idle before and drained after."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()  # type: ignore[operator]
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken * 1e6 / count


def main() -> None:
    ones = torch.ones(1, 8, device="cuda")
    cuda_ops.rms_norm(ones, ones[0], 1e-6)  # loads the kernels, which a capture cannot
    common = environment()
    roof = read_roof()
    emit({**common, "bench": "roof", "what": "read", "gbps": roof / 1e9})
    a = torch.randint(-(2**31), 2**31 - 1, (2**29,), dtype=torch.int32, device="cuda")
    b = torch.empty_like(a)

    def copying() -> None:
        b.copy_(a)

    copy = time_graph(copying, 1, sample_ms=15.0)
    emit({**common, "bench": "roof", "what": "copy, read + write", "gbps": 2 * a.nbytes / copy.p50 / 1e3})
    for programmatic in (False, True):

        def nodes(programmatic: bool = programmatic) -> None:
            launch = _native.Launch(torch.cuda.current_stream().cuda_stream, programmatic)
            for _ in range(200):
                _native.cuda_probe_empty(0, launch)

        timing = time_graph(nodes, 200)
        emit({**common, "bench": "roof", "what": "empty graph node", "pdl": programmatic, "us": timing.p50})
    x, w = torch.randn(1, 4096, device="cuda", dtype=torch.float16), torch.ones(4096, device="cuda")
    out = torch.empty_like(x)
    launch = _native.Launch(torch.cuda.current_stream().cuda_stream, True)
    emit(
        {
            **common,
            "bench": "roof",
            "what": "host, empty launch",
            "us": host_microseconds(lambda: _native.cuda_probe_empty(0, launch)),
        }
    )
    emit(
        {
            **common,
            "bench": "roof",
            "what": "host, rms_norm through its entry point",
            "us": host_microseconds(lambda: cuda_ops.rms_norm(x, w, 1e-6, out=out)),
        }
    )


if __name__ == "__main__":
    main()
