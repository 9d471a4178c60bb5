"""Which dequantized experts are multiplied at once, and the padded rows of each."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from exl_kernels.moe.dequantized import FREE_ROWS, PaddedGroup, padded_groups, padded_slots

counts_of_experts = st.lists(st.one_of(st.just(0), st.integers(1, 40), st.integers(1, 3000)), min_size=1, max_size=40)


def test_experts_with_about_as_many_rows_go_together() -> None:
    assert padded_groups([130, 0, 120, 125, 119], 3) == [PaddedGroup((4, 2, 3), 128), PaddedGroup((0,), 136)]
    assert padded_groups([10, 2000, 12, 11], 4) == [PaddedGroup((0, 3, 2), 16), PaddedGroup((1,), 2000)]
    assert padded_groups([0, 0], 4) == []


@given(counts_of_experts, st.integers(1, 9))
def test_every_expert_with_rows_is_in_one_group(counts: list[int], most: int) -> None:
    groups = padded_groups(counts, most)
    found = [number for group in groups for number in group.experts]
    assert sorted(found) == [number for number, count in enumerate(counts) if count]
    for group in groups:
        own = [counts[number] for number in group.experts]
        assert 1 <= len(own) <= most
        assert max(own) <= group.rows < max(own) + 8
        assert len(own) * max(own) <= max(2 * sum(own), FREE_ROWS * len(own))


@given(counts_of_experts, st.integers(1, 9))
def test_padded_rows_name_each_pair_once(counts: list[int], most: int) -> None:
    """The pairs of an expert are at its place, in their order; all others are padding."""
    groups, pairs = padded_groups(counts, most), sum(counts)
    slots = padded_slots(groups, counts)
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    assert len(slots) == sum(len(group.experts) * group.rows for group in groups)
    assert slots[slots < pairs].sort().values.tolist() == list(range(pairs))
    at = 0
    for group in groups:
        for number in group.experts:
            own = slots[at : at + group.rows]
            held = own[: counts[number]]
            assert owners[held].tolist() == [number] * counts[number]
            assert held.tolist() == list(range(int(held[0]), int(held[0]) + counts[number]))
            assert (own[counts[number] :] == pairs).all()
            at += group.rows
