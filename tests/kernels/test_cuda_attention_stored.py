"""A few tokens a sequence whose keys are stored, as steps with draft tokens have them; needs a GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_cases import KINDS, UNDER_A_TOOL, is_prompt, make_cuda_case, matmul_of, randn
from torch import Tensor

from exl_kernels.attention import cuda as attention_cuda
from exl_kernels.attention import paged_attention
from exl_kernels.attention.cuda import AttentionTables, attention_options
from exl_kernels.errors import DTypeError, ShapeError
from exl_kernels.fused import rope_store
from exl_kernels.kv import KVPages
from exl_kernels.linear.fused import FusedLinear

pytestmark = pytest.mark.cuda

LENGTHS = [5, 66, 150, 0, 513]


def tokens_of(lengths: list[int], each: int) -> tuple[Tensor, Tensor]:
    """Rows and positions of the last `each` tokens of every sequence; -1 where it has fewer."""
    rows = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(each)
    places = torch.tensor([max(length - each + i, -1) for length in lengths for i in range(each)], dtype=torch.int32)
    return rows.cuda(), places.cuda()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "options"),
    [
        (2, 4, 128, {}),
        (1, 7, 64, {"window": 70}),
        (1, 16, 128, {}),
        (2, 2, 96, {"softcap": 20.0}),
        (1, 20, 64, {}),
    ],
)
def test_tokens_with_blocks_of_their_own_have_the_bits_of_tokens_that_share_tiles(
    kind: Any, dtype: torch.dtype, heads: int, groups: int, dim: int, options: dict[str, Any]
) -> None:
    """Queries are views of wider rows. Few keys in all, and so many that sequences' keys are read once."""
    case = make_cuda_case(kind, [max(n, 1) for n in LENGTHS], heads=heads, groups=groups, dim=dim, page_size=64)
    table, q_heads = case.block_table.cuda(), heads * groups
    for each in (5,) if UNDER_A_TOOL else (2, 5, 16):
        rows, places = tokens_of(LENGTHS, each)
        wide = randn(len(rows), (q_heads + 2) * dim, seed=each).to("cuda", dtype)
        q = wide[:, : q_heads * dim].view(-1, q_heads, dim)
        where, scale = (case.pages, table, rows, places), dim**-0.5
        want = paged_attention(q.contiguous(), *where, scale=scale, **options)
        for most in (513, 1 << 20):
            tables = AttentionTables(table, rows=rows, positions=places, max_keys=most)
            made = attention_options(scale, window=options.get("window", 0), softcap=options.get("softcap", 0.0))
            got = attention_cuda.attend_stored(q, case.pages, tables, made, tokens=each)
            assert got.isfinite().all()
            assert torch.equal(got, want), (each, most)


@pytest.mark.parametrize("heads", [(8, 4), (2, 8)])
def test_many_query_rows_of_a_sequence_never_run_as_a_prompt(heads: tuple[int, int]) -> None:
    """Their results can then be packed for the next matmul."""
    case = make_cuda_case("fp16", [256], heads=heads[0], groups=heads[1], dim=128, page_size=256)
    for each in (5, 8, 16):
        assert not is_prompt(case.plan(each, 256, row_tokens=each))


@pytest.mark.parametrize("tokens", [3, 8])
def test_results_go_packed_to_the_next_matmul(tokens: int) -> None:
    matmul = FusedLinear([matmul_of(1024, "exl2")])
    given = matmul.input_of(tokens)
    assert given is not None
    case = make_cuda_case("fp16", [300], heads=2, groups=4, dim=128, page_size=64)
    rows, places = tokens_of([300], tokens)
    q = randn(tokens, 8, 128, seed=1).half().cuda()
    where = (case.pages, case.block_table.cuda(), rows, places)
    x = paged_attention(q, *where, scale=0.1).view(tokens, -1)
    want = matmul(x, x.new_empty(tokens, 64))
    tables = AttentionTables(where[1], rows=rows, positions=places)
    options = attention_options(0.1, window=0, softcap=0.0)
    assert attention_cuda.attend_stored(q, case.pages, tables, options, tokens=tokens, into=given) is given.scratch
    assert torch.equal(matmul.from_input(given, x.new_empty(tokens, 64)), want)


