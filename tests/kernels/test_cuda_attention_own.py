"""Rotation, storing and attention of one token a sequence in one launch equal separate launches; needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import KINDS, UNDER_A_TOOL, OwnStep, matmul_of, own_step
from internals import group_of
from torch import Tensor

from exl_kernels import _native
from exl_kernels.attention import cuda as attention_cuda
from exl_kernels.attention import paged_attention
from exl_kernels.errors import DTypeError, ShapeError, UnsupportedError
from exl_kernels.linear.cuda import CudaQuantMatrix, launch_matmul
from exl_kernels.linear.fused import FusedLinear
from exl_kernels.linear.matmul_input import MatmulInput
from exl_kernels.selection import FEW_ROWS, Card

pytestmark = pytest.mark.cuda


def assert_same_step(step: OwnStep, **options: Any) -> None:
    step.forget()
    want = step.apart(**options)
    stored = [t.clone() for t in step.case.pages.tensors()]
    for early in (False, True):
        step.forget()
        torch.cuda.synchronize()
        got = step.together(early=early, **options)
        assert got.isfinite().all()
        assert torch.equal(got, want)
        for a, b in zip(step.case.pages.tensors(), stored, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "rotated", "interleaved"),
    [
        (2, 4, 128, 128, False),
        (2, 4, 64, 64, True),
        (8, 4, 128, 64, False),
        (2, 2, 256, 256, False),
        (2, 1, 80, 32, False),
        (1, 7, 96, 96, True),
        (1, 16, 64, 32, False),
        (1, 20, 128, 128, False),
        (3, 2, 8, 8, False),
        (2, 3, 192, 64, True),
        (2, 4, 128, 0, False),
    ],
)
def test_own_keys_in_the_same_launch_equal_separate_launches(
    kind: Any, heads: int, groups: int, dim: int, rotated: int, interleaved: bool
) -> None:
    lengths = [1, 64, 65, 150, 0, *([513] if UNDER_A_TOOL else [1000, 513, 2100])]
    options = {"heads": heads, "groups": groups, "dim": dim, "rotated": rotated, "interleaved": interleaved}
    for part in (lengths[5:6], lengths[3:4], lengths[:1], lengths):
        assert_same_step(own_step(kind, part, **options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "rotated"),
    [
        *[(2, 4, 128, 128), (8, 7, 128, 64), (2, 3, 64, 64), (2, 2, 256, 256), (2, 1, 80, 32), (1, 12, 128, 0)],
        (4, 2, 96, 96),
    ],
)
def test_norms_of_q_and_k_equal_separate_operators(
    kind: Any, dtype: torch.dtype, heads: int, groups: int, dim: int, rotated: int
) -> None:
    """Pages of whole units, which the kernels of one token a sequence take, and others."""
    lengths = [1, 64, 65, 150, 0, *([513] if UNDER_A_TOOL else [1000, 513, 2100])]
    options = {"heads": heads, "groups": groups, "dim": dim, "rotated": rotated, "dtype": dtype}
    for part in (lengths[5:6], lengths[:2], lengths):
        for page_size in (64, 16):
            step = own_step(kind, part, page_size=page_size, **options)
            assert_same_step(step, norms=step.norms())


@pytest.mark.parametrize("window", [100, 513, 2100, 4096])
def test_windows_of_some_keys_and_of_all(window: int) -> None:
    for lengths in ([1000, 513, 2100], [64, 100], [3]):
        assert_same_step(own_step("fp16", lengths, heads=2, groups=4, dim=128, page_size=256), window=window)


@pytest.mark.parametrize("tokens", [9, 64, 70])
def test_norms_where_tokens_are_many(tokens: int) -> None:
    """Short sequences, of which `attention_long` takes whole splits."""
    step = own_step("fp16", [1 + 37 * i % 300 for i in range(tokens)], heads=8, groups=4, dim=128, page_size=256)
    assert_same_step(step, norms=step.norms())


def test_norms_that_do_not_fit() -> None:
    step = own_step("fp16", [3], heads=2, groups=2, dim=64, page_size=64)
    norms = step.norms()
    for wrong in (replace(norms, q=norms.q[:32]), replace(norms, k=norms.k.half())):
        with pytest.raises(ShapeError, match="norms of q and k"):
            step.together(norms=wrong)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("groups", "dim", "rotated", "interleaved"),
    [
        *[(4, 128, 128, False), (4, 128, 128, True), (7, 64, 64, False), (1, 64, 64, True), (12, 128, 0, False)],
        *[(16, 128, 64, True), (4, 128, 64, False), (4, 128, 32, True), (2, 64, 32, False), (2, 64, 4, False)],
        *[(2, 128, 96, True), (2, 128, 96, False)],
        *[(2, 256, 256, False), (2, 256, 256, True), (16, 256, 64, False), (1, 256, 128, False)],
        *[(1, 96, 96, False), (8, 80, 32, False), (2, 112, 112, True), (3, 96, 72, False)],
    ],
)
def test_own_keys_in_pages_of_whole_units(
    kind: Any, dtype: torch.dtype, groups: int, dim: int, rotated: int, interleaved: bool
) -> None:
    lengths = [1, 64, 65, 150, 0, 1000, 513, 2100, 449, 512]
    options = {"heads": 2, "groups": groups, "dim": dim, "rotated": rotated, "interleaved": interleaved, "dtype": dtype}
    for part in (lengths[3:5], lengths[6:7]) if UNDER_A_TOOL else (lengths[7:8], lengths[6:7], lengths[3:4], lengths):
        assert_same_step(own_step(kind, part, page_size=64 if groups == 7 else 256, **options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_own_keys_of_other_types_windows_and_caps(kind: Any, dtype: torch.dtype) -> None:
    step = own_step(kind, [700, 30, 129], dim=128, groups=4, dtype=dtype)
    assert_same_step(step)
    assert_same_step(step, window=100)
    assert_same_step(step, softcap=20.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("groups", [2, 12])
@pytest.mark.parametrize("longest", [300, 600])
def test_heads_of_256_of_many_sequences(kind: Any, dtype: torch.dtype, groups: int, longest: int) -> None:
    """On Hopper blocks of whole splits: of one team up to 512 keys, of two beyond for packed pages."""
    lengths = [longest, 1, 65, *[1] * 66, 257]
    assert_same_step(own_step(kind, lengths, heads=4, groups=groups, dim=256, page_size=64, dtype=dtype))


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "lengths"),
    [
        (8, 4, 128, [8192]),
        (8, 4, 128, [1024, 1000, 513, 1, 700, 1024, 64, 65]),
        (8, 4, 128, [22528]),
        (8, 4, 128, [6144, 6100, 5000, 1]),
        (4, 8, 128, [12288]),
        (4, 8, 128, [8192, 8191, 100, 4097]),
        (2, 16, 128, [16384]),
        (8, 2, 256, [16384]),
        (8, 2, 96, [8100]),
    ],
)
def test_long_contexts(heads: int, groups: int, dim: int, lengths: list[int]) -> None:
    """On Hopper clusters of four blocks, or blocks of whole splits, one to three of which share an SM."""
    if UNDER_A_TOOL:
        lengths = lengths[-2:]
    step = own_step("fp16", lengths, heads=heads, groups=groups, dim=dim, page_size=256)
    assert_same_step(step)
    assert_same_step(step, softcap=20.0, norms=step.norms())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("groups", "dim"), [(2, 256), (4, 128), (1, 64), (1, 96)])
def test_caps_in_pages_of_whole_units(kind: Any, groups: int, dim: int) -> None:
    for lengths in ([65], [513, 64, 0]) if UNDER_A_TOOL else ([150], [2100], [1, 64, 65, 0, 1000], [300] * 70):
        step = own_step(kind, lengths, heads=2, groups=groups, dim=dim, page_size=64)
        assert_same_step(step, softcap=20.0)
        assert_same_step(step, softcap=20.0, window=4096, norms=step.norms())


@pytest.mark.parametrize("kind", ["fp16", "q4"])
@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("lengths", [[300], [2300], [300, 17, 0, 1025]])
def test_own_keys_in_a_graph_read_ahead_of_the_launches_before(kind: Any, page_size: int, lengths: list[int]) -> None:
    step = own_step(kind, lengths, dim=128, groups=4, heads=4, page_size=page_size)
    want = step.apart()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), attention_cuda.counters("cuda") as held:
        step.together(early=True)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs = [step.together(early=True) for _ in range(20)]
    for _ in range(3):
        step.forget()
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        for out in outs:
            assert torch.equal(out, want)
    assert not held.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("groups", "dim"), [(4, 128), (12, 128), (16, 128), (3, 64), (1, 96)])
def test_many_sequences_equal_each_alone(kind: Any, groups: int, dim: int) -> None:
    """More blocks than are resident: a block has a whole split of a sequence, or all of it."""
    lengths = [1, 512, 513, 1024, 0, 63, 700, 2100]
    lengths = [*lengths[:7], *[1] * 57] if UNDER_A_TOOL else lengths * 8
    step = own_step(kind, lengths, heads=4, groups=groups, dim=dim, page_size=64)
    assert_same_step(step)
    many = step.together(early=True)
    q, k, v = step.parts()
    for b in (2, 63) if UNDER_A_TOOL else (0, 2, 7, 8, 30, 63):
        one = slice(b, b + 1)
        alone = attention_cuda.attend_own(
            *(q[one], k[one], v[one], step.case.pages),
            tables=attention_cuda.AttentionTables(
                step.table, rows=step.rows[one], positions=step.positions[one], max_keys=step.lengths[b]
            ),
            slots=step.slots[one],
            rotation=attention_cuda.Rotation(
                cos=step.cos, sin=step.sin, positions=step.rope_positions[one], interleaved=False
            ),
            options=attention_cuda.attention_options(step.case.scale, window=0, softcap=0.0),
        )
        assert torch.equal(alone[0], many[b]), b


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("groups", "dim"), [(3, 64), (12, 64), (4, 128), (12, 128), (2, 112)])
def test_blocks_of_every_size_give_the_bits_of_tokens_many(
    kind: Any, dtype: torch.dtype, groups: int, dim: int
) -> None:
    """A sequence's keys in the blocks of a cluster, in one block of two teams, and (many short sequences) of one."""
    batches = [[200, 65, 1], [700, 513, 64, 1] * 11, [511, 64, 1, 300, 512, 65, 130] * 10]
    if UNDER_A_TOOL:  # as many blocks, most of them of one key
        batches = [[*batch[:3], *[1] * (len(batch) - 3)] for batch in batches]
    for lengths in batches:
        step = own_step(kind, lengths, heads=4, groups=groups, dim=dim, page_size=64, dtype=dtype)
        if not UNDER_A_TOOL:
            assert_same_step(step)
        step.forget()
        got = step.together()
        step.forget()
        q = step.stored()
        for b in (2,) if UNDER_A_TOOL else (0, 1, 2):
            where = (t[b : b + 1].repeat(17) for t in (step.rows, step.positions))
            many = paged_attention(q[b : b + 1].repeat(17, 1, 1), step.case.pages, step.table, *where, scale=dim**-0.5)
            assert torch.equal(many[0], got[b]), (lengths[b], len(lengths))


