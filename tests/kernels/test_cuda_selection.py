"""The kernels that a GPU launches are those that the selection names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import make_cuda_case
from expert_cases import float_experts_of

from exl_kernels import _native
from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.fused import FusedLinear, FusedNorm
from exl_kernels.moe import GroupedExperts, expert_router
from exl_kernels.sampling import Plan, Row, sample
from exl_kernels.selection import Card, MatrixShape

pytestmark = pytest.mark.cuda

K = 1024
MATMULS = ("gemv_ring", "gemm_few", "gemm_direct", "gemm_batch", "gemm_tile")


def matrix(n: int, seed: int, k: int = K) -> tuple[QuantMatrix, MatrixShape]:
    generator = torch.Generator().manual_seed(seed)
    groups = k // 128
    tensors = {
        "q_weight": torch.randint(-(2**31), 2**31, (16 * groups, n), generator=generator).to(torch.int32),
        "q_scale": torch.zeros(groups, n // 8, dtype=torch.int32),
        "q_scale_max": torch.full((groups,), 0.01).half(),
        "q_groups": torch.tensor([[4, 16 * g] for g in range(groups)], dtype=torch.int16).flatten(),
        "q_invperm": torch.arange(k, dtype=torch.int32),
    }
    return QuantMatrix.from_exl2(tensors, device="cuda"), MatrixShape.from_exl2(tensors)


def launched() -> set[str]:
    """Matmul kernels of the table that have run since the last call, as `gemm_tile_exl2_128_1` for instance."""
    new = names()
    return {kernel for kernel in MATMULS if any(name.startswith(f"{kernel}_") for name in new)}


def names() -> set[str]:
    """Kernels that have run since the last call of this or of `launched`."""
    now: dict[str, int] = _native.cuda_launches()
    new = {name for name, count in now.items() if count > names.before.get(name, 0)}  # type: ignore[attr-defined]
    names.before = now  # type: ignore[attr-defined]
    return new


names.before = {}  # type: ignore[attr-defined]


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 33, 64])
def test_the_selected_kernel_is_launched(rows: int) -> None:
    card = Card.device(torch.cuda.current_device())
    made = [matrix(n, seed) for seed, n in enumerate((512, 512))]
    quantized, shapes = [m for m, _ in made], [shape for _, shape in made]
    x = torch.randn(rows, K, device="cuda").half()
    weight = torch.ones(K, device="cuda").half()
    launched()
    for gate, norm, residual in ((False, False, False), (True, True, False), (False, False, True)):
        before = FusedNorm(weight, 1e-5) if norm else None
        used, known = (quantized, shapes) if gate else (quantized[:1], shapes[:1])
        fused = FusedLinear(used, norm=before, activation="silu" if gate else None)
        out = x.new_empty(rows, fused.out_features)
        fused(x, out, torch.zeros_like(out) if residual else None)
        expected = card.plan(known, rows, activation=gate, norm="rms" if norm else None, residual=residual)
        assert launched() == {expected.kernel}, (gate, norm, residual, expected)
    quantized[0].matmul(x)
    assert launched() == {card.matmul(shapes[0], rows).kernel}


@pytest.mark.parametrize("rows", [3, 8, 9, 64])
@pytest.mark.parametrize("n", [512, 8448])
def test_chained_matmuls_launch_the_kernels_of_their_plans(rows: int, n: int) -> None:
    gate, up, down = matrix(n, 1)[0], matrix(n, 2)[0], matrix(256, 3, n)[0]
    first, second = FusedLinear([gate, up], activation="silu"), FusedLinear([down])
    x = torch.randn(rows, K, device="cuda").half()
    launched()
    first.then(second, x, x.new_empty(rows, 256))
    expected = {kernel for kernel in (first.kernel(rows), second.kernel(rows)) if kernel is not None}
    assert launched() >= expected


@pytest.mark.parametrize(
    ("rows", "hidden"), [(1, K), (8, K), (9, K), (32, K), (33, K), (64, K), (8, 3 * K), (16, 3 * K)]
)
def test_experts_are_launched_as_selected(rows: int, hidden: int) -> None:
    made = [(matrix(256, i, hidden), matrix(256, i + 1, hidden), matrix(hidden, i + 2, 256)) for i in range(4)]
    grouped = GroupedExperts([(gate[0], up[0], down[0]) for gate, up, down in made], "silu")
    card = Card.device(torch.cuda.current_device())
    expected = card.experts([(gate[1], up[1], down[1]) for gate, up, down in made], rows, 2)
    assert expected.joined
    assert grouped.shares(rows, 2, False)
    h = torch.randn(rows, hidden, device="cuda").half()
    ids = torch.tensor([[0, 3]], device="cuda").expand(rows, 2).contiguous()
    names()
    grouped(h, torch.full((rows, 2), 0.5, device="cuda"), ids)
    assert names() == set(expected.kernel.split(" + "))


@pytest.mark.parametrize("rows", [1, 24, 64])
@pytest.mark.parametrize("width", [96, 97])
def test_float_experts_are_launched_as_selected(rows: int, width: int) -> None:
    """Cards have no kernels of 32 and 64 rows for 97 features, whose rows are not aligned."""
    experts = float_experts_of(torch.float16, 3, 128, width)
    grouped = GroupedExperts(experts, "silu")
    card = Card.device(torch.cuda.current_device())
    expected = card.float_experts(rows, 2, experts=3, hidden=128, width=width)
    assert expected.joined
    h = torch.randn(rows, 128, device="cuda").half()
    ids = torch.tensor([[0, 2]], device="cuda").expand(rows, 2).contiguous()
    names()
    grouped(h, torch.full((rows, 2), 0.5, device="cuda"), ids)
    assert names() == set(expected.kernel.split(" + "))


@pytest.mark.parametrize("rows", [1, 64, 200])
@pytest.mark.parametrize("jitter", [None, 0.1])
def test_a_router_launches_what_its_shape_selects(rows: int, jitter: float | None) -> None:
    made = QuantMatrix.from_float(torch.zeros(128, K).half(), device="cuda", name="router")
    router = expert_router(made, 2, normalize=True, jitter=jitter)
    assert router is not None
    card, x = Card.device(torch.cuda.current_device()), torch.randn(rows, K, device="cuda").half()
    shape: dict[str, Any] = {"hidden": K, "experts": 128, "chosen": 2, "sparse": jitter is not None}
    norm = FusedNorm(torch.ones(K, device="cuda"), 1e-5)
    for given, rms in ((None, None), (norm, K)):
        expected = card.plan_router(rows, **shape, rms=rms)
        plan = router.plan(rows, given)
        assert (plan.kernel, plan.norms) == (expected.kernel, expected.norms) == (expected.kernel, rms is not None)
        names()
        if given is None:
            router(x)
        else:
            router.norm_and_route(x, given)
        assert names() == {f"{expected.kernel}_f16"}
        assert router.plan(rows, given) is plan, "kept"


@pytest.mark.parametrize(("tokens", "dim"), [(1, 128), (2, 128), (1, 72), (200, 64)])
def test_attention_is_launched_as_planned(tokens: int, dim: int) -> None:
    case = make_cuda_case("fp16", [300], heads=2, groups=4, dim=dim, page_size=64)
    names()
    case.run([0] * tokens, list(range(300 - tokens, 300)))
    planned = case.plan(tokens, case.block_table.shape[1] * 64)
    assert {name for name in names() if name.startswith("attention_")} == {planned.kernel}


@pytest.mark.parametrize("count", [1, 3])
def test_sampling_is_launched_as_planned(count: int) -> None:
    card = Card.device(torch.cuda.current_device())
    logits = torch.randn(count, 3000, generator=torch.Generator().manual_seed(1)).cuda()
    for plan, negative in (
        (Plan(3000, greedy=True), False),
        (Plan(3000), False),
        (Plan(3000, top_k=50, top_p=0.8), False),
        (Plan(3000, min_p=0.1, cfg_scale=1.5), True),
    ):
        rows = [Row(plan, line, 0.3, negative=logits[0] if negative else None) for line in logits]
        names()
        sample(rows)
        selected = card.sampling(plan, count, 3000, negative=negative)
        assert names() == set(selected.kernel.split(" + "))