@pytest.mark.needs("wgmma|mma_pipeline")  # for a matmul that takes the packed input of 17 rows
def test_many_tokens_of_a_row_are_a_prompt() -> None:
    case = make_cuda_case("fp16", [300], heads=2, groups=4, dim=128, page_size=64)
    options = attention_options(0.1, window=0, softcap=0.0)
    for each in (300, 17):
        rows, places = tokens_of([300], each)
        q = randn(each, 8, 128, seed=1).half().cuda()
        where = (case.block_table.cuda(), rows, places)
        want = paged_attention(q, case.pages, *where, scale=0.1)
        tables = AttentionTables(where[0], rows=rows, positions=places)
        assert torch.equal(attention_cuda.attend_stored(q, case.pages, tables, options, tokens=each), want)
    given = FusedLinear([matmul_of(1024, "exl2")]).input_of(17)
    with pytest.raises(ShapeError, match="few tokens a row"):
        attention_cuda.attend_stored(q, case.pages, tables, options, tokens=17, into=given)


def test_operands_that_do_not_fit_are_refused() -> None:
    case = make_cuda_case("fp16", [9], heads=2, groups=2, dim=64)
    rows, places = tokens_of([9], 3)
    q = randn(3, 4, 64, seed=1).half().cuda()
    table, options = case.block_table.cuda(), attention_options(1.0, window=0, softcap=0.0)
    tables = AttentionTables(table, rows=rows, positions=places)
    with pytest.raises(ShapeError, match="attend_stored: q"):
        attention_cuda.attend_stored(q[:, :3], case.pages, tables, options, tokens=3)
    with pytest.raises(ShapeError, match="heads side by side"):
        attention_cuda.attend_stored(
            q.transpose(0, 1).contiguous().transpose(0, 1), case.pages, tables, options, tokens=3
        )
    with pytest.raises(ShapeError, match="attend_stored"):
        attention_cuda.attend_stored(
            q, case.pages, AttentionTables(table, rows=rows[:2], positions=places), options, tokens=3
        )
    with pytest.raises(DTypeError, match="int32"):
        attention_cuda.attend_stored(q.int(), case.pages, tables, options, tokens=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [5, 72])
def test_keys_in_views_of_wider_rows_are_rotated_and_stored(kind: Any, dtype: torch.dtype, tokens: int) -> None:
    heads, dim = (8, 2), 128
    cos, sin = randn(80, dim // 2, seed=3).cuda(), randn(80, dim // 2, seed=4).cuda()
    positions = torch.arange(tokens, device="cuda")
    slots = torch.randperm(96, generator=torch.Generator().manual_seed(2))[:tokens].cuda()
    qkv = randn(tokens, (heads[0] + 2 * heads[1]) * dim, seed=1).to("cuda", dtype)
    ends = [0, heads[0] * dim, (heads[0] + heads[1]) * dim, qkv.shape[1]]
    views = [qkv[:, a:b].view(tokens, -1, dim) for a, b in pairwise(ends)]
    turn = attention_cuda.Rotation(cos=cos, sin=sin, positions=positions, interleaved=False)
    plain = [view.contiguous() for view in views]
    pages = [KVPages.allocate(kind, 6, 16, heads[1], dim, torch.device("cuda")) for _ in range(2)]
    for kept, (q, k, v) in zip(pages, (plain, views), strict=True):
        rope_store(kept, q, k, v, rotation=turn, slots=slots)
    for a, b in zip(plain, views, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(*(p.tensors() for p in pages), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    with pytest.raises(ShapeError, match="one stride"):
        rope_store(pages[0], views[0], views[1], plain[2], rotation=turn, slots=slots)
