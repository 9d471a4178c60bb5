"""Matmuls of one to eight rows over long K, of which blocks may hold a part at a time: bitwise those of `gemm_tile`."""

from __future__ import annotations

import os

import pytest
import torch
from internals import group_of
from linear_cases import activations, exl2, gptq
from torch import Tensor

from exl_kernels import _native
from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.cuda import launch_matmul
from exl_kernels.linear.fused import FusedLinear

pytestmark = [pytest.mark.cuda, pytest.mark.needs("bulk_copy")]

UNDER_A_TOOL = "EXL_SANITIZER" in os.environ  # as in attention_cases.py
PASSES = _native.MatmulTuning.few(cut=2, passes=2)
"""K in halves, two passes over the tiles."""


def product(matrix: QuantMatrix, x: Tensor, kernel: str, tuning: _native.MatmulTuning | None = None) -> Tensor:
    group = group_of(matrix)
    out = torch.full((len(x), matrix.out_features), float("nan"), dtype=x.dtype, device=x.device)
    call = _native.MatmulCall(len(x), bfloat16=x.dtype == torch.bfloat16)
    launch_matmul(group, group.plan_with(kernel, call, tuning), x, out)
    return out


def assert_same(matrix: QuantMatrix, x: Tensor, tuning: _native.MatmulTuning | None = None) -> None:
    assert torch.equal(product(matrix, x, "gemm_few", tuning), product(matrix, x, "gemm_tile"))


@pytest.mark.parametrize("k", [2304, 4608, 5120, 8192, 12800, 15360, 16384, 18432, 18944, 20480])
@pytest.mark.parametrize("widths", [(4,), (5, 4)])
def test_planned_shapes(k: int, widths: tuple[int, ...]) -> None:
    """Stages of eight, four and two units; one pass and two; units of one width, and of two."""
    made = exl2(544, *widths, k=k)
    for m in (3, 8):
        assert_same(made, activations(m, k, torch.float16))


@pytest.mark.parametrize("k", [4096, 16384, 16512, 18432, 18944, 20480, 20608])
@pytest.mark.parametrize("ordered", [False, True])
def test_one_row_of_any_length(k: int, ordered: bool) -> None:
    """The threads of a block hold the row at once, in four or five parts, or fetch it in turns."""
    made = exl2(544, 5, 4, k=k, perm=torch.arange(k) if ordered else None)
    x = activations(1, k, torch.float16)
    assert torch.equal(product(made, x, "gemv_ring"), product(made, x, "gemm_tile"))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("k", [8192, 8448, 12416])
def test_two_passes_of_every_width(bits: int, k: int) -> None:
    made = exl2(224, bits, k=k)
    for m in (3, 8):
        assert_same(made, activations(m, k, torch.float16), PASSES)


@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_passes_of_some_iterations(iterations: int, dtype: torch.dtype) -> None:
    """Pairs of blocks with as many iterations, of which the last ones have one tile."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    tiles = 5 if UNDER_A_TOOL else 2 * (sms // 2) * (iterations - 1) + 7
    assert_same(exl2(16 * tiles, 5, 4, k=8192), activations(8, 8192, dtype), PASSES)


@pytest.mark.parametrize("group", [128, 32])
@pytest.mark.parametrize("act_order", [False, True])
def test_two_passes_of_gptq(group: int, act_order: bool) -> None:
    """544 columns take minutes under racecheck."""
    columns = 96 if UNDER_A_TOOL else 544
    assert_same(gptq(columns, act_order, group, 8192), activations(5, 8192, torch.float16), PASSES)


@pytest.mark.parametrize("k", [16384, 18432])
def test_gated_results_go_to_a_matmul_of_two_passes(k: int) -> None:
    gate, up = (exl2(k, 4, seed=i, perm=torch.arange(1024).flip(0), k=1024) for i in range(2))
    first, second = FusedLinear([gate, up], activation="silu"), FusedLinear([exl2(544, 5, 4, seed=3, k=k)])
    assert first.kernel(8) == second.kernel(8) == "gemm_few"
    for m in (3, 8):
        x = activations(m, 1024, torch.float16)
        h = torch.randn(m, 544, device="cuda").half()
        between = first(x, x.new_empty(m, k))
        want = h + product(second.matrices[0], between, "gemm_tile")
        assert torch.equal(first.then(second, x, torch.full_like(h, float("nan")), h), want), m