def test_own_keys_that_do_not_fit_are_refused() -> None:
    step = own_step("fp16", [5, 9], dim=64)
    q, k, v = step.parts()
    tables = attention_cuda.AttentionTables(step.table, rows=step.rows, positions=step.positions)
    turn = attention_cuda.Rotation(cos=step.cos, sin=step.sin, positions=step.rope_positions, interleaved=False)
    pages, options = step.case.pages, attention_cuda.attention_options(1.0, window=0, softcap=0.0)
    with pytest.raises(ShapeError, match="attend_own: k"):
        attention_cuda.attend_own(q, k[:1], v, pages, tables=tables, slots=step.slots, rotation=turn, options=options)
    with pytest.raises(DTypeError, match="float32"):
        attention_cuda.attend_own(
            q, k.float(), v, pages, tables=tables, slots=step.slots, rotation=turn, options=options
        )
    with pytest.raises(ShapeError, match="own keys"):
        attention_cuda.attend_own(q, k, v, pages, tables=tables, slots=step.slots[:1], rotation=turn, options=options)


def packed(matrix: CudaQuantMatrix, x: Tensor) -> tuple[int, Tensor]:
    """Columns, and scratch memory as the matmul's own packing launch leaves it for x [T, K]."""
    rows, group = x.shape[0], group_of(matrix)
    few = rows <= FEW_ROWS
    plan = group.plan_with("gemm_few" if few else "gemm_batch", _native.MatmulCall(rows))
    scratch = torch.zeros(plan.scratch_bytes, dtype=torch.uint8, device="cuda")
    launch_matmul(group, plan, x, x.new_empty(rows, 64), scratch=scratch)
    columns = FEW_ROWS if few else plan.input_columns  # one row has no packed input where the table decides
    assert columns is not None
    return columns, scratch


