"""Float experts that share launches: bitwise those of one expert after the other, near float64; needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_cases import chosen_of, float_experts_of, one_by_one, rows_of
from test_cuda_linear import rms

from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.cuda import CudaFloatMatrix
from exl_kernels.moe.cuda import ExpertRouter, GroupedExperts, most_scratch_bytes
from exl_kernels.reference import experts as reference
from exl_kernels.selection import Card

pytestmark = pytest.mark.cuda

DTYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("hidden", "width", "count", "chosen"),
    [
        (64, 8, 3, 1),  # one slice of K has numbers, and of down one chunk
        (200, 97, 7, 3),  # rows of down that are not aligned
        (264, 72, 9, 8),  # slices of unequal length
        (1160, 72, 2, 2),  # all slices, several rounds of loads
    ],
)
def test_results_are_those_of_one_expert_after_the_other(
    dtype: torch.dtype, hidden: int, width: int, count: int, chosen: int
) -> None:
    experts = float_experts_of(dtype, count, hidden, width)
    together = GroupedExperts(experts, "silu")
    for rows in (1, 2, 7, 8, 9, 17, 33, 64, 70):
        h, (weights, ids) = rows_of(rows, hidden, rows), chosen_of(rows, count, chosen, rows)
        x = rows_of(rows, hidden, 99)
        expected = one_by_one(h, weights, ids, experts, "silu", residual=x)
        assert expected.isfinite().all()
        assert torch.equal(together(h, weights, ids, residual=x, out=x, invariant=True), expected), rows


@pytest.mark.parametrize(("rows", "by"), [(8, 8), (20, 32), (70, 64)])
@pytest.mark.parametrize("only", [0, 2])
def test_all_rows_may_choose_one_expert(rows: int, by: int, only: int) -> None:
    experts = float_experts_of(torch.bfloat16, 3, 136, 96)
    together = GroupedExperts(experts, "silu")
    ids = torch.stack([torch.full((rows,), only), torch.full((rows,), 1)], dim=1).cuda()
    h, weights = rows_of(rows, 136), torch.rand(rows, 2).cuda()
    wide = Card.device(torch.cuda.current_device()).code >= 80
    assert together.plan(rows, 2, True).kernel == f"experts_by_{by if wide else min(by, 16)}"
    assert torch.equal(together(h, weights, ids, invariant=True), one_by_one(h, weights, ids, experts, "silu"))


@pytest.mark.parametrize("activation", ["silu", "gelu", "quickgelu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(activation: Any, dtype: torch.dtype) -> None:
    experts = float_experts_of(dtype, 5, 256, 192)
    together = GroupedExperts(experts, activation)
    h, (weights, ids) = rows_of(24, 256), chosen_of(24, 5, 2)
    whole = [tuple(matrix.dequantize().double().cpu() for matrix in parts) for parts in experts]
    expected = reference.expert_sum(h.double().cpu(), weights.double().cpu(), ids.cpu(), whole, activation)  # type: ignore[arg-type]
    assert rms(together(h, weights, ids), expected) < 2e-3  # half precision between the matmuls


@pytest.mark.parametrize("rows", [1, 12, 40])
def test_biases_factors_and_shared_experts(rows: int) -> None:
    experts = float_experts_of(torch.float16, 6, 136, 72, biased=True, prescale=0.5)
    together = GroupedExperts(experts, "silu")
    h, (weights, ids) = rows_of(rows, 136), chosen_of(rows, 6, 2)
    shared, factors, x = rows_of(rows, 136, 3), torch.rand(rows, 1).cuda(), rows_of(rows, 136, 4)
    added = {"shared": shared}
    cases: list[dict[str, Any]] = [added, {**added, "shared_weights": factors}, {**added, "residual": x}]
    for more in cases:
        expected = one_by_one(h, weights, ids, experts, "silu", **more)
        assert torch.equal(together(h, weights, ids, **more), expected), list(more)


def test_a_row_s_result_does_not_depend_on_the_others() -> None:
    """Alone, in parts that other kernels multiply, at addresses that are not aligned, and in several launches."""
    experts = float_experts_of(torch.bfloat16, 4, 136, 96)
    together = GroupedExperts(experts, "silu")
    h, (weights, ids) = rows_of(300, 136), chosen_of(300, 4, 4)
    whole = together(h, weights, ids, invariant=True)
    for some in (slice(0, 1), slice(5, 13), slice(20, 57), slice(100, 164)):
        assert torch.equal(together(h[some], weights[some], ids[some]), whole[some])
    shifted = torch.empty(40 * 136 + 4, dtype=torch.float16, device="cuda")[4:].view(40, 136)
    shifted.copy_(h[:40])
    assert shifted.data_ptr() % 16
    assert torch.equal(together(shifted, weights[:40], ids[:40]), whole[:40])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_prompts_are_sorted_by_expert(dtype: torch.dtype, biased: bool) -> None:
    experts = float_experts_of(dtype, 5, 136, 72, biased=biased)
    together = GroupedExperts(experts, "silu")
    rows = 170
    h, (weights, ids) = rows_of(rows, 136), chosen_of(rows, 5, 2)
    ids[:, 1] = torch.where(ids[:, 0] == 1, 3, 1)  # expert 1 has most rows, expert 2 has none
    ids[ids == 2] = 0
    shared, x = rows_of(rows, 136, 3), rows_of(rows, 136, 4)
    plan = together.plan(rows, 2, False)
    assert (plan.kernel, plan.sorts, plan.dequantizes) == ("experts_sorted", True, False)
    cases: list[dict[str, Any]] = [{}, {"shared": shared, "residual": x}]
    for more in cases:
        expected = one_by_one(h, weights, ids, experts, "silu", **more)
        assert rms(together(h, weights, ids, **more), expected.double().cpu()) < 2e-3, list(more)


@pytest.mark.parametrize(("count", "chosen"), [(2, 1), (40, 8)])
def test_scratch_memory_is_what_load_plans_count(count: int, chosen: int) -> None:
    together = GroupedExperts(float_experts_of(torch.float16, count, 64, 40), "silu")
    for rows in (1, 9, 64, 1024 // chosen):
        most = most_scratch_bytes(rows=rows, chosen=chosen, experts=count, hidden=64, width=40)
        assert 0 < together.plan(rows, chosen, False).scratch_bytes <= most, rows


def test_a_captured_call_reads_what_is_chosen_when_it_runs() -> None:
    experts = float_experts_of(torch.bfloat16, 12, 512, 192)
    together = GroupedExperts(experts, "silu")
    weight = torch.randn(12, 512, generator=torch.Generator().manual_seed(5)).mul_(0.05).bfloat16()
    matrix = QuantMatrix.from_float(weight, device="cuda", precise=True)
    assert isinstance(matrix, CudaFloatMatrix)
    router = ExpertRouter(matrix, 4, normalize=True)
    for rows in (3, 20, 100):
        h = rows_of(rows, 512)
        out = torch.empty_like(h)

        def body(h: torch.Tensor = h, out: torch.Tensor = out) -> None:
            weights, ids = router(h)
            together(h, weights, ids, out=out, invariant=True)

        body()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        for seed in range(3):
            h.copy_(rows_of(rows, 512, seed))
            graph.replay()
            weights, ids = router(h)
            assert torch.equal(out, one_by_one(h, weights, ids, experts, "silu"))
