"""Times of the batch kernel through the binding, packing of activations included, for several plans of a launch."""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from bench_gemv import SHAPES, Plan, Rotating
from gpu_timing import time_graph

from exl_kernels import _native
from exl_kernels.linear.workspace import block_workspace

# (slots, 1: activations streamed or 2: kept, cut of K, warpgroups, looks); 0: the plan's own choice.
PLANS = (
    (0, 0, 0, 0, 0),
    (0, 2, 4, 2, 0),
    (0, 2, 4, 3, 0),
    (0, 2, 4, 4, 0),
    (0, 1, 4, 2, 0),
    (0, 1, 4, 3, 0),
    (0, 1, 1, 0, 0),
    (0, 1, 1, 2, 0),
)


def launches(rot: Rotating, x: torch.Tensor, y: torch.Tensor, plan: tuple[int, int, int, int, int], count: int) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    for i in range(count):
        group = rot.groups[i % len(rot.groups)]
        slots, activations, cut, groups, looks = plan
        tuning = _native.MatmulTuning.batch(slots=slots, activations=activations, cut=cut, groups=groups, looks=looks)
        made = group.plan_with("gemm_batch", _native.MatmulCall(x.shape[0]), tuning)
        scratch = torch.empty(made.scratch_bytes, dtype=torch.uint8, device="cuda")
        exchange = block_workspace(x.device, stream, made.exchange_bytes)
        group.run(made, x, y, _native.Launch(stream, True), scratch=scratch, exchange=exchange)


def main() -> None:
    torch.manual_seed(1)
    for shape in ("gateup", "down", "qkv", "o", "head"):
        k, n = SHAPES[shape]
        rot = Rotating(k, n, Plan("5+4", ((5, 0.125), (4, 0.875))))
        count = max(len(rot.copies), 16)
        for m in (16, 32, 64):
            x = torch.randn(m, k, device="cuda", dtype=torch.float16)
            y = torch.empty(m, n, device="cuda", dtype=torch.float16)
            times = {}
            for plan in PLANS:
                body = partial(launches, rot, x, y, plan, count)
                times[str(plan)] = round(time_graph(body, count, samples=5, sample_ms=3.0).p50, 2)
            print(shape, "m", m, times, flush=True)


if __name__ == "__main__":
    main()