@pytest.mark.needs("bulk_copy", "wgmma")
@pytest.mark.parametrize("kind", ["fp16", "q4"])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(2, 4, 128), (1, 5, 128), (4, 7, 64), (1, 16, 128), (2, 4, 96)])
@pytest.mark.parametrize("matrix", ["exl2", "gptq"])
@pytest.mark.parametrize("options", [{}, {"softcap": 20.0}], ids=["few", "decode"])
def test_results_packed_for_the_next_matmul(
    kind: Any, heads: int, groups: int, dim: int, matrix: str, options: dict[str, Any]
) -> None:
    made = matmul_of(heads * groups * dim, matrix)
    cycle = [65, 1, 700, 0, *([1, 1, 1, 64] if UNDER_A_TOOL else [256, 130, 513, 64])]
    for tokens in (3, 9, 64, 65) if UNDER_A_TOOL else (1, 3, 8, 9, 16, 23, 64, 65, 90, 128):
        step = own_step(kind, (cycle * 16)[:tokens], heads=heads, groups=groups, dim=dim, page_size=64)
        want = step.apart(**options)
        columns, reference = packed(made, want.view(tokens, -1))
        count = made.in_features // 32 * 64 * columns  # of rows that are there
        for early in (False, True):
            scratch = torch.full((reference.numel() + 1300,), 0xA5, dtype=torch.uint8, device="cuda")
            into = MatmulInput(made, columns, scratch)
            step.forget()
            torch.cuda.synchronize()
            assert step.together(early=early, into=into, **options) is scratch
            assert torch.equal(scratch[:count], reference[:count]), (tokens, early)
            assert (scratch[count:] == 0xA5).all()


