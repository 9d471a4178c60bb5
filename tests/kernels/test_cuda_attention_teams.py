"""Attention of one token a sequence by `attention_teams` equals the kernel for few tokens, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import KINDS, UNDER_A_TOOL, OwnStep, matmul_of, own_step

from exl_kernels import _native
from exl_kernels.attention import paged_attention
from exl_kernels.linear.matmul_input import MatmulInput

pytestmark = [pytest.mark.cuda, pytest.mark.needs("async_copy")]

F16, BF16 = torch.float16, torch.bfloat16


def launches() -> int:
    """Launches of the kernel so far."""
    return sum(count for name, count in _native.cuda_launches().items() if "_teams" in name)


def assert_equals_few_tokens(step: OwnStep, norms: bool = False, **options: Any) -> None:
    """A mask of zeros changes no logit and selects the kernel for few tokens."""
    weights = step.norms() if norms else None
    pages, where = step.case.pages, (step.table, step.rows, step.positions)
    mask = torch.zeros(len(step.lengths), max(step.lengths) + 1, device="cuda")
    step.forget()
    q, before = step.stored(weights), launches()
    want = paged_attention(q, pages, *where, scale=step.case.scale, key_mask=mask, **options)
    stored = [t.clone() for t in pages.tensors()]
    assert launches() == before
    apart = paged_attention(q, pages, *where, scale=step.case.scale, **options)
    step.forget()
    together = step.together(norms=weights, **options)
    assert launches() == before + 2
    assert want.isfinite().all()
    assert torch.equal(apart, want)
    assert torch.equal(together, want)
    for a, b in zip(pages.tensors(), stored, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("groups", "dim", "dtype"),
    [
        *[(4, 128, F16), (4, 128, BF16), (12, 128, F16), (16, 128, BF16), (1, 64, F16), (7, 64, BF16), (9, 64, F16)],
        *[(9, 64, BF16), (2, 256, F16), (2, 256, BF16), (9, 256, F16), (9, 256, BF16)],
        *[(1, 96, F16), (5, 80, BF16), (8, 112, F16)],
    ],
)
def test_one_token_a_sequence(kind: Any, groups: int, dim: int, dtype: torch.dtype) -> None:
    """Parts of a unit, whole units, several units of a team, several splits; a sequence without keys."""
    batches = [[200, 1, 64, 0], [513], [449, 65, 512]]
    for at, lengths in enumerate(batches[:1] if UNDER_A_TOOL else batches):
        step = own_step(kind, lengths, heads=2, groups=groups, dim=dim, page_size=64 << at, dtype=dtype)
        assert_equals_few_tokens(step, norms=at == 1)


@pytest.mark.parametrize("kind", ["fp16", "q4"])
@pytest.mark.parametrize(
    ("dim", "rotated", "interleaved"),
    [
        *[(128, 64, True), (128, 64, False), (128, 32, True), (128, 96, True), (64, 32, False), (64, 4, False)],
        *[(256, 64, False), (256, 128, True), (256, 256, True)],
        *[(96, 96, True), (96, 72, False), (80, 32, False), (112, 0, False)],
    ],
)
def test_partial_rotations(kind: Any, dim: int, rotated: int, interleaved: bool) -> None:
    step = own_step(
        kind, [130, 64, 1], heads=1, groups=2, dim=dim, page_size=64, rotated=rotated, interleaved=interleaved
    )
    for norms in (False, True):
        assert_equals_few_tokens(step, norms=norms)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [128, 80])
def test_many_splits(kind: Any, dim: int) -> None:
    step = own_step(kind, [130] if UNDER_A_TOOL else [2300, 1025], heads=1, groups=4, dim=dim, page_size=192)
    assert_equals_few_tokens(step)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("groups", "dim"), [(4, 128), (16, 64)])
@pytest.mark.parametrize("sequences", [20, 60])
def test_blocks_with_fewer_teams(kind: Any, groups: int, dim: int, sequences: int) -> None:
    """More blocks than SMs: several share an SM, with fewer teams each. Most sequences are short."""
    long = 2 if UNDER_A_TOOL else 520
    step = own_step(kind, [long, 1, 65, *[1] * (sequences - 4), 257], heads=4, groups=groups, dim=dim, page_size=64)
    assert_equals_few_tokens(step)


@pytest.mark.parametrize("shuffle", [1, 2, 3])
def test_pages_in_any_order(shuffle: int) -> None:
    step = own_step("fp16", [300, 700], heads=2, groups=4, dim=128, page_size=64, shuffle=shuffle)
    assert_equals_few_tokens(step)


@pytest.mark.parametrize("kind", ["fp16", "q4"])
@pytest.mark.parametrize("window", [1, 63, 64, 65, 200, 513, 1000, 4096])
def test_windows(kind: Any, window: int) -> None:
    """Keys before the window are NaN, and their pages are gone."""
    lengths = [130, 64, 1] if UNDER_A_TOOL else [1100, 513, 64, 1]
    step = own_step(kind, lengths, heads=1, groups=4, dim=128, page_size=64)
    for b, length in enumerate(lengths):
        hidden = max(length - window, 0)
        page, inside = divmod(hidden, 64)
        for t in step.case.pages.tensors():
            t[step.table[b, page], :inside] = torch.nan if t.dtype == torch.float16 else 0xFF
        step.table[b, :page] = -12345
    assert_equals_few_tokens(step, window=window)


@pytest.mark.parametrize("kind", ["fp16", "q6"])
def test_softcap(kind: Any) -> None:
    step = own_step(kind, [300, 65], heads=1, groups=4, dim=128, page_size=64)
    assert_equals_few_tokens(step, softcap=5.0)
    assert_equals_few_tokens(step, softcap=5.0, window=100)


@pytest.mark.parametrize("matrix", ["exl2", "gptq"])
@pytest.mark.parametrize(("groups", "dim"), [(4, 128), (8, 64), (4, 96)])
def test_results_packed_for_the_next_matmul(matrix: str, groups: int, dim: int) -> None:
    """Pages of 16 keys select the kernel for few tokens."""
    made = matmul_of(2 * groups * dim, matrix)
    for lengths in ([300], [65, 1, 130, 0, 257]):
        packed = []
        for page_size in (16, 64):
            step = own_step("q8", lengths, heads=2, groups=groups, dim=dim, page_size=page_size)
            scratch = torch.full((made.in_features * 8 * 2 + 1300,), 0xA5, dtype=torch.uint8, device="cuda")
            before = launches()
            step.together(into=MatmulInput(made, 8, scratch))
            assert launches() - before == (page_size == 64)
            # Units of 32 rows of K: 64 bytes of each of eight columns, of which the matmul reads those of its rows.
            columns = scratch[: made.in_features * 16].view(-1, 8, 64)[:, : len(lengths)]
            packed.append((columns, scratch[made.in_features * 16 :]))
        (few, rest_few), (teams, rest_teams) = packed
        assert (few != 0xA5).any()
        assert torch.equal(few, teams)
        assert torch.equal(rest_few, rest_teams)
