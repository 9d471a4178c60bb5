"""Fused matmuls of 65 to 128 rows are bitwise those of blocks of 64 rows, which other tests cover."""

from __future__ import annotations

import os
import random

import pytest
import torch
from linear_cases import DTYPES, K, activations, exl2, gptq, norm_of, qkv
from torch import Tensor

from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.fused import FusedLinear
from exl_kernels.selection import BLOCK_ROWS, PACKED_ROWS

pytestmark = pytest.mark.cuda

UNDER_A_TOOL = "EXL_SANITIZER" in os.environ  # as in attention_cases.py
ROWS = (65, 128) if UNDER_A_TOOL else (65, 80, 81, 96, 97, 127, 128)


def wide(matrices: list[QuantMatrix], **options: object) -> FusedLinear:
    """A matmul of more rows than PACKED_ROWS."""
    return FusedLinear(matrices, **options)  # type: ignore[arg-type]


def in_blocks(fused: FusedLinear, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """Blocks of PACKED_ROWS rows, one launch each."""
    out = torch.full((len(x), fused.out_features), float("nan"), dtype=x.dtype, device=x.device)
    for begin in range(0, len(x), PACKED_ROWS):
        some = slice(begin, begin + PACKED_ROWS)
        fused(x[some], out[some], None if residual is None else residual[some])
    return out


def same(fused: FusedLinear, x: Tensor, residual: Tensor | None = None) -> bool:
    """Whether one call is bitwise the blocks of it."""
    want = in_blocks(fused, x, residual)
    got = fused(x, torch.full_like(want, float("nan")), residual)
    return torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize(
    "kind", ["one order", "own orders", "gptq", "gptq act-order", "groups of 32", "gptq groups of 32"]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_several_matrices(kind: str, dtype: torch.dtype, normed: bool) -> None:
    fused = wide(qkv(kind), norm=norm_of(dtype) if normed else None, dtype=dtype)
    for m in ROWS:
        assert same(fused, activations(m, K, dtype)), m


@pytest.mark.needs("wgmma")
def test_one_launch_takes_all_rows() -> None:
    fused = wide(qkv("one order"))
    assert all(len(fused.blocks(m)) == 1 and fused.kernel(m) == "gemm_batch" for m in ROWS)
    assert len(fused.blocks(BLOCK_ROWS + 1)) == 2


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(("n", "k"), [(4096, 2048), (4096 * 5, 512), (1000, 2048), (64, 256), (17024, 512)])
def test_every_width_and_size(bits: int, n: int, k: int) -> None:
    """Sizes of which blocks share K, and of which they process all of it in several rounds."""
    fused = wide([exl2(n, bits, k=k)])
    for m in (65, 96, 128):
        assert same(fused, activations(m, k, torch.float16)), m


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_in_place(dtype: torch.dtype) -> None:
    fused = wide([exl2(K, 5, 4, bias=True)], dtype=dtype)
    for m in ROWS:
        x, h = activations(m, K, dtype), torch.randn(m, K, device="cuda").to(dtype)
        want = in_blocks(fused, x, h)
        assert torch.equal(fused(x, h, h), want), m


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("n", [640, 8320])
@pytest.mark.parametrize("widths", [((4,), (4,)), ((5, 4), (4, 3)), ((8,), (8,))])
@pytest.mark.parametrize("group", [128, 32])
def test_gated_results_go_to_the_next_matmul(
    activation: str, n: int, widths: tuple[tuple[int, ...], ...], group: int
) -> None:
    gate, up = (exl2(n, *w, seed=i, perm=torch.arange(K).flip(0), group=group) for i, w in enumerate(widths))
    down = exl2(544, 4, 3, seed=3, k=n, group=group)
    first, second = wide([gate, up], norm=norm_of(torch.float16), activation=activation), wide([down])
    for m in ROWS:
        x = activations(m, K, torch.float16)
        h = torch.randn(m, 544, device="cuda").half()
        assert same(first, x), m
        want = in_blocks(second, in_blocks(first, x), h)
        got = first.then(second, x, torch.full_like(want, float("nan")), h)
        assert torch.equal(got.view(torch.int16), want.view(torch.int16)), m


@pytest.mark.parametrize("group", [128, 32])
def test_gptq_results_go_to_the_next_matmul(group: int) -> None:
    gate, up = gptq(8320, False, group), gptq(8320, False, group)
    down = gptq(4480, False, group, 8320)
    first, second = wide([gate, up], activation="silu"), wide([down])
    for m in ROWS:
        x = activations(m, K, torch.float16) * 8
        want = in_blocks(second, in_blocks(first, x))
        assert torch.equal(first.then(second, x, torch.full_like(want, float("nan"))), want), m


@pytest.mark.parametrize("form", ["exl2", "exl2 groups of 32", "gptq", "gptq groups of 32"])
def test_a_small_gated_pair_and_its_reader(form: str) -> None:
    """The kernels of plain and of transposed input of each form, as small as they get with a gate inside."""
    group, k, n = 32 if "32" in form else 128, 256, 8192
    if form.startswith("exl2"):
        down = exl2(64, 4, k=n, group=group)
        gate, up = (exl2(n, bits, seed=bits, k=k, perm=torch.arange(k), group=group) for bits in (3, 4))
    else:
        gate, up, down = gptq(n, False, group, k), gptq(n, False, group, k), gptq(64, False, group, n)
    first, second = wide([gate, up], activation="silu"), wide([down])
    for m in (65, 96, 128):
        x = activations(m, k, torch.float16)
        want = in_blocks(second, in_blocks(first, x))
        assert torch.equal(first.then(second, x, torch.full_like(want, float("nan"))), want), m


@pytest.mark.parametrize("seed", range(60))
def test_random_matmuls(seed: int) -> None:
    rng = random.Random(seed)
    dtype, gated = rng.choice(DTYPES), rng.random() < 0.4
    perm = torch.randperm(K, generator=torch.Generator().manual_seed(seed)) if rng.random() < 0.6 else None
    sizes = [32 * rng.randint(1, 300) for _ in range(2 if gated else rng.randint(1, 3))]
    if gated:
        sizes[1] = sizes[0]
    group = 32 if seed % 4 == 3 else 128
    matrices = [
        exl2(n, *rng.choices((2, 3, 4, 5, 6, 8), k=rng.choice((1, 2))), seed=seed + i, perm=perm, group=group)
        for i, n in enumerate(sizes)
    ]
    norm = norm_of(dtype) if rng.random() < 0.6 else None
    fused = wide(matrices, norm=norm, activation="silu" if gated else None, dtype=dtype)
    m = rng.randint(65, 128)
    h = torch.randn(m, fused.out_features, device="cuda").to(dtype) if not gated and rng.random() < 0.4 else None
    assert same(fused, activations(m, K, dtype), h), (sizes, m)


def test_captured_launches_share_the_workspace_with_fewer_rows() -> None:
    matrices = [wide([exl2(64 * items, 4, seed=items)]) for items in (1, 224, 64, 400, 27)]
    for m in (128, 64, 90, 100, 70):
        x = activations(m, K, torch.float16)
        wants = [in_blocks(fused, x) for fused in matrices]
        outs = [torch.full_like(want, float("nan")) for want in wants]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for fused, out in zip(matrices, outs, strict=True):
                fused(x, out)
        for _ in range(3):
            graph.replay()
        assert all(torch.equal(out, want) for out, want in zip(outs, wants, strict=True)), m


def test_logits_in_float32() -> None:
    """The head's results, of all rows at once and of each block."""
    fused = wide([exl2(17024, 6, bias=True)])
    for m in ROWS:
        x = activations(m, K, torch.float16)
        if fused.kernel(m) is None or len(fused.blocks(m)) > 1:
            continue
        out = torch.full((m, 17024), float("nan"), device="cuda")
        fused.chained(x, out)
        for begin in range(0, m, PACKED_ROWS):
            some = slice(begin, begin + PACKED_ROWS)
            want = torch.empty_like(out[some])
            fused.matrices[0].matmul(x[some], out=want)
            assert torch.equal(out[some], want), m


def test_more_rows_than_a_block_run_in_blocks() -> None:
    fused = wide([exl2(64, 4)])
    for m in (BLOCK_ROWS + 1, 2 * BLOCK_ROWS + 65):
        assert len(fused.blocks(m)) > 1
        assert same(fused, activations(m, K, torch.float16)), m