@pytest.mark.needs("wgmma")
def test_a_matmul_takes_only_inputs_packed_for_it() -> None:
    matmul, other = (FusedLinear([matmul_of(1024, kind)]) for kind in ("exl2", "gptq"))
    for tokens in (9, 64) if UNDER_A_TOOL else (9, 16, 23, 64):
        step = own_step("fp16", [5 + at for at in range(tokens)], dim=128, groups=4, page_size=64)
        x = step.apart().view(tokens, -1)
        residual = x[:, :64].contiguous()
        step.forget()
        given = matmul.input_of(tokens)
        assert given is not None
        step.together(into=given)
        want = matmul(x, x.new_empty(tokens, 64), residual)
        assert torch.equal(matmul.from_input(given, x.new_empty(tokens, 64), residual), want)
        out = x.new_empty(tokens, 64)
        for who, what, to in (
            (other, given, out),
            (FusedLinear([matmul.matrices[0], other.matrices[0]]), given, x.new_empty(tokens, 128)),
            (matmul, given, x.new_empty(80 - tokens, 64)),
            (matmul, replace(given, columns=given.columns + 8), out),
            (matmul, given, x.new_empty(tokens - 1, 64)),
        ):
            with pytest.raises(ShapeError, match="packed for"):
                who.from_input(what, to)
        with pytest.raises(ShapeError, match="expected contiguous"):
            matmul.from_input(given, out[:, :32])


@pytest.mark.needs("wgmma|mma_pipeline")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_blocks_that_share_k_need_not_wait_for_one_another(dtype: torch.dtype) -> None:
    made = matmul_of(4096, "exl2")
    group, stream = group_of(made), torch.cuda.current_stream().cuda_stream
    bf16 = dtype == torch.bfloat16
    wide = (65, 96, 128) if "wgmma" in Card.device(0).features else ()
    for rows in (9, 16, 23, 32, 64, *wide):
        x = torch.randn(rows, 4096, device="cuda").to(dtype)
        call = _native.MatmulCall(rows, bfloat16=bf16)
        most = group.plan_with("gemm_batch", call, _native.MatmulTuning.batch(cut=4))
        scratch = torch.zeros(most.scratch_bytes, dtype=torch.uint8, device="cuda")
        exchange = torch.full((most.exchange_bytes,), 255, dtype=torch.uint8, device="cuda")
        assert exchange.numel(), "K is shared"
        want = None
        for looks in [0, 1, 2, 3] * (1 if UNDER_A_TOOL else 8):
            y = torch.full((rows, 64), torch.nan, dtype=dtype, device="cuda")
            plan = group.plan_with("gemm_batch", call, _native.MatmulTuning.batch(cut=4, looks=looks))
            launch = _native.Launch(stream, looks % 2 == 0)
            group.run(plan, x, y, launch, scratch=scratch, exchange=exchange)
            want = y if want is None else want
            assert torch.equal(y, want)
        assert bool((exchange[1024:] == 255).all()), "left as it was found"


def test_packing_that_does_not_fit_is_rejected() -> None:
    step, made = own_step("fp16", [5] * 9, dim=128, groups=4), matmul_of(1024, "exl2")
    scratch = torch.zeros(1 << 16, dtype=torch.uint8, device="cuda")
    good = MatmulInput(made, 16, scratch)
    with pytest.raises(UnsupportedError, match="out and into"):
        step.together(into=good, out=torch.empty(9, 8, 128, dtype=torch.float16, device="cuda"))
    for into, why in (
        (replace(good, columns=8), "9 tokens in 8 columns"),
        (replace(good, columns=24), "in 24 columns"),
        (replace(good, matrix=matmul_of(512, "exl2")), "takes 512 inputs"),
        (replace(good, scratch=scratch[: 1 << 14]), "32768 bytes"),
        (replace(good, scratch=scratch[8:]), "aligned to 16"),
    ):
        with pytest.raises(ShapeError, match=why):
            step.together(into=into)
    with pytest.raises(DTypeError, match="bfloat16"):
        own_step("fp16", [5], dim=128, groups=4, dtype=torch.bfloat16).together(into=good)
    with pytest.raises(DTypeError, match="scratch"):
        step.together(into=replace(good, scratch=scratch.view(torch.int32)))
