"""The warp ring kernel gives the results of `gemm_tile`, bitwise, in every shape and with every prologue and epilogue.

Its cards select it with EXL_SM80_RING=1 only; scripts/gpu/try_sm80.sh runs these tests that way.
"""

from __future__ import annotations

import itertools
import os
import random

import pytest
import torch
from internals import group_of
from test_cuda_linear import exl2_tensors, gptq_tensors
from torch import Tensor

from exl_kernels import _native
from exl_kernels.cuda_ops import gated_activation, rms_norm
from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.cuda import launch_matmul
from exl_kernels.linear.fused import FusedLinear, Norm

pytestmark = [pytest.mark.cuda, pytest.mark.needs("warp_ring")]

UNDER_A_TOOL = "EXL_SANITIZER" in os.environ  # as in attention_cases.py
ROWS = (1, 2, 5, 8) if UNDER_A_TOOL else range(1, 9)

# Groups of (bits, rows), and output features.
EXL2: dict[str, tuple[list[tuple[int, int]], int]] = {
    **{f"{bits} bits": ([(bits, 128)] * 7, 96) for bits in (2, 3, 4, 5, 6, 8)},
    **{f"{bits} bits, groups of 32": ([(bits, 32)] * 27, 64) for bits in (2, 3, 4, 5, 6, 8)},
    "mixed widths": ([(8, 128), (6, 128), (5, 128), (4, 128), (3, 128), (2, 128)], 160),
    "mixed widths, groups of 32": ([(8, 32), (6, 96), (5, 32), (4, 64), (3, 32), (2, 160)], 64),
    "short last group": ([(4, 128)] * 5 + [(4, 96)], 32),
    "one chunk": ([(4, 32)], 32),
    "one unit": ([(6, 64)] * 4, 32),
    "17 units": ([(5, 128)] * 3 + [(4, 128)] * 31, 32),
    "23 units": ([(4, 128)] * 45 + [(3, 64)], 32),
    "21 units of 2 bits": ([(2, 128)] * 41 + [(2, 64)], 32),
}
GPTQ: dict[str, tuple[int, int, int, int, bool]] = {
    "4 bits": (4, 640, 128, 64, False),
    "4 bits, act-order": (4, 640, 128, 64, True),
    "4 bits, groups of 32": (4, 1056, 32, 64, False),
    "2 bits, act-order": (2, 256, 64, 64, True),
    "3 bits, act-order": (3, 384, 64, 96, True),
    "8 bits": (8, 320, 64, 32, False),
    "8 bits, act-order": (8, 1024, 128, 32, True),
}


def matrix(case: str, seed: int = 0) -> QuantMatrix:
    if case.startswith("gptq "):
        bits, k, group, n, act_order = GPTQ[case.removeprefix("gptq ")]
        return QuantMatrix.from_gptq(
            gptq_tensors(bits, k, group, n, act_order, seed), bits=bits, group_size=group, device="cuda"
        )
    groups, n = EXL2[case]
    return QuantMatrix.from_exl2(exl2_tensors(groups, n, seed), device="cuda")


