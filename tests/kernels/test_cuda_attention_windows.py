"""Windows of a prompt as rows of a decode step attend bitwise as the prompt does, on a GPU.

A captured prompt (`exl_core.execution.prompt_windows`) runs other kernels of attention than one that is not captured,
and whether it is captured depends on the prompts before it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import KINDS, UNDER_A_TOOL, Case, is_prompt, make_cuda_case
from torch import Tensor

from exl_kernels.attention import paged_attention
from exl_kernels.attention.cuda import AttentionTables, attend_stored, attention_options

pytestmark = pytest.mark.cuda

NEW, PAST, LONG = [65, 20, 1], [0, 300, 33], [1100, 520, 1027]
"""Tokens of each prompt, and of the cache before it."""
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"window": 40}, {"softcap": 30.0}, {"window": 17, "softcap": 20.0})


def places(before: list[int]) -> tuple[Tensor, Tensor]:
    """Row and position of each token, int32 [T]."""
    rows = torch.repeat_interleave(torch.arange(len(NEW)), torch.tensor(NEW))
    positions = torch.cat([torch.arange(past, past + new) for new, past in zip(NEW, before, strict=True)])
    return rows.to(torch.int32), positions.to(torch.int32)


def in_windows(
    case: Case,
    q: Tensor,
    table: Tensor,
    width: int,
    before: list[int],
    *,
    joined: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of q [T, Hq, D] in windows of `width` tokens, padded to a power of two of windows.

    joined: the windows of a sequence read the row of its first one, as in captured prompts.
    """
    windows = [(row, begin, min(width, new - begin)) for row, new in enumerate(NEW) for begin in range(0, new, width)]
    rows = 1 << (len(windows) - 1).bit_length()
    padded = torch.zeros(rows * width, *q.shape[1:], dtype=q.dtype)
    positions = torch.full((rows * width,), -1, dtype=torch.int32)
    tables = torch.zeros(rows, table.shape[1] + 3, dtype=torch.int32)
    of = torch.arange(rows, dtype=torch.int32)
    taken, at = [], 0
    for number, (row, begin, count) in enumerate(windows):
        own = slice(number * width, number * width + count)
        padded[own], positions[own] = q[at : at + count], torch.arange(begin, begin + count) + before[row]
        tables[number, : table.shape[1]] = table[row]
        if joined:
            of[number] = next(first for first, window in enumerate(windows) if window[0] == row)
        taken.append(torch.arange(own.start, own.stop))
        at += count
    most = tables.shape[1] * case.pages.page_size
    seen = AttentionTables(
        tables.cuda(), rows=of.repeat_interleave(width).cuda(), positions=positions.cuda(), max_keys=most
    )
    options = attention_options(case.scale, window=window, softcap=softcap)
    found = attend_stored(padded.cuda(), case.pages, seen, options, tokens=width, windows=joined)
    return found.cpu()[torch.cat(taken)]


def check(case: Case, before: list[int], options: dict[str, Any], joined: tuple[bool, ...]) -> None:
    table = case.block_table.clamp(min=0)
    rows, positions = places(before)
    q = case.queries(rows.long(), positions).half()
    operands = (t.cuda() for t in (table, rows, positions))
    shared = {"scale": case.scale, "window": 0, "softcap": 0.0, **options}
    most = max(new + past for new, past in zip(NEW, before, strict=True))
    want = paged_attention(q.cuda(), case.pages, *operands, max_keys=most, **shared).cpu()
    for width in (16, 4):
        for one in joined:
            found = in_windows(case, q, table, width, before, joined=one, **options)
            assert torch.equal(found, want), (options, width, one)


@pytest.mark.parametrize("kind", ["fp16", "q4"] if UNDER_A_TOOL else KINDS)
@pytest.mark.parametrize(
    ("dim", "heads", "groups", "page"), [(64, 2, 4, 16), (128, 1, 7, 256), (128, 2, 1, 32), (80, 1, 3, 64)]
)
def test_windows_of_a_prompt_attend_as_the_prompt(kind: Any, dim: int, heads: int, groups: int, page: int) -> None:
    lengths = [new + past for new, past in zip(NEW, PAST, strict=True)]
    case = make_cuda_case(kind, lengths, heads=heads, groups=groups, dim=dim, page_size=page, shuffle=3)
    for options in OPTIONS[:1] if UNDER_A_TOOL else OPTIONS:
        check(case, PAST, options, (False, True))


@pytest.mark.parametrize(("kind", "dim", "groups"), [("fp16", 64, 4), ("fp16", 128, 4), ("q4", 64, 8)])
def test_windows_after_many_keys_attend_as_the_prompt(kind: Any, dim: int, groups: int) -> None:
    lengths = [new + past for new, past in zip(NEW, LONG, strict=True)]
    case = make_cuda_case(kind, lengths, heads=1, groups=groups, dim=dim, page_size=64)
    assert is_prompt(case.plan(128, max(lengths), row_tokens=16, windows=True))
    check(case, LONG, {}, (True,))
