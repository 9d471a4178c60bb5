"""Blocks that share the keys of a prompt's tile are bitwise identical to one block, on a GPU.

A prompt of few tokens after many keys, such as the next message of a long chat, has fewer tiles than a card has SMs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import KINDS, UNDER_A_TOOL, Case, assert_close, make_cuda_case, require_prompt_kernel

pytestmark = pytest.mark.cuda

OPTIONS: tuple[dict[str, Any], ...] = ({}, {"window": 700}, {"softcap": 20.0})
LENGTHS = [1100, 520] if UNDER_A_TOOL else [1500, 700, 30]
BOUND = 16_384
"""Upper bound of the keys in plans: work for several blocks, of which some find no keys."""


def make_wide_case(kind: Any, lengths: list[int], **options: Any) -> Case:
    """Make a case whose block table has room for BOUND keys."""
    return make_cuda_case(kind, lengths, shuffle=BOUND // 16, **options)


def last_tokens(counts: list[int], lengths: list[int]) -> tuple[list[int], list[int]]:
    """Row and position of the last tokens of each sequence."""
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    positions = [at for count, length in zip(counts, lengths, strict=True) for at in range(length - count, length)]
    return rows, positions


def check(case: Case, rows: list[int], positions: list[int], keys: int = BOUND, **options: Any) -> int:
    """Compare blocks that share keys with blocks that have tiles of their own; return how many share a tile."""
    plan = case.plan(len(rows), keys)
    require_prompt_kernel(plan)
    # By a bound of one key the plan has one block a tile; it reads all keys all the same.
    alone = case.run(rows, positions, max_keys=1, **options)
    shared = case.run(rows, positions, max_keys=keys, **options)
    assert torch.equal(shared, alone)
    pick = [0, len(rows) // 2, len(rows) - 1]
    assert_close(shared[pick], case.oracle([rows[i] for i in pick], [positions[i] for i in pick], **options))
    return plan.blocks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("options", OPTIONS)
def test_sequences_that_share_a_tile(kind: Any, dim: int, options: dict[str, Any]) -> None:
    case = make_wide_case(kind, LENGTHS, heads=1, groups=8, dim=dim)
    counts = [20, 13] if UNDER_A_TOOL else [40, 17, 9]
    assert check(case, *last_tokens(counts, LENGTHS), **options) > 3


@pytest.mark.parametrize("kind", ["fp16", "q6"])
@pytest.mark.parametrize(
    ("heads", "groups", "tokens"),
    [(1, 1, 128), (1, 1, 200), (1, 33, 4), (1, 33, 50), (2, 3, 50), (2, 8, 130), (8, 1, 130), (8, 4, 33)],
)
def test_any_number_of_blocks(kind: Any, heads: int, groups: int, tokens: int) -> None:
    length = 1100 if UNDER_A_TOOL else 4100
    case = make_wide_case(kind, [length], heads=heads, groups=groups, queries=300)
    for end in (length, 513, 1024):
        rows, positions = [0] * tokens, list(range(end - tokens, end))
        assert check(case, rows, positions) > 1
        # A bound without slack: another number of blocks, or the kernel for few keys.
        assert torch.equal(case.run(rows, positions, max_keys=end), case.run(rows, positions))


@pytest.mark.parametrize("kind", ["fp16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_activation_types(kind: Any, dtype: torch.dtype) -> None:
    case = make_wide_case(kind, [1100], heads=1, groups=8, dim=128, dtype=dtype)
    assert check(case, [0] * 20, list(range(1080, 1100))) > 1


@pytest.mark.parametrize("kind", ["fp16", "q4"])
def test_masks_that_hide_all_keys_of_a_block(kind: Any) -> None:
    case = make_wide_case(kind, [1500, 1500], heads=1, groups=8, dim=128)
    mask = torch.zeros(2, 1500)
    mask[0, :600] = mask[1, 500:] = -torch.inf
    rows, positions = last_tokens([20, 20], [1500, 1500])
    require_prompt_kernel(case.plan(40, BOUND))
    shared = case.run(rows, positions, max_keys=BOUND, key_mask=mask.cuda())
    assert torch.equal(shared, case.run(rows, positions, max_keys=1, key_mask=mask.cuda()))
    assert_close(shared[[0, 39]], case.oracle([0, 1], [1480, 1499], key_mask=mask))


def test_positions_that_see_no_keys_of_later_blocks() -> None:
    """Tokens of one tile on both sides of the border between two blocks, and rows without a sequence."""
    case = make_wide_case("fp16", [1100], heads=1, groups=8, dim=128)
    rows, positions = [0] * 32 + [5, -1], [*range(1008, 1040), 3, 4]
    require_prompt_kernel(case.plan(34, BOUND))
    shared = case.run(rows, positions, max_keys=BOUND)
    assert torch.equal(shared, case.run(rows, positions, max_keys=1))
    assert_close(shared[:32], case.oracle(rows[:32], positions[:32]))
    assert not shared[32:].any()


def test_keys_for_which_the_workspace_has_no_room() -> None:
    """The first block takes more splits than the others. Pages repeat, so that 100,000 keys need little memory."""
    small = make_cuda_case("q4", [512], heads=8, groups=4, dim=256, page_size=256)
    case = Case(small.pages, small.block_table.repeat(1, 200), small.q, small.scale, small.dtype)
    keys = 200 * 512
    assert check(case, [0] * 100, list(range(keys - 100, keys)), keys) == 2
