"""`gemm_direct` gives the results of `gemm_tile`, bitwise, for every width and with every prologue and epilogue.

Cards before Hopper select it for up to eight rows; every card can run it.
"""

from __future__ import annotations

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
from exl_kernels.linear.cuda import CudaQuantMatrix, launch_matmul
from exl_kernels.linear.fused import FusedLinear, FusedNorm

pytestmark = pytest.mark.cuda

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


def by(made: QuantMatrix, kernel: str, x: Tensor) -> Tensor:
    """x @ W in float32 by the kernel of this name."""
    out = torch.full((x.shape[0], made.out_features), float("nan"), device="cuda")
    group, call = group_of(made), _native.MatmulCall(x.shape[0], bfloat16=x.dtype == torch.bfloat16)
    launch_matmul(group, group.plan_with(kernel, call), x, out)
    return out


class Direct:
    """Matmuls by `gemm_direct`, which newer cards do not select."""

    def __init__(self, fused: FusedLinear) -> None:
        self.group = group_of(fused)
        self.bf16, self.norm = fused.dtype == torch.bfloat16, fused.norm
        self.prologue = self.packed_prologue = None
        if fused.norm is not None:
            weight, first = fused.norm.weight.float(), fused.matrices[0]
            assert isinstance(first, CudaQuantMatrix)
            self.prologue = _native.NormPrologue(weight, fused.norm.eps, fused.norm.offset)
            packed = first.in_layout(weight + fused.norm.offset)
            self.packed_prologue = _native.NormPrologue(packed, fused.norm.eps, 0.0)

    def plan(self, m: int, residual: bool = False) -> _native.MatmulPlan:
        norm = None if self.norm is None else "rms"
        return self.group.plan_with(
            "gemm_direct", _native.MatmulCall(m, bfloat16=self.bf16, norm=norm, residual=residual)
        )

    def __call__(
        self,
        m: int,
        x: Tensor,
        out: Tensor | None,
        residual: Tensor | None = None,
        following: Direct | None = None,
        packed: bool = False,
    ) -> Tensor:
        """Multiply m rows: x, or those that the launch before `packed` in x. Return the packed input of `following`."""
        onward, next_input = torch.empty(0), None
        if following is not None:
            onward = torch.empty(following.plan(m).scratch_bytes, dtype=torch.uint8, device="cuda")
            next_input = _native.NextInput(following.group, onward, following.norm is not None)
        launch_matmul(
            self.group,
            self.plan(m, residual is not None),
            None if packed else x,
            out,
            scratch=x if packed else None,
            residual=residual,
            norm=self.packed_prologue if packed else self.prologue,
            next_input=next_input,
            chained=packed,
        )
        return onward


@pytest.mark.parametrize("case", [*EXL2, *(f"gptq {name}" for name in GPTQ)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_matrix(case: str, dtype: torch.dtype) -> None:
    made = matrix(case)
    for m in ROWS:
        x = activations(m, made.in_features, dtype, seed=m)
        want = by(made, "gemm_tile", x)
        assert torch.equal(by(made, "gemm_direct", x), want), m


def test_more_tiles_than_blocks_that_are_resident() -> None:
    """With a half tile at the end."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    made = QuantMatrix.from_exl2(exl2_tensors([(4, 128)] * 2, 16 * (5 * sms + 3) + 8), device="cuda")
    for m in (1, 4):
        x = activations(m, made.in_features, torch.float16)
        assert torch.equal(by(made, "gemm_direct", x), by(made, "gemm_tile", x)), m


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
    norm = FusedNorm(weight, 1e-5, rng.choice((0.0, 1.0))) if rng.random() < 0.6 else None
    direct = Direct(FusedLinear(matrices, norm=norm, activation="silu" if gated else None, dtype=dtype))
    for m in (rng.randint(1, 2), rng.randint(3, 8)):
        x = activations(m, k, dtype, seed)
        inner = rms_norm(x, norm.weight, norm.eps, weight_offset=norm.offset) if norm else x
        parts = [by(made, "gemm_tile", inner).to(dtype) for made in matrices]
        want = gated_activation(parts[0], parts[1], "silu") if gated else torch.cat(parts, 1)
        h = activations(m, want.shape[1], dtype, seed + 1) if not gated and rng.random() < 0.4 else None
        got = torch.full_like(want, float("nan"))
        direct(m, x, got, h)
        assert torch.equal(got, want if h is None else h + want), (k, sizes, m)


@pytest.mark.parametrize("k", [256, 1024, 1152])
def test_a_chained_layer_launches_only_a_norm_between_its_matmuls(k: int) -> None:
    """The attention's output, gate and up, down, and the next layer's q, k, v, each packed by the one before."""
    o, down = matrix_of(k, k, 1), matrix_of(512, k, 2)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(5)).to(torch.int32)
    gate, up = (matrix_of(k, 512, 3 + i, order) for i in range(2))
    norm = FusedNorm(torch.rand(k, generator=torch.Generator().manual_seed(6)).half().cuda() + 0.5, 1e-5, 1.0)
    fused = [FusedLinear([o]), FusedLinear([gate, up], norm=norm, activation="gelu"), FusedLinear([down])]
    layer = [Direct(one) for one in fused]
    for m in ROWS:
        attended, before = (activations(m, k, torch.float16, seed) for seed in (m, m + 9))
        want = before + by(o, "gemm_tile", attended).half()
        inner = rms_norm(want, norm.weight, norm.eps, weight_offset=norm.offset)
        opened, raised = (by(made, "gemm_tile", inner).half() for made in (gate, up))
        gated = gated_activation(opened, raised, "gelu")
        want_after = want + by(down, "gemm_tile", gated).half()
        x = before.clone()
        counts = launches()
        normed = layer[0](m, attended, x, x, layer[1])
        packed = layer[1](m, normed, None, following=layer[2], packed=True)
        assert torch.equal(x, want), m
        layer[2](m, packed, x, x, packed=True)
        assert launches() - counts == 4  # three matmuls and the norm between the first two
        assert torch.equal(x, want_after), m


def matrix_of(k: int, n: int, seed: int, order: Tensor | None = None) -> QuantMatrix:
    rows = [min(128, k - at) for at in range(0, k, 128)]
    tensors = exl2_tensors([(5 if i == 0 else 4, count) for i, count in enumerate(rows)], n, seed)
    if order is not None:
        tensors["q_invperm"] = order
    return QuantMatrix.from_exl2(tensors, device="cuda")


def launches() -> int:
    """Launches of the kernel so far."""
    starts = ("gemm_direct_", "norm_packed")
    return sum(count for name, count in _native.cuda_launches().items() if name.startswith(starts))
