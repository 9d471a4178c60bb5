"""Experts of prompts, dequantized or sorted: near float64 and one expert after the other; needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_cases import Expert, chosen_of, experts_of, float_experts_of, one_by_one, rows_of
from test_cuda_linear import rms
from torch import Tensor

from exl_kernels.activation import gated_activation
from exl_kernels.moe import cuda
from exl_kernels.moe.cuda import GroupedExperts

pytestmark = pytest.mark.cuda

HIDDEN, WIDTH, COUNT = 256, 192, 5


def by_dequantized(h: Tensor, weights: Tensor, ids: Tensor, experts: list[Expert], **more: Tensor | None) -> Tensor:
    """The same sum with each expert's dequantized matrices."""
    parts = torch.zeros((*ids.shape, h.shape[1]), dtype=torch.float64)
    for number, matrices in enumerate(experts):
        rows, places = (ids == number).nonzero(as_tuple=True)
        gate, up, down = (matrix.dequantize().double().cpu() for matrix in matrices)
        x = h[rows].double().cpu()
        inner = gated_activation((x @ gate).half().cuda(), (x @ up).half().cuda(), "silu").double().cpu()
        parts[rows.cpu(), places.cpu()] = (inner @ down).half().double()
    y = (parts * weights.double().cpu()[:, :, None]).sum(1)
    for name, factor in (("shared", more.get("shared_weights")), ("residual", None)):
        given = more.get(name)
        if given is not None:
            y += given.double().cpu() * (1 if factor is None else factor.double().cpu().view(-1, 1))
    return y


@pytest.mark.parametrize("kind", ["exl2-128", "exl2-32-own", "gptq-32", "gptq-32-act", "gptq-128"])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_dequantized_matrices_are_those_of_the_format(kind: str, part: int) -> None:
    """Experts' matrices have widths and padding rows of their own; some experts, in any order."""
    hidden, width = (256, 256) if "gptq-128" in kind else (HIDDEN, WIDTH)
    experts = experts_of(kind, COUNT, hidden, width)
    together = GroupedExperts(experts, "silu")
    numbers = torch.tensor([4, 0, 3], device="cuda")
    k, n = (width, hidden) if part == 2 else (hidden, width)
    out = torch.full((3, k, n), torch.nan, dtype=torch.float16, device="cuda")
    assert together.dequantize(numbers, part, out) is out
    for found, number in zip(out, numbers.tolist(), strict=True):
        assert torch.equal(found, experts[number][part].dequantize())


@pytest.mark.parametrize("kind", ["exl2-128", "exl2-32-own", "gptq-32-act"])
@pytest.mark.parametrize("most", [1, 2, COUNT])
def test_a_prompt_runs_on_dequantized_experts(kind: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some experts at a time, each with its own number of rows, in addition to what all rows share."""
    monkeypatch.setattr(cuda, "experts_at_once", lambda hidden, width: most)
    experts = experts_of(kind, COUNT, HIDDEN, WIDTH)
    together = GroupedExperts(experts, "silu")
    rows = 170
    h, (weights, ids) = rows_of(rows, HIDDEN), chosen_of(rows, COUNT, 2)
    ids[:, 1] = torch.where(ids[:, 0] == 1, 3, 1)  # expert 1 has most rows, some may have none
    ids[ids == 2] = 0
    shared, factors, x = rows_of(rows, HIDDEN, 3), torch.rand(rows, 1).cuda(), rows_of(rows, HIDDEN, 4)
    assert together.plan(rows, 2, False).dequantizes
    cases: list[dict[str, Any]] = [{}, {"shared": shared, "shared_weights": factors}, {"residual": x}]
    for more in cases:
        found = together(h, weights, ids, **more)
        expected = by_dequantized(h, weights, ids, experts, **more)
        assert rms(found, expected) < 1e-3, list(more)
        packed = together(h, weights, ids, invariant=True, **more)
        assert torch.equal(packed, one_by_one(h, weights, ids, experts, "silu", **more))
        assert rms(found, packed.double().cpu()) < 2e-3


@pytest.mark.parametrize("only", [0, 4])
def test_all_rows_of_a_prompt_may_choose_one_expert(only: int) -> None:
    experts = experts_of("exl2-128", COUNT, HIDDEN, WIDTH)
    together = GroupedExperts(experts, "silu")
    rows = 64 * COUNT + 3
    ids = torch.full((rows, 1), only, dtype=torch.int64).cuda()
    h, weights = rows_of(rows, HIDDEN), torch.ones(rows, 1).cuda()
    x = rows_of(rows, HIDDEN, 5)
    assert together.plan(rows, 1, False).dequantizes
    want = by_dequantized(h, weights, ids, experts, residual=x)
    assert rms(together(h, weights, ids, residual=x, out=x), want) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_prompts_of_large_float_experts_are_sorted_by_expert(dtype: torch.dtype, biased: bool) -> None:
    hidden, width, rows = 4096, 6144, 450
    experts = float_experts_of(dtype, 4, hidden, width, biased=biased, scale=0.01)
    together = GroupedExperts(experts, "silu")
    h, (weights, ids) = rows_of(rows, hidden), chosen_of(rows, 4, 2)
    ids[:, 1] = torch.where(ids[:, 0] == 1, 3, 1)  # expert 1 has most rows, expert 2 has none
    ids[ids == 2] = 0
    shared, x = rows_of(rows, hidden, 3), rows_of(rows, hidden, 4)
    plan = together.plan(rows, 2, False)
    assert (plan.kernel, plan.sorts, plan.dequantizes) == ("experts_sorted", True, False)
    cases: list[dict[str, Any]] = [{}, {"shared": shared, "residual": x}]
    for more in cases:
        expected = one_by_one(h, weights, ids, experts, "silu", **more)
        assert rms(together(h, weights, ids, **more), expected.double().cpu()) < 2e-3, list(more)
        assert torch.equal(together(h, weights, ids, invariant=True, **more), expected), list(more)


@pytest.mark.parametrize("rows", [4096, 4097, 9001])
def test_float_experts_of_a_prompt_share_launches(rows: int) -> None:
    """Up to 16,384 pairs at a time: the prompt is one call, just not one, and several."""
    experts = float_experts_of(torch.bfloat16, 33, 72, 40)
    together = GroupedExperts(experts, "silu")
    h, (weights, ids), x = rows_of(rows, 72), chosen_of(rows, 33, 4), rows_of(rows, 72, 4)
    plan = together.plan(rows, 4, False)
    assert (plan.rows, plan.sorts, plan.shares) == (min(rows, 4096), False, True)
    expected = one_by_one(h, weights, ids, experts, "silu", residual=x)
    assert torch.equal(together(h, weights, ids, residual=x), expected)
