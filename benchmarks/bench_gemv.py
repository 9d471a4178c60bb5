"""Measure quantized matmuls at the shapes of an 8B Llama: time, bandwidth, share of the read roof; with cuBLAS FP16.

    python benchmarks/bench_gemv.py [--quick | --tune]

The kernel is the one that a card runs for a matrix alone, the line's "kernel". In a step the launch before gemm_direct
packs its input, so "us_packed" leaves the launch out that packs it here, and the share of the roof is that of
"us_packed". Random weights. Weights rotate over at least 768 MB, launches are nodes of one graph. A case whose result
is wrong against float64 prints no speed and makes the script fail. JSON lines.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import torch
from gpu_bars import alone_keys
from gpu_timing import Timing, emit, environment, read_roof, time_graph
from torch import Tensor

from exl_kernels import _native
from exl_kernels.device import require_cuda
from exl_kernels.formats import Exl2Parts
from exl_kernels.linear.workspace import block_workspace

SHAPES = {
    "gateup": (4096, 28672),
    "head": (4096, 128256),
    "down": (14336, 4096),
    "qkv": (4096, 6144),
    "o": (4096, 4096),
}
ROTATE = 768 << 20
Tuning = _native.MatmulTuning
"""Slots and window of the ring."""
TUNINGS = [(8, 2), (8, 3), (8, 4), (10, 2), (10, 7), (5, 2), (7, 3)]


@dataclass(frozen=True)
class Plan:
    """Groups of an EXL2 matrix: shares of K by width, widest first, and rows in a group."""

    name: str
    widths: tuple[tuple[int, float], ...]
    group: int = 128
    permuted: bool = True

    def groups(self, k: int) -> list[int]:
        count = k // self.group
        bits: list[int] = []
        for width, share in self.widths:
            bits += [width] * round(share * count)
        return (bits + [self.widths[-1][0]] * count)[:count]


FOUR = Plan("4", ((4, 1.0),))
WIDTHS = [Plan(str(b), ((b, 1.0),)) for b in (2, 3, 5, 6, 8)]
MIXED = [Plan("5+4", ((5, 0.125), (4, 0.875))), Plan("4+3", ((4, 0.25), (3, 0.75))), Plan("4g32", ((4, 1.0),), 32)]
ORDERED = Plan("4, no permutation", ((4, 1.0),), permuted=False)


def random_exl2(k: int, n: int, plan: Plan) -> Exl2Parts:
    groups = plan.groups(k)
    first, table = 0, []
    for bits in groups:
        table += [bits, first]
        first += plan.group * bits // 32

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda").cpu()

    return Exl2Parts(
        words(first, n),
        words(len(groups), n // 8),
        (torch.rand(len(groups)) * 0.01 + 0.002).half(),
        torch.tensor(table, dtype=torch.int16),
        (torch.randperm(k) if plan.permuted else torch.arange(k)).to(torch.int32),
    )


class Rotating:
    """Copies of one matrix over more memory than the caches hold."""

    def __init__(self, k: int, n: int, plan: Plan) -> None:
        layout = _native.CudaLayout.from_exl2(plan.name, random_exl2(k, n, plan), 16)
        units, maxima, features = layout.units.cuda(), layout.maxima.cuda(), layout.features.cuda()
        row_of_feature = layout.row_of_feature.cuda()
        assert layout.image is not None, "it was packed as a whole"
        image = layout.image.cuda()
        self.bytes: int = image.nbytes
        count = max(2, -(-ROTATE // image.nbytes))
        self.copies = [
            _native.CudaMatrix(
                layout,
                image=image if i == 0 else image.clone(),
                units=units,
                maxima=maxima,
                features=features,
                row_of_feature=row_of_feature,
                bias=None,
                prescale=1.0,
            )
            for i in range(count)
        ]
        self.groups = [_native.CudaLinearGroup([copy]) for copy in self.copies]
        self.k, self.n = k, n
        torch.cuda.synchronize()

    def run(self, copy: int, x: Tensor, y: Tensor, programmatic: bool, tuning: Tuning | None = None) -> None:
        group, rows = self.groups[copy % len(self.groups)], x.shape[0]
        call = _native.MatmulCall(rows)
        plan = group.plan_alone(rows) if tuning is None else group.plan_with("gemv_ring", call, tuning)
        stream = torch.cuda.current_stream().cuda_stream
        scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device="cuda") if plan.scratch_bytes else None
        exchange = block_workspace(x.device, stream, plan.exchange_bytes)
        group.run(plan, x, y, _native.Launch(stream, programmatic), scratch=scratch, exchange=exchange)

    def packed(self, x: Tensor) -> Tensor | None:
        """The scratch memory of a call with `x` packed in it, or None where the kernel reads its input as it is."""
        group, stream = self.groups[0], torch.cuda.current_stream().cuda_stream
        plan = group.plan_alone(x.shape[0])
        if plan.kernel != "gemm_direct" or plan.input_columns is None:
            return None
        scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device="cuda")
        y = torch.empty((x.shape[0], self.n), dtype=x.dtype, device="cuda")
        group.run(plan, x, y, _native.Launch(stream, False), scratch=scratch)
        return scratch

    def time_packed(self, scratch: Tensor, y: Tensor) -> Timing:
        """Time of the matmul alone, whose input `packed` has packed: all copies read it in the same order."""
        launches = max(len(self.copies), 16)
        plans = [group.plan_alone(y.shape[0]) for group in self.groups]

        def body() -> None:
            launch = _native.Launch(torch.cuda.current_stream().cuda_stream, True)
            for i in range(launches):
                one = i % len(self.groups)
                self.groups[one].run(plans[one], None, y, launch, scratch=scratch)

        return time_graph(body, launches)

    def error(self, x: Tensor) -> float:
        """Relative RMS against float64 over the bit-exact weights (whose own rounding the kernels leave out: 2e-4)."""
        y = torch.full((x.shape[0], self.n), float("nan"), device="cuda")
        self.run(0, x, y, False)
        weight = torch.empty((self.k, self.n), dtype=torch.float16, device="cuda")
        self.copies[0].dequantize(weight, torch.cuda.current_stream().cuda_stream)
        worst = 0.0
        for part in (slice(0, 2048), slice(self.n - 2048, self.n)):
            want = x.double() @ weight[:, part].double()
            worst = max(worst, float((y[:, part] - want).norm() / want.norm()))
        return worst

    def time(self, x: Tensor, y: Tensor, programmatic: bool, tuning: Tuning | None = None) -> Timing:
        launches = max(len(self.copies), 16)

        def body() -> None:
            for i in range(launches):
                self.run(i, x, y, programmatic, tuning)

        return time_graph(body, launches)


def cublas(k: int, n: int, m: int) -> Timing:
    count = max(2, -(-ROTATE // (2 * k * n)))
    weights = [torch.randn(k, n, device="cuda", dtype=torch.float16) for _ in range(count)]
    x, y = torch.randn(m, k, device="cuda", dtype=torch.float16), torch.empty(m, n, device="cuda", dtype=torch.float16)

    def body() -> None:
        for weight in weights:
            torch.mm(x, weight, out=y)

    return time_graph(body, count, samples=10)


def measure(common: dict[str, object], roof: float, shape: str, plan: Plan, rows: list[int], peer: bool) -> bool:
    k, n = SHAPES[shape]
    matrix = Rotating(k, n, plan)
    right = True
    for m in rows:
        x = torch.randn(m, k, device="cuda", dtype=torch.float16)
        y = torch.empty(m, n, device="cuda", dtype=torch.float16)
        line = {**common, "bench": "gemv", "shape": shape, "k": k, "n": n, "bits": plan.name, "m": m}
        error = matrix.error(x)
        line["max_err"] = error
        if not error < 1e-3:
            emit({**line, "wrong": True})
            right = False
            continue
        plain, pdl = matrix.time(x, y, False), matrix.time(x, y, True)
        kernel, scratch = matrix.groups[0].plan_alone(m).kernel, matrix.packed(x)
        best = plain if kernel == "gemm_tile" else pdl
        if scratch is not None:
            best = matrix.time_packed(scratch, y)
            line["us_packed"] = best.p50
        line["kernel"] = kernel
        gbps = matrix.bytes / best.p50 / 1e3
        line |= alone_keys(str(common["gpu"]), shape, plan.name, m, gbps * 1e9 / roof)
        line |= {
            "bytes": matrix.bytes,
            "us_plain": plain.p50,
            "us_pdl": pdl.p50,
            "us_p10": best.p10,
            "us_p90": best.p90,
        }
        line |= {"gbps": gbps, "pct_of_read_roof": 100 * gbps * 1e9 / roof}
        if peer:
            line["us_cublas_fp16"] = cublas(k, n, m).p50
        emit(line)
    return right


def tune(common: dict[str, object], roof: float) -> bool:
    """Ring depths and windows, for whoever sets the defaults in rust/exl-cuda/src/ops/linear/ring/mod.rs."""
    right = True
    for shape in ("gateup", "down", "qkv", "o"):
        matrix = Rotating(*SHAPES[shape], FOUR)
        x = torch.randn(1, matrix.k, device="cuda", dtype=torch.float16)
        y = torch.empty(1, matrix.n, device="cuda", dtype=torch.float16)
        right &= matrix.error(x) < 1e-3
        for slots, window in TUNINGS:
            us = matrix.time(x, y, True, Tuning.ring(slots=slots, window=window)).p50
            share = 100 * matrix.bytes / us * 1e6 / roof
            emit(
                {
                    **common,
                    "bench": "gemv",
                    "shape": shape,
                    "slots_window": (slots, window),
                    "us_pdl": us,
                    "pct_of_read_roof": share,
                }
            )
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="4 bits and mixed widths at m = 1 only")
    parser.add_argument("--tune", action="store_true", help="only try ring depths and windows")
    options = parser.parse_args()
    quick = options.quick
    require_cuda("cuda")
    torch.manual_seed(1)
    common, roof = environment(), read_roof()
    emit({**common, "bench": "roof", "what": "read", "gbps": roof / 1e9})
    if options.tune:
        return 0 if tune(common, roof) else 1
    right = True
    for shape in SHAPES:
        rows = [1] if quick or shape == "head" else [1, 2, 4, 8, 16, 32, 64]
        right &= measure(common, roof, shape, FOUR, rows, peer=not quick and shape != "head")
    for shape in ("gateup", "down", "qkv", "o"):
        right &= measure(common, roof, shape, ORDERED, [1], peer=False)
    for plan in [*([] if quick else WIDTHS), *MIXED]:
        for shape in ("gateup", "down"):
            right &= measure(common, roof, shape, plan, [1], peer=False)
    emit({**common, "bench": "roof", "what": "read, again", "gbps": read_roof() / 1e9})
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