def activations(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def by(made: QuantMatrix, kernel: str, x: Tensor, tuning: tuple[int, ...] | None = None) -> Tensor:
    """x @ W in float32 by the kernel of this name."""
    out = torch.full((x.shape[0], made.out_features), float("nan"), device="cuda")
    group, bf16 = group_of(made), x.dtype == torch.bfloat16
    launch_matmul(group, group.plan_with(kernel, x.shape[0], bfloat16=bf16, tuning=tuning), x, out)
    return out


@pytest.mark.parametrize("case", [*EXL2, *(f"gptq {name}" for name in GPTQ)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_matrix(case: str, dtype: torch.dtype) -> None:
    """x in rows (`gemv_ring`) and packed by another launch (`gemm_few`)."""
    made = matrix(case)
    for m in ROWS:
        x = activations(m, made.in_features, dtype, seed=m)
        want = by(made, "gemm_tile", x)
        assert torch.equal(by(made, "gemv_ring", x), want), m
        assert torch.equal(by(made, "gemm_few", x), want), m


@pytest.mark.parametrize(("phases", "teams", "stages"), list(itertools.product((1, 4), (1, 2, 4), (2, 3, 4))))
def test_every_shape(phases: int, teams: int, stages: int) -> None:
    """In one walk or one for each quarter of K, with rings of any length."""
    # Slots have the size of the largest unit, and the rings fit 99 KB.
    most = {"21 units of 2 bits": 16, "one chunk": 16, "17 units": 6, "gptq 4 bits, act-order": 6, "mixed widths": 5}
    for case in (case for case, slots in most.items() if teams * stages <= slots):
        made = matrix(case)
        for m in (1, 2) if "units" in case else (1, 3, 8):
            x = activations(m, made.in_features, torch.float16, seed=m)
            want = by(made, "gemm_tile", x)
            assert torch.equal(by(made, "gemm_few", x, (phases, stages, teams)), want), (case, m)
            if phases == 1:
                assert torch.equal(by(made, "gemv_ring", x, (stages, teams)), want), (case, m)


def test_blocks_of_many_tiles() -> None:
    """More tiles than SMs, a half tile at the end, in one walk and in phases."""
    groups = [(4, 128)] * 2
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    made = QuantMatrix.from_exl2(exl2_tensors(groups, 16 * (5 * sms + 3) + 8), device="cuda")
    for m in (1, 4):
        x = activations(m, made.in_features, torch.float16)
        want = by(made, "gemm_tile", x)
        assert torch.equal(by(made, "gemv_ring", x), want), m
        for phases in (1, 4):
            assert torch.equal(by(made, "gemm_few", x, (phases, 0, 0)), want), (m, phases)


def test_rows_that_do_not_fit_shared_memory_at_once() -> None:
    """`down` of an 8B Llama and a little more: a block walks its tiles once for each quarter of K."""
    made = QuantMatrix.from_exl2(exl2_tensors([(5, 128)] * 8 + [(4, 128)] * 104 + [(4, 64)], 48), device="cuda")
    for m in (2, 8):
        x = activations(m, made.in_features, torch.float16)
        want = by(made, "gemm_tile", x)
        assert torch.equal(by(made, "gemv_ring", x), want), m
        assert torch.equal(by(made, "gemm_few", x), want), m


@pytest.mark.parametrize("seed", range(10) if UNDER_A_TOOL else range(60))
def test_random_matmuls_with_prologues_and_epilogues(seed: int) -> None:
    """One to three matrices in one order or their own; with or without a norm, gate and residual."""
    rng = random.Random(seed)
    dtype, gated = rng.choice((torch.float16, torch.bfloat16)), rng.random() < 0.4
    # Whole groups: matrices in one launch have entries of one size.
    size = 32 if rng.random() < 0.3 else 128
    k = size * rng.randint(1, 1920 // size)
    rows = [min(size, k - at) for at in range(0, k, size)]
    shared_order = rng.random() < 0.5
    sizes = [8 * rng.randint(1, 40) for _ in range(2 if gated else rng.randint(1, 3))]
    if gated:
        sizes[1] = sizes[0]
    matrices = []
    for i, n in enumerate(sizes):
        widths = rng.choices((2, 3, 4, 5, 6, 8), k=rng.randint(1, 3))
        groups = [(widths[j % len(widths)], count) for j, count in enumerate(rows)]
        tensors = exl2_tensors(groups, n, seed + i)
        if shared_order:
            tensors["q_invperm"] = torch.randperm(k, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
        if rng.random() < 0.3:
            tensors["bias"] = torch.randn(n, generator=torch.Generator().manual_seed(i)).half()
        matrices.append(QuantMatrix.from_exl2(tensors, device="cuda"))
    weight = (torch.rand(k, generator=torch.Generator().manual_seed(seed)) + 0.5).to(dtype).cuda()
    norm = Norm(weight, 1e-5, rng.choice((0.0, 1.0))) if rng.random() < 0.6 else None
    fused = FusedLinear(matrices, norm=norm, activation="silu" if gated else None, dtype=dtype)
    for m in (rng.randint(1, 2), rng.randint(3, 8)):
        x = activations(m, k, dtype, seed)
        inner = rms_norm(x, norm.weight, norm.eps, weight_offset=norm.offset) if norm else x
        parts = [by(made, "gemm_tile", inner).to(dtype) for made in matrices]
        want = gated_activation(parts[0], parts[1], "silu") if gated else torch.cat(parts, 1)
        h = activations(m, want.shape[1], dtype, seed + 1) if not gated and rng.random() < 0.4 else None
        assert fused.kernel(m) == ("gemv_ring" if m < 3 else "gemm_few")
        got = fused(x, torch.full_like(want, float("nan")), h)
        assert torch.equal(got, want if h is None else h + want), (k, sizes, m)


@pytest.mark.parametrize("k", [256, 1024, 1152])
def test_a_chained_layer_launches_nothing_between_its_matmuls(k: int) -> None:
    """The attention's output, gate and up, down, and the next layer's q, k, v, each packed by the one before."""
    o, down = matrix_of(k, k, 1), matrix_of(512, k, 2)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(5)).to(torch.int32)
    gate, up = (matrix_of(k, 512, 3 + i, order) for i in range(2))
    norm = Norm(torch.rand(k, generator=torch.Generator().manual_seed(6)).half().cuda() + 0.5, 1e-5, 1.0)
    layer = [FusedLinear([o]), FusedLinear([gate, up], norm=norm, activation="gelu"), FusedLinear([down])]
    for m in (3, 8) if UNDER_A_TOOL else range(3, 9):
        attended, before = (activations(m, k, torch.float16, seed) for seed in (m, m + 9))
        want = before + by(o, "gemm_tile", attended).half()
        inner = rms_norm(want, norm.weight, norm.eps, weight_offset=norm.offset)
        opened, raised = (by(made, "gemm_tile", inner).half() for made in (gate, up))
        gated = gated_activation(opened, raised, "gelu")
        want_after = want + by(down, "gemm_tile", gated).half()
        x = before.clone()
        counts = launches()
        normed = layer[0].chained(attended, x, x, layer[1])
        assert normed is not None
        packed = layer[1].chained(normed, following=layer[2])
        assert torch.equal(x, want), m
        assert packed is not None
        assert layer[2].chained(packed, x, x) is None
        assert launches() - counts == 3
        assert torch.equal(x, want_after), m


def matrix_of(k: int, n: int, seed: int, order: Tensor | None = None) -> QuantMatrix:
    rows = [min(128, k - at) for at in range(0, k, 128)]
    tensors = exl2_tensors([(5 if i == 0 else 4, count) for i, count in enumerate(rows)], n, seed)
    if order is not None:
        tensors["q_invperm"] = order
    return QuantMatrix.from_exl2(tensors, device="cuda")


def launches() -> int:
    """Launches of the kernel so far."""
    return sum(count for name, count in _native.cuda_launches().items() if name.startswith("warp_ring_"))
