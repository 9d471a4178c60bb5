"""Fused matmuls on a GPU are bitwise identical to the separate operators, captured and eager."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from linear_cases import DTYPES, K, activations, exl2, gptq, norm_of, qkv
from torch import Tensor

from exl_kernels.cuda_ops import activation as activate
from exl_kernels.cuda_ops import gated_activation, layer_norm, rms_norm
from exl_kernels.device import programmatic_launch, set_programmatic_launch
from exl_kernels.errors import DTypeError, ShapeError, UnsupportedError
from exl_kernels.linear.fused import FusedLinear, FusedNorm

pytestmark = pytest.mark.cuda

UNDER_A_TOOL = "EXL_SANITIZER" in os.environ  # as in attention_cases.py
ROWS = [1, 2, 5, 9, 40, 64] if UNDER_A_TOOL else [1, 2, 3, 5, 8, 9, 33, 64]
MANY_ROWS = (9, 32, 40, 64) if UNDER_A_TOOL else (9, 16, 17, 32, 33, 50, 64)


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Compare the bits of halves of either kind; -0 is not 0."""
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize(
    "kind", ["one order", "own orders", "gptq", "gptq act-order", "groups of 32", "gptq groups of 32"]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_several_matrices(kind: str, dtype: torch.dtype, normed: bool) -> None:
    matrices, norm = qkv(kind), norm_of(dtype) if normed else None
    fused = FusedLinear(matrices, norm=norm, dtype=dtype)
    for m in ROWS:
        x = activations(m, K, dtype)
        out = torch.full((m, fused.out_features), float("nan"), dtype=dtype, device="cuda")
        assert fused(x, out) is out
        inner = rms_norm(x, norm.weight, norm.eps) if norm else x
        assert torch.equal(out, torch.cat([matrix.matmul(inner) for matrix in matrices], 1)), m


@pytest.mark.parametrize(("kind", "k"), [("one", 256), ("one", 3968), ("own", 1024), ("one", 4608), ("own", 8192)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_layer_norm_of_the_input(kind: str, k: int, dtype: torch.dtype, with_bias: bool) -> None:
    """Rows far from zero: the mean is taken off before squares are added. Matrices have one order or their own."""
    perm = torch.randperm(k, generator=torch.Generator().manual_seed(7)) if kind == "one" else None
    matrices = [exl2(n, 5, 4, seed=i, perm=perm, bias=True, k=k) for i, n in enumerate((512, 160))]
    weight, bias = torch.rand(k, device="cuda") + 0.5, torch.randn(k, device="cuda") if with_bias else None
    fused = FusedLinear(matrices, norm=FusedNorm(weight, 1e-5, layer=True, bias=bias), dtype=dtype)
    for m in ROWS:
        x = 2 + activations(m, k, dtype)
        out = torch.full((m, fused.out_features), float("nan"), dtype=dtype, device="cuda")
        inner = layer_norm(x, weight, bias, 1e-5)
        assert torch.equal(fused(x, out), torch.cat([matrix.matmul(inner) for matrix in matrices], 1)), m


@pytest.mark.parametrize("kind", ["exl2", "exl2 groups of 32", "gptq", "gptq groups of 32"])
def test_a_layer_norm_of_the_input_in_every_format(kind: str) -> None:
    group = 32 if "32" in kind else 128
    matrix = exl2(160, 4, k=256, group=group) if "exl2" in kind else gptq(160, False, group, 256)
    weight, bias = torch.rand(256, device="cuda") + 0.5, torch.randn(256, device="cuda")
    fused = FusedLinear([matrix], norm=FusedNorm(weight, 1e-5, layer=True, bias=bias))
    for m in (1, 2):
        x = 2 + activations(m, 256, torch.float16)
        out = torch.full((m, 160), float("nan"), dtype=torch.float16, device="cuda")
        assert torch.equal(fused(x, out), matrix.matmul(layer_norm(x, weight, bias, 1e-5))), m


@pytest.mark.needs("bulk_copy")
def test_one_launch_takes_a_layer_norm_of_few_rows() -> None:
    weight = torch.ones(K, device="cuda")
    fused = FusedLinear([exl2(512, 4)], norm=FusedNorm(weight, 1e-5, layer=True), activation="gelu")
    assert [fused.kernel(rows) for rows in (1, 2, 3, 9)] == ["gemv_ring", "gemv_ring", None, None]
    with pytest.raises(ShapeError, match="norm bias"):
        FusedLinear([exl2(512, 4)], norm=FusedNorm(weight, 1e-5, layer=True, bias=weight[:8]))


@pytest.mark.parametrize("activation", ["silu", "gelu", "quickgelu"])
@pytest.mark.parametrize("widths", [((4,), (4,)), ((5, 4), (4, 3))])
@pytest.mark.parametrize("group", [128, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated(activation: str, widths: tuple[tuple[int, ...], ...], group: int, dtype: torch.dtype) -> None:
    gate, up = (exl2(608, *w, seed=i, perm=torch.arange(K).flip(0), group=group) for i, w in enumerate(widths))
    norm = norm_of(dtype)
    fused = FusedLinear([gate, up], norm=norm, activation=activation, dtype=dtype)  # type: ignore[arg-type]
    for m in ROWS:
        x = activations(m, K, dtype)
        out = torch.full((m, 608), float("nan"), dtype=dtype, device="cuda")
        fused(x, out)
        inner = rms_norm(x, norm.weight, norm.eps)
        assert torch.equal(out, gated_activation(gate.matmul(inner), up.matmul(inner), activation)), m


@pytest.mark.parametrize("activation", ["silu", "gelu", "quickgelu"])
@pytest.mark.parametrize("kind", ["exl2", "exl2 groups of 32", "gptq act-order", "gptq groups of 32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_of_one_matrix(activation: Any, kind: str, dtype: torch.dtype) -> None:
    """An activation after one matmul, alone and with the matmul that takes its results."""
    group = 32 if "32" in kind else 128
    if kind.startswith("exl2"):
        up, down = exl2(K, 5, 4, seed=1, bias=True, group=group), exl2(528, 4, seed=2, group=group)
    else:
        up, down = (gptq(n, "act-order" in kind, group) for n in (K, 544))
    norm = norm_of(dtype)
    first, second = FusedLinear([up], norm=norm, activation=activation, dtype=dtype), FusedLinear([down], dtype=dtype)
    for m in ROWS:
        x = activations(m, K, dtype)
        want = activate(up.matmul(rms_norm(x, norm.weight, norm.eps)), activation)
        got = first(x, torch.full_like(want, float("nan")))
        assert bitwise_equal(got, want), m
        h = torch.randn(m, down.out_features, device="cuda").to(dtype)
        assert torch.equal(first.then(second, x, torch.full_like(h, float("nan")), h), h + down.matmul(want)), m


@pytest.mark.needs("bulk_copy", "clusters")
@pytest.mark.parametrize(("k", "n"), [(256, 1024), (4608, 18432), (1152, 128), (256, 22528)])
def test_activated_results_go_to_the_next_matmul(k: int, n: int) -> None:
    """Whole tiles, tiles that blocks share, a next matmul that walks its tiles twice, and one by `gemm_direct`."""
    up, down = exl2(n, 4, seed=1, k=k, bias=True), exl2(k, 4, seed=2, k=n)
    first, second = FusedLinear([up], activation="gelu"), FusedLinear([down])
    for m in (3, 8):
        assert first.chains_to(second, m)
        x = activations(m, k, torch.float16)
        want = down.matmul(activate(up.matmul(x), "gelu"))
        assert torch.equal(first.then(second, x, torch.full_like(want, float("nan"))), want), m


@pytest.mark.parametrize("pairs", [20, 296, 300, 528, 600])
@pytest.mark.parametrize("norm", [False, True])
def test_gated_tiles_that_whole_rounds_leave_over(pairs: int, norm: bool) -> None:
    """The blocks of more than eight rows take several tiles at a time, and fewer of the last round."""
    k, n = 256, 64 * pairs
    order = torch.arange(k).flip(0)
    fused = FusedLinear(
        [exl2(n, 5, 4, seed=i, perm=order, k=k) for i in range(2)],
        norm=FusedNorm(torch.rand(k, device="cuda") + 0.5, 1e-5) if norm else None,
        activation="silu",
    )
    for m in (9, 16, 27, 32, 33):
        x = activations(m, k, torch.float16)
        want = torch.cat([fused(part, part.new_empty(len(part), n)) for part in x.split(8)])
        assert bitwise_equal(fused(x, torch.full_like(want, float("nan"))), want), m


@pytest.mark.parametrize("tiles", [1, 140, 536, 576, 2113, 3000])
@pytest.mark.parametrize("k", [256, 1280])
def test_tiles_that_whole_rounds_leave_over(tiles: int, k: int) -> None:
    """The same without a gate, with K whole and in quarters, and a residual."""
    fused = FusedLinear([exl2(16 * tiles + 16, 5, 4, k=k)])
    for m in (9, 16, 27, 32, 33):
        x = activations(m, k, torch.float16)
        h = torch.randn(m, fused.out_features, generator=torch.Generator().manual_seed(m)).half().cuda()
        want = torch.cat([fused(a, torch.empty_like(b), b) for a, b in zip(x.split(8), h.split(8), strict=True)])
        assert bitwise_equal(fused(x, torch.full_like(h, float("nan")), h), want), m


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_in_place_and_captured(dtype: torch.dtype) -> None:
    matrix = exl2(K, 4)
    fused = FusedLinear([matrix], dtype=dtype)
    for m in ROWS:
        x, h = activations(m, K, dtype), torch.randn(m, K, device="cuda").to(dtype)
        want = h + matrix.matmul(x)
        assert torch.equal(fused(x, torch.empty_like(h), h), want), m
        graph, static = torch.cuda.CUDAGraph(), h.clone()
        with torch.cuda.graph(graph):
            fused(x, static, static)
        static.copy_(h)
        graph.replay()
        assert torch.equal(static, want), m


@pytest.mark.parametrize("seed", range(200))
def test_random_matmuls_with_prologues_and_epilogues(seed: int) -> None:
    """Matrices of any widths and sizes, in one order or their own, with or without a norm, gate and residual."""
    rng = random.Random(seed)
    dtype, count, gated = rng.choice(DTYPES), rng.randint(1, 3), rng.random() < 0.4
    perm = torch.randperm(K, generator=torch.Generator().manual_seed(seed)) if rng.random() < 0.6 else None
    sizes = [32 * rng.randint(1, 30) for _ in range(2 if gated else count)]
    if gated:
        sizes[1] = sizes[0]
    widths = [tuple(rng.choices((2, 3, 4, 5, 6, 8), k=rng.choice((1, 2)))) for _ in sizes]
    group = 32 if seed % 4 == 3 else 128
    matrices = [
        exl2(n, *w, seed=seed + i, perm=perm, bias=rng.random() < 0.2, group=group)
        for i, (n, w) in enumerate(zip(sizes, widths, strict=True))
    ]
    norm = norm_of(dtype) if rng.random() < 0.6 else None
    fused = FusedLinear(matrices, norm=norm, activation="silu" if gated else None, dtype=dtype)
    for m in (rng.randint(1, 2), rng.randint(3, 8), rng.randint(9, 64)):
        x = activations(m, K, dtype)
        inner = rms_norm(x, norm.weight, norm.eps) if norm else x
        parts = [matrix.matmul(inner) for matrix in matrices]
        want = gated_activation(parts[0], parts[1], "silu") if gated else torch.cat(parts, 1)
        h = torch.randn_like(want) if not gated and rng.random() < 0.4 else None
        got = fused(x, torch.full_like(want, float("nan")), h)
        assert torch.equal(got, want if h is None else h + want), (sizes, widths, m)


@pytest.mark.parametrize("kind", ["exl2", "exl2 groups of 32", "gptq", "gptq act-order", "gptq groups of 32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_after_the_other(kind: str, dtype: torch.dtype) -> None:
    """A gated product and the one that takes its results: what one call gives is what two give, and each row alone."""
    group = 32 if "32" in kind else 128
    if kind.startswith("exl2"):
        shapes = ((K, (5, 4)), (K, (4,)), (528, (6, 3)))
        gate, up, down = (exl2(n, *w, seed=i, group=group) for i, (n, w) in enumerate(shapes, 1))
    else:
        gate, up, down = (gptq(n, kind == "gptq act-order", group) for n in (K, K, 544))
    norm = norm_of(dtype)
    first = FusedLinear([gate, up], norm=norm, activation="silu", dtype=dtype)
    second = FusedLinear([down], dtype=dtype)
    h = torch.randn(64, down.out_features, device="cuda").to(dtype)
    for m in ROWS if UNDER_A_TOOL else (*ROWS, 4, 6, 7):
        x = activations(m, K, dtype)
        want = second(first(x, x.new_empty(m, K)), x.new_empty(m, down.out_features), h[:m])
        got = torch.full_like(want, float("nan"))
        assert first.then(second, x, got, h[:m]) is got
        assert torch.equal(got, want), m
        inner = rms_norm(x, norm.weight, norm.eps)
        between = gated_activation(gate.matmul(inner), up.matmul(inner), "silu")
        assert torch.equal(got, h[:m] + down.matmul(between)), m
        for i in (0, m - 1) if UNDER_A_TOOL else range(m):
            alone = first.then(second, x[i : i + 1].clone(), x.new_empty(1, down.out_features), h[i : i + 1])
            assert torch.equal(alone[0], got[i]), (m, i)


@pytest.mark.needs("bulk_copy", "clusters")
@pytest.mark.parametrize(
    ("k", "group", "inner"),
    [*((k, 128, 2048) for k in (256, K, 1152, 2304, 4096)), (1152, 32, 2048), (256, 128, 22528)],
)
def test_results_go_from_matmul_to_matmul(k: int, group: int, inner: int) -> None:
    """A layer's chained matmuls, each with a norm of its own, are bitwise identical to the separate operators.

    An inner size of 22,528 is multiplied by `gemm_direct`, between matmuls by `gemm_few`.
    """
    perms = [torch.randperm(k, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    norms = [
        FusedNorm(torch.rand(k, device="cuda").half() + 0.5, eps, offset) for eps, offset in ((1e-5, 0.0), (1e-3, 1.0))
    ]
    o, down = exl2(k, 4, 3, seed=1, k=k, bias=True, group=group), exl2(k, 5, 4, seed=2, k=inner, group=group)
    gate, up = (exl2(inner, 6, 4, seed=3 + i, perm=perms[0], k=k, group=group) for i in range(2))
    qkv = [exl2(n, 4, seed=5 + i, perm=perms[1], k=k, group=group) for i, n in enumerate((320, 64, 80))]
    matmuls = [FusedLinear([o]), FusedLinear([gate, up], norm=norms[0], activation="gelu"), FusedLinear([down])]
    matmuls.append(FusedLinear(qkv, norm=norms[1]))
    for m in (3, 8) if UNDER_A_TOOL else range(3, 9):
        assert all(matmul.takes_packed(m) for matmul in matmuls[1:])
        attended, before = (
            torch.randn(m, k, generator=torch.Generator().manual_seed(m + i)).half().cuda() for i in (0, 9)
        )
        want = before + o.matmul(attended)
        h = rms_norm(want, norms[0].weight, norms[0].eps, weight_offset=norms[0].offset)
        want_after = want + down.matmul(gated_activation(gate.matmul(h), up.matmul(h), "gelu"))
        h = rms_norm(want_after, norms[1].weight, norms[1].eps, weight_offset=norms[1].offset)
        want_qkv = torch.cat([matrix.matmul(h) for matrix in qkv], 1)
        x, out = before.clone(), torch.full_like(want_qkv, float("nan"))
        normed = matmuls[0].chained(attended, x, x, matmuls[1])
        assert normed is not None
        assert torch.equal(x, want), m
        gated = matmuls[1].chained(normed, following=matmuls[2])
        assert gated is not None
        normed = matmuls[2].chained(gated, x, x, matmuls[3])
        assert normed is not None
        assert torch.equal(x, want_after), m
        assert matmuls[3].chained(normed, out) is None
        assert torch.equal(out, want_qkv), m
        logits = torch.full(out.shape, float("nan"), device="cuda")
        matmuls[3].chained(normed, logits)
        assert torch.equal(logits.half(), want_qkv), m
        assert not torch.equal(logits, want_qkv.float()), m


def test_many_tiles_give_a_block_all_of_k() -> None:
    perm = torch.randperm(K, generator=torch.Generator().manual_seed(5))
    gate, up = exl2(8712, 5, 4, seed=1, perm=perm), exl2(8712, 4, seed=2)
    gated, single = FusedLinear([gate, up], activation="silu"), FusedLinear([up, gate])
    for m in (8,) if UNDER_A_TOOL else (3, 4, 8):
        x = activations(m, K, torch.float16)
        out, apart = torch.full((m, 8712), float("nan"), dtype=x.dtype, device="cuda"), x.new_empty(m, 2 * 8712)
        want = (gate.matmul(x), up.matmul(x))
        assert torch.equal(gated(x, out), gated_activation(*want, "silu")), m
        h = torch.randn_like(apart)
        assert torch.equal(single(x, apart, h), h + torch.cat([want[1], want[0]], 1)), m


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_one_row_of_gated_tiles_that_follow_each_other(dtype: torch.dtype, normed: bool) -> None:
    """Nine to 16 units of K and two pairs of tiles a block or more: a block has all of its gates before what they gate.
    The last tile is half a one, and blocks have two pairs or three."""
    k, n, perm = 2560, 5416, torch.randperm(2560, generator=torch.Generator().manual_seed(5))
    gate, up = exl2(n, 5, 4, seed=1, k=k, perm=perm, bias=True), exl2(n, 4, seed=2, k=k, perm=perm)
    norm = FusedNorm((torch.rand(k, device="cuda") + 0.5).to(dtype), 1e-5) if normed else None
    fused = FusedLinear([gate, up], norm=norm, activation="silu", dtype=dtype)
    for m in (1, 2):
        x = activations(m, k, dtype)
        inner = rms_norm(x, norm.weight, norm.eps) if norm else x
        want = gated_activation(gate.matmul(inner), up.matmul(inner), "silu")
        assert torch.equal(fused(x, torch.full_like(want, float("nan"))), want), m


@pytest.mark.needs("wgmma|mma_pipeline")
@pytest.mark.parametrize("kind", ["exl2", "gptq act-order"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [8200, 16640])
def test_a_gate_inside_the_matmul_of_many_rows(kind: str, dtype: torch.dtype, n: int) -> None:
    """Odd numbers of tiles, and more than all blocks have at once (n = 16640: 260 pairs of items)."""
    perm = torch.randperm(K, generator=torch.Generator().manual_seed(5))
    if kind == "exl2":
        gate, up = exl2(n, 5, 4, seed=1, perm=perm), exl2(n, 5, 4, seed=2, perm=perm, bias=True)
    else:
        gate, up = gptq(n, True), gptq(n, True)
    norm = norm_of(dtype)
    fused = FusedLinear([gate, up], norm=norm, activation="silu", dtype=dtype)
    assert fused.kernel(64) == "gemm_batch"
    for m in MANY_ROWS:
        x = activations(m, K, dtype)
        out = torch.full((m, n), float("nan"), dtype=dtype, device="cuda")
        inner = rms_norm(x, norm.weight, norm.eps)
        assert torch.equal(fused(x, out), gated_activation(gate.matmul(inner), up.matmul(inner), "silu")), m
        assert torch.equal(fused(x, torch.empty_like(out)), out), m


@pytest.mark.needs("wgmma|mma_pipeline")
@pytest.mark.parametrize("n", [8320, 8448])
@pytest.mark.parametrize("ordered", [False, True])
def test_many_gated_rows_are_packed_for_the_next_matmul(n: int, ordered: bool) -> None:
    """Half a unit of K at the end, and none; rows past the last are zero where biases would make them something."""
    perm = torch.randperm(K, generator=torch.Generator().manual_seed(5))
    gate, up = exl2(n, 5, 4, seed=1, perm=perm, bias=True), exl2(n, 5, 4, seed=2, perm=perm, bias=True)
    down = exl2(528, 6, 3, seed=3, k=n, perm=torch.arange(n) if ordered else None)
    first, second = FusedLinear([gate, up], norm=norm_of(torch.float16), activation="silu"), FusedLinear([down])
    h = torch.randn(64, down.out_features, device="cuda").half()
    for m in MANY_ROWS:
        x = activations(m, K, torch.float16)
        assert first.chains_to(second, m), m
        assert second.input_of(m) is not None, m
        want = second(first(x, x.new_empty(m, n)), x.new_empty(m, down.out_features), h[:m])
        got = torch.full_like(want, float("nan"))
        assert bitwise_equal(first.then(second, x, got, h[:m]), want), m
        off = torch.full((want.numel() + 1,), float("nan"), dtype=want.dtype, device="cuda")[1:].view_as(want)
        assert bitwise_equal(first.then(second, x, off, h[:m]), want), m


FORMS = ["exl2", "exl2 groups of 32", "gptq", "gptq act-order", "gptq groups of 32"]


@pytest.mark.needs("wgmma|mma_pipeline")
@pytest.mark.parametrize(("kind", "activation"), [*((kind, "silu") for kind in FORMS), ("gptq", "gelu")])
def test_matmuls_of_all_forms_read_gated_results(kind: str, activation: Any) -> None:
    """Outputs are few, or so many that a block has three items of 64 at a time; gates far from zero, too."""
    group, n, perm = 32 if "32" in kind else 128, 8320, torch.randperm(K, generator=torch.Generator().manual_seed(5))
    if kind.startswith("exl2"):
        gate, up = (exl2(n, 5, 4, seed=i, perm=perm, group=group) for i in (1, 2))
        downs = [exl2(f, 4, 3, seed=3, k=n, group=group) for f in (544, 4480)]
    else:
        order = kind == "gptq act-order"
        gate, up = gptq(n, order, group), gptq(n, order, group)
        downs = [gptq(f, order, group, n) for f in (544, 4480)]
    first = FusedLinear([gate, up], activation=activation)
    for down in downs if activation == "silu" else downs[:1]:
        second = FusedLinear([down])
        h = torch.randn(64, down.out_features, device="cuda").half()
        for m in (9, 40, 64) if UNDER_A_TOOL else (9, 16, 32, 33, 50, 64):
            x = activations(m, K, torch.float16) * 8
            assert first.chains_to(second, m), m
            want = second(first(x, x.new_empty(m, n)), x.new_empty(m, down.out_features), h[:m])
            got = torch.full_like(want, float("nan"))
            assert bitwise_equal(first.then(second, x, got, h[:m]), want), m


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("programmatic", [True, False])
def test_a_norm_after_a_matmul_that_leaves_few_sms_free(dtype: torch.dtype, programmatic: bool) -> None:
    """Where launches overlap, the one that norms and packs begins with placeholder blocks."""
    k, times = 2048, 10  # 128 blocks, which leave four of an H200's SMs free
    perm = torch.randperm(k, generator=torch.Generator().manual_seed(5))
    norm = FusedNorm((torch.rand(k, device="cuda") + 0.5).to(dtype), 1e-5)
    before = FusedLinear([exl2(k, 5, 4, seed=1)], dtype=dtype)
    after = FusedLinear([exl2(n, 4, seed=n, k=k, perm=perm) for n in (608, 160)], norm=norm, dtype=dtype)
    enabled = programmatic_launch()
    set_programmatic_launch(programmatic)
    try:
        for m in (9, 40, 64) if UNDER_A_TOOL else (9, 16, 17, 31, 32, 33, 50, 64):
            x, inputs = activations(m, K, dtype), [torch.randn(m, k, device="cuda").to(dtype) for _ in range(2)]
            sums = torch.empty_like(inputs[0])
            outs = torch.empty((times, m, after.out_features), dtype=dtype, device="cuda")
            results = []
            for h in inputs:
                inner = rms_norm(h + before.matrices[0].matmul(x), norm.weight, norm.eps)
                results.append(torch.cat([matrix.matmul(inner) for matrix in after.matrices], 1))
                assert torch.equal(after(before(x, sums, h), outs[0]), results[-1]), m
            if UNDER_A_TOOL:
                continue
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for i in range(times):
                    after(before(x, sums, inputs[i % 2]), outs[i])
            for _ in range(3):
                outs.fill_(torch.nan)
                graph.replay()
                for i in range(times):
                    assert torch.equal(outs[i], results[i % 2]), (m, i)
    finally:
        set_programmatic_launch(enabled)


def test_matmuls_of_all_sizes_share_the_workspace() -> None:
    """Each leaves it as the next wants it, whichever shares of items and blocks the two have."""
    perm = torch.randperm(K, generator=torch.Generator().manual_seed(5))
    sizes = (1, 160, 27, 400) if UNDER_A_TOOL else (1, 224, 64, 400, 160, 27, 112)
    matrices = [exl2(64 * items, 4, seed=items, perm=perm) for items in sizes]
    want: dict[tuple[int, int], Tensor] = {}
    for m in (9, 64, 40, 32) if UNDER_A_TOOL else (9, 32, 64, 17, 48, 16, 33):
        x = activations(m, K, torch.float16)
        for _ in range(2 if UNDER_A_TOOL else 3):
            for i, matrix in enumerate(matrices):
                out = torch.full((m, matrix.out_features), float("nan"), dtype=x.dtype, device="cuda")
                FusedLinear([matrix])(x, out)
                assert torch.equal(out, want.setdefault((m, i), out)), (m, i)
        alone = [matrix.matmul(x[:1].contiguous())[0] for matrix in matrices]
        assert all(torch.equal(want[m, i][0], one) for i, one in enumerate(alone)), m


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(64 * 300, 64 * 100 + 24), (64 * 401 + 8,)])
def test_left_over_items_of_several_matrices(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """More items than all blocks have at a time: those left over may be of two matrices, the last one not whole, with a
    bias and a residual. A row alone is bitwise identical, and so is a second run of all rows."""
    k = 2048
    perm = torch.randperm(k, generator=torch.Generator().manual_seed(8))
    matrices = [exl2(n, 5, 4, seed=i, perm=perm, bias=True, k=k) for i, n in enumerate(sizes)]
    fused = FusedLinear(matrices, dtype=dtype)
    for m in (49,) if UNDER_A_TOOL else (33, 49, 64):
        x, h = activations(m, k, dtype), torch.randn(m, sum(sizes), device="cuda").to(dtype)
        got = fused(x, torch.empty_like(h), h)
        assert torch.equal(got, fused(x, torch.empty_like(h), h)), m
        for i in (0, m - 1):
            alone = fused(x[i : i + 1].clone(), torch.empty_like(h[:1]), h[i : i + 1].clone())
            assert bitwise_equal(alone, got[i : i + 1]), (m, i)


def test_a_following_matmul_that_would_leave_items_over() -> None:
    """Gated results with rows innermost, for a matmul of more items than all blocks hold at a time."""
    gate, up = (exl2(8448, 4, seed=i) for i in (1, 2))
    down = exl2(64 * 400 + 24, 4, seed=3, k=8448)
    first, second = FusedLinear([gate, up], activation="silu"), FusedLinear([down])
    for m in (33, 49, 64):
        x = activations(m, K, torch.float16)
        want = second(first(x, x.new_empty(m, 8448)), x.new_empty(m, down.out_features))
        assert bitwise_equal(first.then(second, x, torch.full_like(want, float("nan"))), want), m


def test_bad_operands() -> None:
    a, b = exl2(64, 4), exl2(96, 4)
    with pytest.raises(UnsupportedError, match="one output size"):
        FusedLinear([a, b], activation="silu")
    with pytest.raises(UnsupportedError, match="one matrix, or two"):
        FusedLinear([a, a, a], activation="silu")
    with pytest.raises(DTypeError, match="float32"):
        FusedLinear([a], dtype=torch.float32)
    with pytest.raises(ShapeError, match="1 to 3"):
        FusedLinear([])
    fused = FusedLinear([a, b])
    x = torch.zeros(4, K, dtype=torch.float16, device="cuda")
    with pytest.raises(ShapeError, match="160"):
        fused(x, x)
    with pytest.raises(ShapeError, match="expected"):
        fused(torch.zeros(4, K + 8, dtype=torch.float16, device="cuda"), x)
    with pytest.raises(DTypeError, match="bfloat16"):
        fused(x.bfloat16(), torch.empty(4, 160, dtype=torch.float16, device="cuda"))
