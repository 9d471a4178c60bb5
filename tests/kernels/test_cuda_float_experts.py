"""Float experts that share launches: bitwise those of one expert after the other, near float64; needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_cases import chosen_of, float_experts_of, one_by_one, rows_of
from test_cuda_linear import rms

from exl_kernels.moe.cuda import GroupedExperts, most_scratch_bytes
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


def test_more_pairs_than_a_block_sorts_at_a_time() -> None:
    """Most of them choose one expert, one chooses the last, and an expert in between has none."""
    experts = float_experts_of(torch.float16, 9, 64, 24)
    together = GroupedExperts(experts, "silu")
    rows = 700
    h, (weights, ids) = rows_of(rows, 64), chosen_of(rows, 6, 4)
    ids[1:, 0] = 6
    ids[0, 0] = 8
    plan = together.plan(rows, 4, True)
    assert (plan.rows, plan.shares) == (rows, True)
    whole = together(h, weights, ids, invariant=True)
    assert torch.equal(whole, one_by_one(h, weights, ids, experts, "silu"))
    assert torch.equal(together(h[250:], weights[250:], ids[250:], invariant=True), whole[250:])


@pytest.mark.parametrize(("count", "chosen"), [(2, 1), (40, 8)])
def test_scratch_memory_is_what_load_plans_count(count: int, chosen: int) -> None:
    together = GroupedExperts(float_experts_of(torch.float16, count, 64, 40), "silu")
    for rows in (1, 9, 64, 1024 // chosen, 3000):
        most = most_scratch_bytes(rows=rows, chosen=chosen, experts=count, hidden=64, width=40)
        assert 0 < together.plan(rows, chosen, False).scratch_bytes <= most, rows
