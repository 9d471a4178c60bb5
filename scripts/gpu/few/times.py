"""Matmuls of 3 to 8 rows: results against the ring kernel's, times alone and of a layer's chained matmuls."""

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from bench_gemv import Plan, random_exl2
from gpu_timing import time_graph

from exl_kernels import _native

PLANS = {
    "5+4": Plan("5+4", ((5, 0.125), (4, 0.875))),
    "4": Plan("4", ((4, 1.0),)),
    "6+3+2": Plan("6+3+2", ((6, 0.2), (3, 0.5), (2, 0.3))),
    "4g32": Plan("4g32", ((4, 1.0),), 32),
}
Tuning = tuple[int, int, int]


def launch() -> _native.Launch:
    return _native.Launch(torch.cuda.current_stream().cuda_stream, True)


class Made:
    """A matrix of random codes, of which any number of copies can be had."""

    def __init__(self, k: int, n: int, plan: Plan, perm: torch.Tensor | None = None) -> None:
        parts = random_exl2(k, n, plan)
        if perm is not None:
            parts = parts._replace(q_invperm=perm.to(torch.int32))
        layout = self.layout = _native.CudaLayout.from_exl2(plan.name, parts, 16)
        self.units, self.maxima, self.features = layout.units.cuda(), layout.maxima.cuda(), layout.features.cuda()
        self.row_of_feature = layout.row_of_feature.cuda()
        image = self.layout.image
        assert image is not None, "of weights that were given"
        self.image = image.cuda()

    def copy(self) -> _native.CudaMatrix:
        return _native.CudaMatrix(
            self.layout,
            image=self.image.clone(),
            units=self.units,
            maxima=self.maxima,
            features=self.features,
            row_of_feature=self.row_of_feature,
            bias=None,
            prescale=1.0,
        )


def few(
    group: _native.CudaLinearGroup,
    x: torch.Tensor,
    y: torch.Tensor,
    residual: torch.Tensor | None = None,
    norm: _native.NormPrologue | None = None,
    tuning: Tuning | None = None,
) -> None:
    plan = planned(group, x.shape[0], residual is not None, norm is not None, tuning)
    scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device="cuda")
    group.run(plan, x, y, launch(), scratch=scratch, residual=residual, norm=norm)


def planned(
    group: _native.CudaLinearGroup, m: int, residual: bool, norm: bool, tuning: Tuning | None
) -> _native.MatmulPlan:
    cut, slots, window = tuning or (0, 0, 0)
    numbers = _native.MatmulTuning.few(cut=cut, slots=slots, window=window)
    call = _native.MatmulCall(m, residual=residual, norm="rms" if norm else None)
    return group.plan_with("gemm_few", call, numbers)


def check(k: int, ns: list[int], plan: Plan, gate: str | None, rows: tuple[int, ...]) -> tuple[int, int]:
    perm = torch.randperm(k)
    group = _native.CudaLinearGroup([Made(k, n, plan, perm if len(ns) > 1 else None).copy() for n in ns], gate)
    n = ns[0] if gate else sum(ns)
    right = wrong = 0
    for m in rows:
        x = torch.randn(m, k, device="cuda", dtype=torch.float16)
        residual = None if gate else torch.randn(m, n, device="cuda", dtype=torch.float16)
        want = torch.full((m, n), float("nan"), device="cuda", dtype=torch.float16)
        one = group.plan_with("gemv_ring", _native.MatmulCall(1, residual=residual is not None))
        for i in range(m):
            row = None if residual is None else residual[i : i + 1]
            group.run(one, x[i : i + 1], want[i : i + 1], launch(), residual=row)
        for cut in (1, 2, 4):
            if planned(group, m, residual is not None, False, (cut, 0, 0)).scratch_bytes == 0:
                continue
            got = torch.full_like(want, float("nan"))
            few(group, x, got, residual, None, (cut, 0, 0))
            torch.cuda.synchronize()
            if torch.equal(want, got):
                right += 1
            else:
                wrong += 1
                bad = (want != got).nonzero()
                print("DIFFERS", k, ns, plan.name, gate, "cut", cut, "m", m, len(bad), bad[:4].tolist(), flush=True)
    return right, wrong


def checks() -> None:
    shapes = [
        (256, [48]),
        (1024, [20000, 3000]),
        (1024, [512]),
        (4096, [4096]),
        (4096, [1024, 512, 176]),
        (2304, [208, 64]),
        (14336, [1072]),
    ]
    found = [check(k, ns, plan, None, (3, 8)) for (k, ns), plan in itertools.product(shapes, PLANS.values())]
    gated = itertools.product([(4096, 14336), (512, 3200)], list(PLANS.values())[:3])
    found += [check(k, [n, n], plan, "silu", (8,)) for (k, n), plan in gated]
    print("bits: right", sum(f[0] for f in found), "wrong", sum(f[1] for f in found), flush=True)


