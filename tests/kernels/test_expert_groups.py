"""Which dequantized experts are multiplied at once, and the padded rows of each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from exl_kernels.moe.dequantized import FREE_ROWS, ROUND, PaddedGroup, padded_experts, padded_groups

counts_of_experts = st.lists(st.one_of(st.just(0), st.integers(1, 40), st.integers(1, 3000)), min_size=1, max_size=40)


def test_experts_with_about_as_many_rows_go_together() -> None:
    assert padded_groups([130, 0, 120, 125, 119], 3) == [PaddedGroup((4, 2, 3), 128), PaddedGroup((0,), 160)]
    assert padded_groups([10, 2000, 12, 11], 4) == [PaddedGroup((0, 3, 2), 32), PaddedGroup((1,), 2016)]
    assert padded_groups([0, 0], 4) == []


@given(counts_of_experts, st.integers(1, 9))
def test_every_expert_with_rows_is_in_one_group(counts: list[int], most: int) -> None:
    groups = padded_groups(counts, most)
    found = [number for group in groups for number in group.experts]
    assert sorted(found) == [number for number, count in enumerate(counts) if count]
    for group in groups:
        own = [counts[number] for number in group.experts]
        assert 1 <= len(own) <= most
        assert max(own) <= group.rows < max(own) + ROUND
        assert len(own) * max(own) <= max(2 * sum(own), FREE_ROWS * len(own))


@given(counts_of_experts, st.integers(1, 9))
def test_padded_experts_lie_side_by_side(counts: list[int], most: int) -> None:
    groups = padded_groups(counts, most)
    at = 0
    for number, first, rows in padded_experts(groups):
        assert first == at
        assert counts[number] <= rows
        at += rows
    assert at == sum(len(group.experts) * group.rows for group in groups)
