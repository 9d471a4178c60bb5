"""Experts that share launches: bitwise those of one expert after the other, near float64; needs a GPU.

test_cuda_dequantized_experts.py has those of prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_cases import chosen_of, experts_of, float_experts_of, one_by_one, rows_of
from test_cuda_linear import rms

from exl_kernels.cuda_ops import rms_norm
from exl_kernels.errors import DTypeError, ShapeError, UnsupportedError
from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.cuda import CudaFloatMatrix
from exl_kernels.linear.fused import FusedNorm
from exl_kernels.moe.cuda import ExpertRouter, GroupedExperts, most_scratch_bytes, why_apart
from exl_kernels.reference import experts as reference

pytestmark = pytest.mark.cuda
MOST_CHOSEN = 1024
AT_A_TIME, MOST_PAIRS = 1024, 16384  # rows times the experts of each: that are sorted at a time, and of a launch

KINDS = ["exl2-128", "exl2-32", "exl2-128-own", "exl2-32-own", "gptq-128", "gptq-32", "gptq-32-act"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("hidden", "width", "count", "chosen"), [(256, 192, 7, 3), (512, 768, 40, 8), (4352, 256, 2, 1), (4352, 1024, 9, 4)]
)
def test_results_are_those_of_one_expert_after_the_other(
    kind: str, hidden: int, width: int, count: int, chosen: int
) -> None:
    if kind.startswith("gptq-128") and (hidden % 128 or width % 128):
        width = 256
    experts = experts_of(kind, count, hidden, width)
    together = GroupedExperts(experts, "silu")
    for rows in (1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 70):
        h, (weights, ids) = rows_of(rows, hidden, rows), chosen_of(rows, count, chosen, rows)
        x = rows_of(rows, hidden, 99)
        expected = one_by_one(h, weights, ids, experts, "silu")
        assert expected.isfinite().all()
        assert torch.equal(together(h, weights, ids, invariant=True), expected), rows
        expected = one_by_one(h, weights, ids, experts, "silu", residual=x)
        assert torch.equal(together(h, weights, ids, residual=x, out=x, invariant=True), expected), rows


@pytest.mark.parametrize("kind", ["exl2-128-even", "exl2-32-even-own", "exl2-128", "gptq-128", "gptq-32-act"])
def test_runs_of_tiles(kind: str) -> None:
    """Blocks have several tiles of an item, an odd or an even number, and items of half as many rows as others."""
    experts = experts_of(kind, 9, 2560, 1408)
    together = GroupedExperts(experts, "silu")
    for rows in (5, 24, 64):
        h, (weights, ids) = rows_of(rows, 2560, rows), chosen_of(rows, 9, 4, rows)
        assert torch.equal(together(h, weights, ids), one_by_one(h, weights, ids, experts, "silu")), rows


@pytest.mark.parametrize("activation", ["silu", "gelu", "quickgelu"])
def test_against_float64(activation: Any) -> None:
    experts = experts_of("exl2-128", 5, 256, 192)
    together = GroupedExperts(experts, activation)
    h, (weights, ids) = rows_of(6, 256), chosen_of(6, 5, 2)
    whole = [tuple(matrix.dequantize().double().cpu() for matrix in parts) for parts in experts]
    expected = reference.expert_sum(h.double().cpu(), weights.double().cpu(), ids.cpu(), whole, activation)  # type: ignore[arg-type]
    assert rms(together(h, weights, ids), expected) < 2e-3  # half precision between the matmuls


@pytest.mark.parametrize("rows", [1, 5, 20, 64])
def test_rows_with_shared_experts_and_residuals(rows: int) -> None:
    experts = experts_of("exl2-128", 6, 256, 192)
    together = GroupedExperts(experts, "silu")
    h, (weights, ids) = rows_of(rows, 256), chosen_of(rows, 6, 2)
    shared, factors, x = rows_of(rows, 256, 3), torch.rand(rows, 1).cuda(), rows_of(rows, 256, 4)
    added = {"shared": shared}
    cases: list[dict[str, Any]] = [added, {**added, "shared_weights": factors}, {**added, "residual": x}]
    for more in cases:
        expected = one_by_one(h, weights, ids, experts, "silu", **more)
        assert torch.equal(together(h, weights, ids, **more), expected), list(more)


@pytest.mark.parametrize(
    ("rows", "chosen"), [*((most // 4 + more, 4) for most in (AT_A_TIME, MOST_PAIRS) for more in (0, 1)), (1000, 3)]
)
@pytest.mark.parametrize("kind", ["exl2-128", "exl2-32-own"])
def test_many_rows_share_launches(kind: str, rows: int, chosen: int) -> None:
    """Each expert is multiplied on its packed weights at most 64 rows at a time, to compare with."""
    experts = experts_of(kind, 40, 256, 192)
    together = GroupedExperts(experts, "silu")
    h, (weights, ids) = rows_of(rows, 256), chosen_of(rows, 40, chosen)
    shared, factors, x = rows_of(rows, 256, 3), torch.rand(rows).cuda(), rows_of(rows, 256, 4)
    found = together(h, weights, ids, shared=shared, shared_weights=factors, residual=x, invariant=True)
    for some in torch.arange(rows).split(64):
        more = {"shared": shared[some], "shared_weights": factors[some], "residual": x[some]}
        assert torch.equal(found[some], one_by_one(h[some], weights[some], ids[some], experts, "silu", **more))


@pytest.mark.parametrize(("count", "chosen"), [(2, 1), (12, 4), (40, 8)])
def test_scratch_memory_is_what_load_plans_count(count: int, chosen: int) -> None:
    for kind in ("exl2-128", "exl2-128-own"):
        together = GroupedExperts(experts_of(kind, count, 256, 192), "silu")
        for rows in (1, 8, 9, 33, 64, 128, AT_A_TIME // chosen, 2000):
            most = most_scratch_bytes(rows=rows, chosen=chosen, experts=count, hidden=256, width=192)
            assert 0 < together.plan(rows, chosen, False).scratch_bytes <= most, rows


@pytest.mark.parametrize("rows", [8, 64])
def test_all_rows_may_choose_one_expert(rows: int) -> None:
    experts = experts_of("exl2-128", 9, 256, 192)
    together = GroupedExperts(experts, "silu")
    for only in (0, 4, 8):
        ids = torch.full((rows, 1), only, dtype=torch.int64).cuda()
        h, weights = rows_of(rows, 256), torch.ones(rows, 1).cuda()
        assert torch.equal(together(h, weights, ids), one_by_one(h, weights, ids, experts, "silu"))


@pytest.mark.parametrize("kind", ["exl2-128", "exl2-32-own", "gptq-32-act"])
def test_a_row_s_result_does_not_depend_on_the_others(kind: str) -> None:
    experts = experts_of(kind, 12, 512, 192)
    together = GroupedExperts(experts, "silu")
    h, (weights, ids) = rows_of(64, 512), chosen_of(64, 12, 4)
    whole = together(h, weights, ids)
    for some in (slice(0, 1), slice(5, 13), slice(20, 37), torch.randperm(64)[:48].cuda()):
        found = together(h[some].contiguous(), weights[some].contiguous(), ids[some].contiguous())
        assert torch.equal(found, whole[some])


@pytest.mark.parametrize(("floats", "rows"), [(False, 20), (True, 3), (True, 20), (True, 100)])
def test_a_captured_call_reads_what_is_chosen_when_it_runs(floats: bool, rows: int) -> None:
    experts = float_experts_of(torch.bfloat16, 12, 512, 192) if floats else experts_of("exl2-128", 12, 512, 192)
    together = GroupedExperts(experts, "silu")
    router = ExpertRouter(float_matrix(512, 12, torch.bfloat16 if floats else torch.float16), 4, normalize=True)
    h = rows_of(rows, 512)
    out = torch.empty_like(h)

    def body() -> None:
        weights, ids = router(h)
        together(h, weights, ids, out=out, invariant=True)

    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    for seed in range(4):
        h.copy_(rows_of(rows, 512, seed))
        graph.replay()
        weights, ids = router(h)
        assert torch.equal(out, one_by_one(h, weights, ids, experts, "silu"))


def float_matrix(hidden: int, experts: int, dtype: torch.dtype = torch.float16, **options: Any) -> CudaFloatMatrix:
    weight = torch.randn(experts, hidden, generator=torch.Generator().manual_seed(experts)) * 0.05
    made = QuantMatrix.from_float(weight.to(dtype), device="cuda", name="router", precise=True, **options)
    assert isinstance(made, CudaFloatMatrix)
    return made


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("hidden", "experts", "chosen"), [(64, 2, 1), (256, 8, 2), (2048, 128, 8), (1000, 160, 6), (512, 1024, 8)]
)
def test_the_router_chooses_as_its_twin(dtype: torch.dtype, hidden: int, experts: int, chosen: int) -> None:
    matrix = float_matrix(hidden, experts, dtype, bias=torch.randn(experts), prescale=0.5)
    for rows in (1, 8, 65, 200):
        h = rows_of(rows, hidden, rows)
        logits = matrix.matmul_precise(h)
        for normalize in (True, False):
            router = ExpertRouter(matrix, chosen, normalize)
            weights, ids = router(h)
            expected, wanted = reference.choose(logits.double(), chosen, normalize)
            assert torch.equal(ids, wanted)
            assert (weights - expected).abs().max() < 1e-6
            assert torch.equal(router(h)[0], weights)
            alone = router(h[rows // 2 : rows // 2 + 1].contiguous())
            assert torch.equal(alone[0][0], weights[rows // 2])
            assert torch.equal(alone[1][0], ids[rows // 2])
        if chosen == 2:
            weights, ids = ExpertRouter(matrix, 2, False, jitter=0.1)(h)
            expected, wanted = reference.choose_sparse(logits.double(), 2, 0.1)
            assert torch.equal(ids, wanted)
            assert (weights - expected).abs().max() < 1e-6


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("hidden", "experts"), [(8, 3), (64, 2), (2048, 128), (2560, 8), (4104, 60), (14336, 8)])
def test_the_router_norms_its_rows(hidden: int, experts: int, offset: float) -> None:
    """Bitwise as `rms_norm` and the router, for rows alone and together."""
    router = ExpertRouter(float_matrix(hidden, experts, bias=torch.randn(experts)), 2, normalize=True)
    norm = FusedNorm(torch.randn(hidden, generator=torch.Generator().manual_seed(1)).cuda(), 1e-5, offset)
    assert router.plan(1, norm).norms
    for rows in (1, 3, 70):
        x = rows_of(rows, hidden, rows)
        h, weights, ids = router.norm_and_route(x, norm)
        assert torch.equal(h, rms_norm(x, norm.weight, norm.eps, weight_offset=offset))
        expected, wanted = router(h)
        assert torch.equal(ids, wanted)
        assert torch.equal(weights, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "experts"), [(65, 128), (145, 128), (333, 260), (700, 40), (1100, 128), (2200, 8), (2200, 128), (4400, 2)]
)
def test_many_rows_choose_as_few(dtype: torch.dtype, rows: int, experts: int) -> None:
    """Rows of one call choose and weight bitwise as in calls of few rows, whatever rows share a block."""
    matrix = float_matrix(264, experts, dtype, bias=torch.randn(experts), prescale=0.7)
    norm = FusedNorm(torch.randn(264, generator=torch.Generator().manual_seed(1)).cuda(), 1e-5, 1.0)
    x = rows_of(rows, 264, rows)
    for router in (ExpertRouter(matrix, 2, normalize=True), ExpertRouter(matrix, 2, False, jitter=0.1)):
        weights, ids = router(x)
        h, *normed = router.norm_and_route(x, norm)
        for some in torch.arange(rows).split(64)[:: max(1, rows // 256)]:
            few = x[some].contiguous()
            expected, wanted = router(few)
            assert torch.equal(ids[some], wanted)
            assert torch.equal(weights[some], expected)
            alone = router.norm_and_route(few, norm)
            for one, other in zip((h, *normed), alone, strict=True):
                assert torch.equal(one[some], other)


@pytest.mark.parametrize("rows", [4, 600])
@pytest.mark.parametrize("experts", [16, 200])
def test_a_row_without_numbers_changes_no_other(rows: int, experts: int) -> None:
    matrix, x = float_matrix(264, experts, prescale=0.7), rows_of(rows, 264, 3)
    broken = x.clone()
    broken[1] = torch.nan
    others = torch.arange(rows) != 1
    for router in (ExpertRouter(matrix, 2, normalize=True), ExpertRouter(matrix, 2, False, jitter=0.1)):
        for found, expected in zip(router(broken), router(x), strict=True):
            assert torch.equal(found[others], expected[others])
        ids = router(broken)[1]
        assert int(ids.min()) >= 0
        assert int(ids.max()) < experts


def test_a_route_of_no_rows() -> None:
    router = ExpertRouter(float_matrix(256, 8), 2, normalize=True)
    x = rows_of(0, 256)
    h, weights, ids = router.norm_and_route(x, FusedNorm(torch.ones(256, device="cuda"), 1e-5))
    assert h.shape == (0, 256)
    for found in ((weights, ids), router(x)):
        assert [tuple(t.shape) for t in found] == [(0, 2), (0, 2)]


def test_norms_that_the_router_does_not_take() -> None:
    router = ExpertRouter(float_matrix(256, 3), 2, normalize=True)
    ones = torch.ones(257, device="cuda")
    for norm in (
        FusedNorm(ones, 1e-5),
        FusedNorm(ones[1:], 1e-5),
        FusedNorm(ones[:256].half(), 1e-5),
        FusedNorm(ones[:256], 1e-5, layer=True),
    ):
        assert not router.plan(1, norm).norms
        with pytest.raises(ShapeError, match="the router takes RMS norms of 256 features"):
            router.norm_and_route(rows_of(1, 256), norm)
    with pytest.raises(
        ShapeError, match=f"20480 features: expected a multiple of 8, at most {ExpertRouter.most_features}"
    ):
        ExpertRouter(float_matrix(20480, 3), 2, normalize=True)


def test_equally_likely_experts_are_taken_in_order() -> None:
    weight = torch.randn(4, 64).half().repeat(8, 1)  # experts 0, 4, 8, .. are alike
    made = QuantMatrix.from_float(weight, device="cuda")
    assert isinstance(made, CudaFloatMatrix)
    _, ids = ExpertRouter(made, 8, normalize=True)(rows_of(50, 64))
    assert torch.equal(ids, ids[:, :1] + torch.arange(0, 32, 4).cuda())


def test_experts_that_cannot_share_launches() -> None:
    experts = experts_of("exl2-128", 3, 256, 192)
    assert why_apart(experts, "silu") is None
    assert "1025 experts a row" in str(why_apart(experts, "silu", MOST_CHOSEN + 1))
    assert "activation gelu_erf" in str(why_apart(experts, "gelu_erf"))
    other = experts_of("gptq-32", 1, 256, 192)
    assert "expert 3 is stored in another format" in str(why_apart([*experts, *other], "silu"))
    smaller = experts_of("exl2-128", 1, 256, 128)
    assert "expert 3 has other sizes" in str(why_apart([*experts, *smaller], "silu"))
    plain = QuantMatrix.from_float(torch.zeros(192, 256), device="cuda", name="up.0")
    for parts in ((experts[0][0], plain, experts[0][2]), (plain, experts[0][1], experts[0][2])):
        assert "is stored in another format than" in str(why_apart([parts], "silu"))
    on_cpu = QuantMatrix.from_float(torch.zeros(192, 256), device="cpu", name="up.1")
    assert why_apart([(experts[0][0], on_cpu, experts[0][2])], "silu") == "up.1 is not on a GPU"
    with pytest.raises(UnsupportedError, match="no experts"):
        GroupedExperts([], "silu")


def test_operands_that_do_not_fit() -> None:
    together = GroupedExperts(experts_of("exl2-128", 3, 256, 192), "silu")
    h, (weights, ids) = rows_of(4, 256), chosen_of(4, 3, 2)
    with pytest.raises(ShapeError, match=r"\[rows, 256\]"):
        together(h[:, :128].contiguous(), weights, ids)
    with pytest.raises(ShapeError, match="twice"):
        together(h, weights[:, :1].contiguous(), ids)
    with pytest.raises(DTypeError, match=r"residual is torch\.float32"):
        together(h, weights, ids, residual=h.float())
    with pytest.raises(ShapeError, match=f"0 experts a row: expected 1 to {MOST_CHOSEN}"):
        together(h, weights[:, :0], ids[:, :0])
    with pytest.raises(ShapeError, match="4 experts of 3"):
        ExpertRouter(float_matrix(256, 3), 4, normalize=True)
    with pytest.raises(ShapeError, match=r"expected \[rows, 256\]"):
        ExpertRouter(float_matrix(256, 3), 2, normalize=True)(rows_of(4, 128))
    none = together(h[:0], weights[:0], ids[:0])
    assert none.shape == (0, 256)