class Layer:
    def __init__(self, qkv: list[Made], o: Made, gate: list[Made], down: Made) -> None:
        self.qkv, self.o = _native.CudaLinearGroup([made.copy() for made in qkv]), _native.CudaLinearGroup([o.copy()])
        self.gate, self.down = (
            _native.CudaLinearGroup([made.copy() for made in gate], "silu"),
            _native.CudaLinearGroup([down.copy()]),
        )


def layers_of(plan: Plan) -> list[Layer]:
    perm = [torch.randperm(4096) for _ in range(2)]
    qkv = [Made(4096, n, plan, perm[0]) for n in (4096, 1024, 1024)]
    gate = [Made(4096, 14336, plan, perm[1])] * 2
    o, down = Made(4096, 4096, plan), Made(14336, 4096, plan)
    return [Layer(qkv, o, gate, down) for _ in range(4)]


def times(m: int, layers: list[Layer]) -> None:
    norm = _native.NormPrologue(torch.rand(4096, device="cuda") + 0.5, 1e-5, 0.0)
    x, wide = (torch.randn(m, k, device="cuda", dtype=torch.float16) for k in (4096, 14336))
    out = {n: torch.empty(m, n, device="cuda", dtype=torch.float16) for n in (4096, 6144, 14336)}

    def each(name: str, body: Callable[[Layer], None]) -> None:
        def all_of_them() -> None:
            for layer in layers * 4:
                body(layer)

        print(f"m {m} {name:34s}", round(time_graph(all_of_them, 16, samples=7, sample_ms=4.0).p50, 2), flush=True)

    def run(name: str, tuning: Tuning) -> None:
        if name == "qkv":
            each(f"few {name} {tuning}", lambda layer: few(layer.qkv, x, out[6144], None, norm, tuning))
        elif name == "o":
            each(f"few {name} {tuning}", lambda layer: few(layer.o, x, out[4096], x, None, tuning))
        elif name == "gate":
            each(f"few {name} {tuning}", lambda layer: few(layer.gate, x, out[14336], None, norm, tuning))
        else:
            each(f"few {name} {tuning}", lambda layer: few(layer.down, wide, out[4096], x, None, tuning))

    for name in ("qkv", "o", "gate", "down"):
        run(name, (0, 0, 0))

    def room(group: _native.CudaLinearGroup) -> torch.Tensor:
        return torch.empty(planned(group, m, False, False, None).scratch_bytes, dtype=torch.uint8, device="cuda")

    def chained(
        group: _native.CudaLinearGroup,
        x: torch.Tensor | None,
        y: torch.Tensor | None,
        scratch: torch.Tensor,
        residual: torch.Tensor | None = None,
        norm: _native.NormPrologue | None = None,
        onward: _native.NextInput | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        plan = planned(group, m, residual is not None, norm is not None, tuning)
        group.run(plan, x, y, launch(), scratch=scratch, residual=residual, norm=norm, next=onward, chained=x is None)

    def whole(layer: Layer) -> None:
        few(layer.qkv, x, out[6144], None, norm)
        few(layer.o, x, out[4096], x, None)
        rooms = room(layer.gate), room(layer.down)
        chained(layer.gate, x, None, rooms[0], norm=norm, onward=_native.NextInput(layer.down, rooms[1]))
        chained(layer.down, None, out[4096], rooms[1], residual=x)

    ordered = _native.NormPrologue(torch.rand(4096, device="cuda") + 0.5, 1e-5, 0.0)
    inputs = {group: room(group).zero_() for layer in layers for group in (layer.qkv, layer.o, layer.gate, layer.down)}

    def qkv(layer: Layer, tuning: Tuning | None = None) -> None:
        chained(layer.qkv, None, out[6144], inputs[layer.qkv], norm=ordered, tuning=tuning)

    def o(layer: Layer, tuning: Tuning | None = None) -> None:
        onward = _native.NextInput(layer.gate, inputs[layer.gate], True)
        chained(layer.o, None, x, inputs[layer.o], residual=x, onward=onward, tuning=tuning)

    def gate(layer: Layer, tuning: Tuning | None = None) -> None:
        onward = _native.NextInput(layer.down, inputs[layer.down])
        chained(layer.gate, None, None, inputs[layer.gate], norm=ordered, onward=onward, tuning=tuning)

    def down(layer: Layer, tuning: Tuning | None = None) -> None:
        onward = _native.NextInput(layer.qkv, inputs[layer.qkv], True)
        chained(layer.down, None, x, inputs[layer.down], residual=x, onward=onward, tuning=tuning)

    def all_chained(layer: Layer) -> None:
        for product in (qkv, o, gate, down):
            product(layer)

    each("a layer's matmuls, each packed", whole)
    for made in (qkv, o, gate, down):
        each(f"{made.__name__} packed", made)
    for tuning in ((2, 8, 0), (2, 9, 5)):
        each(f"down packed {tuning}", partial(down, tuning=tuning))
    each("a layer's matmuls chained", all_chained)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rows", type=int, nargs="*", default=[8])
    arguments.add_argument("--no-checks", action="store_true")
    args = arguments.parse_args()
    torch.manual_seed(1)
    if not args.no_checks:
        checks()
    layers = layers_of(PLANS["5+4"])
    for rows in args.rows:
        times(rows, layers)
