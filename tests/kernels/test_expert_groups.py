"""Which dequantized experts are multiplied at once, and the padded rows of each."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exl_kernels.moe.dequantized import most_padded_rows, plan_padded

ROUND, FREE_ROWS = 32, 64
counts_of_experts = st.lists(st.one_of(st.just(0), st.integers(1, 40), st.integers(1, 3000)), min_size=1, max_size=40)


def planned(counts: list[int], most: int) -> tuple[list[tuple[int, int]], list[int], list[list[int]]]:
    """(experts and padded rows) of each group; numbers of the experts; number, first padded row and rows of each."""
    plan = plan_padded(torch.tensor([0, *accumulate(counts)]), most)
    groups = [(group.experts, group.rows) for group in plan.groups]
    return groups, plan.numbers(plan.memory).tolist(), plan.rows(plan.memory).tolist()


def test_experts_with_about_as_many_rows_go_together() -> None:
    assert planned([130, 0, 120, 125, 119], 3)[:2] == ([(3, 128), (1, 160)], [4, 2, 3, 0])
    assert planned([10, 2000, 12, 11], 4)[:2] == ([(3, 32), (1, 2016)], [0, 3, 2, 1])
    assert planned([0, 0], 4) == ([], [], [])


@given(counts_of_experts, st.integers(1, 9))
def test_every_expert_with_rows_is_in_one_group(counts: list[int], most: int) -> None:
    groups, numbers, _ = planned(counts, most)
    assert sorted(numbers) == [number for number, count in enumerate(counts) if count]
    at = 0
    for held, rows in groups:
        own = [counts[number] for number in numbers[at : at + held]]
        assert 1 <= held <= most
        assert own == sorted(own)
        assert max(own) <= rows < max(own) + ROUND
        assert held * max(own) <= max(2 * sum(own), FREE_ROWS * held)
        at += held


@given(counts_of_experts, st.integers(1, 9))
def test_padded_experts_lie_side_by_side(counts: list[int], most: int) -> None:
    groups, numbers, table = planned(counts, most)
    assert [expert for expert, _, _ in table] == numbers
    at = 0
    for number, first, rows in table:
        assert first == at
        assert counts[number] <= rows
        at += rows
    assert at == sum(held * rows for held, rows in groups) <= most_padded_rows(sum(counts), len(counts))


def test_a_plan_of_begins_that_do_not_ascend_is_rejected() -> None:
    for begins, most in (([0, 5, 4], 2), ([0, 5], 0), ([-1, 5], 2), ([0, 2**31], 2)):
        with pytest.raises(ValueError, match="begins must be ascending"):
            plan_padded(torch.tensor(begins), most)
