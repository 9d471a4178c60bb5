"""Paged attention on a GPU against the FP64 twin, and its bitwise promises; needs a GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from attention_cases import (
    BOUND,
    KINDS,
    UNDER_A_TOOL,
    assert_close,
    is_prompt,
    make_cuda_case,
    randn,
    require_prompt_kernel,
)

from exl_kernels import _native
from exl_kernels.attention import paged_attention
from exl_kernels.cuda_ops import launch_on
from exl_kernels.errors import DTypeError, ShapeError
from exl_kernels.kv import store_kv

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "groups", "dim"),
    [
        (2, 1, 64),
        (1, 8, 64),
        (2, 3, 80),
        (1, 4, 96),
        (2, 4, 128),
        (1, 7, 128),
        (2, 2, 192),
        (1, 2, 256),
        (3, 5, 32),
        (2, 2, 8),
        (1, 20, 72),
        (1, 33, 128),
    ],
)
def test_matches_the_oracle(kind: Any, heads: int, groups: int, dim: int) -> None:
    case = make_cuda_case(kind, [150, 70], heads=heads, groups=groups, dim=dim)
    rows, positions = [0] * 6 + [1] * 4 + [0], [0, 1, 63, 64, 65, 149, 0, 30, 69, 64, 127]
    assert_close(case.run(rows, positions), case.oracle(rows, positions))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_prefill_matches_the_oracle(kind: Any, dim: int) -> None:
    case = make_cuda_case(kind, [200, 333], heads=2, groups=4, dim=dim)
    rows, positions = [0] * 100 + [1] * 150, [*range(100, 200), *range(150, 300)]
    pick = [0, 1, 15, 16, 37, 99, 100, 101, 180, 249]
    got = case.run(rows, positions)
    want = case.oracle([rows[i] for i in pick], [positions[i] for i in pick])
    assert_close(got[pick], want)


@pytest.mark.parametrize("seed", range(300))
def test_random_shapes_match_the_oracle(seed: int) -> None:
    rng = random.Random(seed)
    kind, dim = rng.choice(KINDS), 8 * rng.randint(8, 32) if seed % 4 else 32 * rng.choice((2, 3, 4, 6, 8))
    lengths = [rng.randint(1, rng.choice((40, 300, 900))) for _ in range(rng.randint(1, 4))]
    options: dict[str, Any] = {}
    if rng.random() < 0.25:
        options["window"] = rng.randint(1, 400)
    if rng.random() < 0.15:
        options["softcap"] = rng.uniform(5.0, 60.0)
    case = make_cuda_case(
        kind,
        lengths,
        heads=rng.randint(1, 3),
        groups=rng.randint(1, 9),
        dim=dim,
        page_size=rng.choice((1, 5, 16, 64, 256, 256)),
        shuffle=rng.randint(0, 2),
    )
    row = rng.randrange(len(lengths))
    first = rng.randint(0, lengths[row] - 1)
    count = min(lengths[row] - first, rng.choice((1, 2, 16, 17, 90)))  # tokens of one sequence, then one of each other
    rows, positions = [row] * count, list(range(first, first + count))
    for other, length in enumerate(lengths):
        rows, positions = [*rows, other], [*positions, length - 1]
    got = case.run(rows, positions, **options)
    assert got.isfinite().all()
    pick = sorted({0, count // 2, count - 1, *range(count, len(rows))})
    want = case.oracle([rows[i] for i in pick], [positions[i] for i in pick], **options)
    assert_close(got[pick], want)


@pytest.mark.parametrize("kind", ["fp16", "q6"])
@pytest.mark.parametrize("page_size", [1, 7, 16, 64, 100, 256, 2048])
def test_long_contexts_match_the_oracle(kind: Any, page_size: int) -> None:
    case = make_cuda_case(kind, [1300, 600], page_size=page_size, heads=1, groups=2)
    rows, positions = [0, 0, 0, 0, 1], [1299, 255, 256, 512, 599]
    assert_close(case.run(rows, positions), case.oracle(rows, positions))


def test_forty_splits_match_the_oracle() -> None:
    case = make_cuda_case("fp16", [40 * 256], heads=1, groups=2, page_size=256)
    rows, positions = [0, 0, 0], [40 * 256 - 1, 33 * 256, 32 * 256 - 1]
    assert_close(case.run(rows, positions), case.oracle(rows, positions))


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 255, 256, 500, 513, 5000])
@pytest.mark.parametrize("kind", ["fp16", "q4"])
def test_window_keeps_the_last_w_keys(window: int, kind: Any) -> None:
    case = make_cuda_case(kind, [1100])
    rows, positions = [0] * 6, [0, 64, 500, 512, 1024, 1099]
    assert_close(case.run(rows, positions, window=window), case.oracle(rows, positions, window=window))
    many = list(range(700, 1000))
    got = case.run([0] * 300, many, window=window)
    pick = [0, 1, 68, 150, 299]
    assert_close(got[pick], case.oracle([0] * 5, [many[i] for i in pick], window=window))


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("kind", ["fp16", "q4"])
def test_softcap(softcap: float, kind: Any) -> None:
    case = make_cuda_case(kind, [200])
    case.scale = 1.0
    rows, positions = [0] * 3, [5, 100, 199]
    # Logits reach 20, where the halves' roundings of queries and keys are worth 0.01 of a logit.
    assert_close(case.run(rows, positions, softcap=softcap), case.oracle(rows, positions, softcap=softcap), 2e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_activation_types(kind: Any, dtype: torch.dtype) -> None:
    case = make_cuda_case(kind, [150], dim=128, dtype=dtype)
    got = case.run([0, 0, 0], [5, 64, 149])
    assert got.dtype == dtype
    assert_close(got, case.oracle([0, 0, 0], [5, 64, 149]), 8e-3 if dtype == torch.bfloat16 else BOUND)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 90])
def test_key_mask_is_added_and_infinity_takes_a_key_out(kind: Any, tokens: int) -> None:
    case = make_cuda_case(kind, [330, 290])
    mask = randn(2, 330, seed=9)
    mask[:, :40] = -torch.inf  # left padding
    rows, positions = [0] * tokens + [1] * tokens, [*range(329, 329 - tokens, -1), *range(100, 100 + tokens)]
    pick = [0, tokens - 1, tokens, 2 * tokens - 1]
    expected = case.oracle([rows[i] for i in pick], [positions[i] for i in pick], key_mask=mask)
    got = case.run(rows, positions, key_mask=mask.cuda())
    assert_close(got[pick], expected)
    assert not case.run([1], [20], key_mask=mask.cuda()).any()  # sees padding only
    # The padding's content does not matter, even if it is NaN.
    slots = torch.arange(40)
    for b in range(2):
        pages = case.block_table[b].long()[slots // 16]
        for t in case.pages.tensors():
            t[pages.cuda(), (slots % 16).cuda()] = torch.nan if t.dtype == torch.float16 else 0x7F
    assert torch.equal(case.run(rows, positions, key_mask=mask.cuda()), got)


@pytest.mark.parametrize("tokens", [1, 70])
def test_rows_that_see_only_finitely_masked_keys_stay_finite(tokens: int) -> None:
    case = make_cuda_case("fp16", [300])
    mask = torch.zeros(1, 300)
    mask[:, :290] = -1e30
    rows, positions = [0] * (tokens + 1), [*range(200, 200 + tokens), 299]
    got = case.run(rows, positions, key_mask=mask.cuda())
    assert got.isfinite().all()
    assert_close(got[-1:], case.oracle([0], [299], key_mask=mask))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "groups"), [(64, 1), (128, 4), (256, 3)])
def test_a_token_is_bitwise_identical_alone_in_a_batch_and_in_any_chunk(kind: Any, dim: int, groups: int) -> None:
    lengths = [600, 420]
    case = make_cuda_case(kind, lengths, dim=dim, groups=groups)
    rows = [0] * lengths[0] + [1] * lengths[1]
    positions = [*range(lengths[0]), *range(lengths[1])]
    whole = case.run(rows, positions)
    plans = []
    for count in (1, 16, 33) if UNDER_A_TOOL else (1, 2, 5, 16, 33, 100, 250):
        for begin in (17, 600) if UNDER_A_TOOL else (0, 17, 255, 311, 600, 640, 1020 - count):
            part = slice(begin, begin + count)
            assert torch.equal(case.run(rows[part], positions[part]), whole[part]), (count, begin)
        plans.append(case.plan(count, 600))
    assert not all(is_prompt(plan) for plan in plans)
    # Batches of one token a sequence, in any order.
    assert torch.equal(case.run([0, 1], [599, 419]), whole[[599, 1019]])
    assert torch.equal(case.run([1, 0], [419, 599]), whole[[1019, 599]])
    mixed = [3, 1019, 250, 700, 599, 600]
    assert torch.equal(case.run([rows[i] for i in mixed], [positions[i] for i in mixed]), whole[mixed])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 20.0}])
def test_prefill_and_decode_kernels_are_bitwise_identical(kind: Any, dim: int, options: dict[str, Any]) -> None:
    """Long heads on cards with 99 KB of shared memory, and heads of 128 on Turing, have small prefill kernels."""
    case = make_cuda_case(kind, [900], dim=dim, groups=4, heads=2)
    require_prompt_kernel(case.plan(900, 1))
    assert not is_prompt(case.plan(1, 900))
    # max_keys of one split makes the plan choose the kernel that shares keys; it reads all of them all the same.
    shared = case.run([0] * 900, list(range(900)), max_keys=1, **options)
    for position in (0, 63, 64, 255, 256, 257, 640, 899):
        assert torch.equal(case.run([0], [position], **options)[0], shared[position]), position


@pytest.mark.parametrize("kind", KINDS)
def test_page_placement_and_page_size_change_no_bit(kind: Any) -> None:
    rows, positions = [0, 0, 1, 1], [10, 511, 300, 299]
    first = make_cuda_case(kind, [512, 301], dim=128).run(rows, positions)
    assert torch.equal(make_cuda_case(kind, [512, 301], dim=128, shuffle=2).run(rows, positions), first)
    assert torch.equal(make_cuda_case(kind, [512, 301], dim=128, page_size=256, shuffle=1).run(rows, positions), first)
    assert torch.equal(make_cuda_case(kind, [512, 301], dim=128, page_size=3).run(rows, positions), first)


def test_a_bound_on_keys_changes_no_bit() -> None:
    case = make_cuda_case("q8", [700, 700], dim=128)
    rows, positions = [0, 1, 0, 1, 0], [699, 4, 30, 698, 256]
    whole = case.run(rows, positions)
    assert torch.equal(case.run(rows, positions, max_keys=700), whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_any_number_of_blocks_that_share_a_row_is_bitwise_identical(kind: Any, dim: int) -> None:
    """Batches of 1 to 64: shares of a unit, of splits, and whole rows; lengths on and next to their borders."""
    lengths = [3000, 513, 2048, 513, *[1] * 5] if UNDER_A_TOOL else [3000, 2049, 2048, 513, 512, 511, 65, 64, 1]
    case = make_cuda_case(kind, lengths, dim=dim, groups=4, heads=8, queries=50)
    alone = [case.run([b], [n - 1])[0] for b, n in enumerate(lengths)]
    shares = set()
    for batch in (2, 9) if UNDER_A_TOOL else (2, 5, 9, 16, 64):
        rows = [i % len(lengths) for i in range(batch)]
        got = case.run(rows, [lengths[r] - 1 for r in rows])
        for i, r in enumerate(rows):
            assert torch.equal(got[i], alone[r]), (batch, lengths[r])
        shares.add(case.plan(batch, 3000).blocks)
    assert len(shares) > 1  # of 2 and 9 sequences alone 17 and 4 on 132 SMs, by the plan's own test
    for b, n in ((0, 3000), (3, 513)):
        assert_close(alone[b][None], case.oracle([b], [n - 1]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "page_size"),
    [
        *[(2, 4, 128, 256), (8, 4, 128, 64), (1, 1, 64, 256), (2, 7, 64, 192), (2, 8, 128, 128), (1, 16, 128, 256)],
        *[(2, 2, 256, 256), (1, 12, 256, 64)],
    ],
)
def test_tokens_one_a_sequence_have_the_bits_of_tokens_many(
    kind: Any, heads: int, groups: int, dim: int, page_size: int
) -> None:
    """Pages that hold whole units: a kernel of its own, whose blocks join in clusters."""
    lengths = [n + d for n in (64, 128, 256, 512) for d in (-1, 0, 1)] + [1, 2, 33, 200, 448, 577, 1500, 4097, 9000]
    if UNDER_A_TOOL:
        lengths = [1, 65, 513, 1100]
    case = make_cuda_case(kind, [max(lengths)], heads=heads, groups=groups, dim=dim, page_size=page_size, queries=70)
    for n in lengths:
        many = case.run([0] * 17, [n - 1] * 17)
        for bound in ({}, {"max_keys": n}, {"max_keys": n + 700}):
            assert torch.equal(case.run([0], [n - 1], **bound)[0], many[0]), (n, bound)
    assert_close(many[:1], case.oracle([0], [lengths[-1] - 1]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("groups", "dim"), [(2, 256), (4, 128), (16, 128), (1, 64)])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_tokens_one_a_sequence_equal_those_of_the_kernel_for_masks(
    kind: Any, groups: int, dim: int, softcap: float
) -> None:
    """A mask of zeros changes no logit and selects the kernel for few tokens. 70 sequences: blocks of whole splits."""
    lengths = [1, 64, 65] if UNDER_A_TOOL else [1, 64, 65, 200, 449, 512, 513, 2100]
    case = make_cuda_case(kind, lengths, heads=2, groups=groups, dim=dim, page_size=64)
    mask = torch.zeros(len(lengths), max(lengths), device="cuda")
    for batch in ([2], [1, 0], range(len(lengths)), [i % len(lengths) for i in range(70)]):
        rows, positions = list(batch), [lengths[i] - 1 for i in batch]
        want = case.run(rows, positions, softcap=softcap, key_mask=mask)
        assert torch.equal(case.run(rows, positions, softcap=softcap), want), batch
        assert_close(want[:1], case.oracle(rows[:1], positions[:1], softcap=softcap), 2e-2 if softcap else BOUND)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("groups", "dim"), [(2, 128), (4, 64), (2, 256)])
def test_a_batchs_clusters_are_bitwise_identical(kind: Any, groups: int, dim: int) -> None:
    lengths = [513, 512, 511, 65, 64, 1, 300] + ([1] * 9 if UNDER_A_TOOL else [257 + 5 * i for i in range(57)])
    case = make_cuda_case(kind, lengths, dim=dim, groups=groups, heads=4, page_size=256)
    alone = [case.run([b], [n - 1], max_keys=n)[0] for b, n in enumerate(lengths)]
    for batch in (2, 16) if UNDER_A_TOOL else (2, 4, 8, 16, 33, 64):
        got = case.run(list(range(batch)), [n - 1 for n in lengths[:batch]])
        for i in range(batch):
            assert torch.equal(got[i], alone[i]), (batch, lengths[i])


def test_one_sequences_nan_stays_with_it() -> None:
    case = make_cuda_case("fp16", [64, 64], groups=1)
    case.pages.value[case.block_table[1, 0]] = torch.nan
    alone = case.run([0, 0], [20, 50])
    mixed = case.run([0, 1, 1, 0], [20, 3, 40, 50])
    assert torch.equal(mixed[[0, 3]], alone)
    assert mixed[1].isnan().any()


def test_bad_rows_pages_and_positions_touch_no_foreign_memory() -> None:
    case = make_cuda_case("fp16", [64])
    assert not case.run([5, -1], [3, 3]).any()
    assert not case.run([0], [-1]).any()
    assert torch.equal(case.run([0], [63]), case.run([0], [63]))
    case.block_table[0, 1] = 10**6
    assert case.run([0], [63]).isfinite().all()
    assert case.run([], []).shape == (0, 4, 64)


def test_bad_indices_are_refused_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_cuda_case("fp16", [64])
    monkeypatch.setenv("EXL_CUDA_CHECKS", "1")
    with pytest.raises(ShapeError, match="row 5 of token 0"):
        case.run([5], [3])
    with pytest.raises(ShapeError, match="slot 100000 of token 1"):
        store_kv(
            case.pages, torch.zeros(2, 2, 64).cuda(), torch.zeros(2, 2, 64).cuda(), torch.tensor([0, 100000]).cuda()
        )
    assert case.run([0], [63]).isfinite().all()


def test_bad_operands_are_refused() -> None:
    case = make_cuda_case("fp16", [64])
    q = torch.zeros(1, 4, 64, device="cuda", dtype=torch.float16)
    zero = torch.zeros(1, dtype=torch.int32, device="cuda")
    table = case.block_table.cuda()
    with pytest.raises(DTypeError, match="cpu"):
        paged_attention(q, case.pages, table.cpu(), zero, zero, scale=1.0)
    with pytest.raises(DTypeError, match="float64"):
        paged_attention(q.double(), case.pages, table, zero, zero, scale=1.0)
    with pytest.raises(ShapeError, match="q"):
        paged_attention(q[..., :32], case.pages, table, zero, zero, scale=1.0)
    with pytest.raises(ShapeError, match="out"):
        paged_attention(q, case.pages, table, zero, zero, scale=1.0, out=q.float())


def test_runs_in_a_captured_graph_with_lengths_that_change() -> None:
    case = make_cuda_case("q4", [300], dim=128)
    table = case.block_table.cuda()
    position, row = torch.tensor([40], dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int32).cuda()
    q = case.q[0, 40:41].half().cuda()
    paged_attention(q, case.pages, table, row, position, scale=case.scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(q, case.pages, table, row, position, scale=case.scale)
    for at in (40, 299, 255, 0):
        position.fill_(at)
        q.copy_(case.q[0, at : at + 1])
        graph.replay()
        assert torch.equal(out.cpu(), case.run([0], [at]))


def test_a_launch_needs_the_memory_of_its_plan() -> None:
    """The plan is made once, for the call's own operands, and the launch does not go without its workspace."""
    case = make_cuda_case("fp16", [600, 300], dim=64)
    table, pages = case.block_table.cuda(), case.pages.native_cuda()
    q = torch.zeros(2, 4, 64, dtype=torch.float16, device="cuda")
    rows = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    tables = _native.AttentionTables(table, rows=rows, positions=rows)
    options = _native.AttentionOptions(1.0, window=0, softcap=0.0)
    call = pages.attention(q.flatten(), q_stride=256, tables=tables, options=options, out=q, launch=launch_on(q))
    floats, counters = call.partial_floats, call.ticket_counters
    assert floats > 0
    assert counters > 0
    for partials, tickets in ((None, None), (torch.empty(floats - 1, device="cuda"), None)):
        with pytest.raises(ValueError, match=f"{floats} float32 and {counters} int32 are needed"):
            call.run(partials, tickets)
