"""Quantized matrices on a GPU against the definition of their formats, over widths, groups, shapes and row counts."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping

import pytest
import torch
from internals import group_of
from torch import Tensor

from exl_kernels import _native
from exl_kernels.device import (
    programmatic_launch,
    set_programmatic_launch,
    set_row_invariant,
)
from exl_kernels.errors import DeviceError, DTypeError, FormatError, ShapeError
from exl_kernels.formats import Exl2Parts, exl2_dequantize, gptq_dequantize
from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.cuda import CudaQuantMatrix, WeightMemory, launch_matmul

pytestmark = pytest.mark.cuda

UNDER_A_TOOL = "EXL_SANITIZER" in os.environ  # as in attention_cases.py
PRECISION = 2e-5
"""Relative RMS against float64 with the kernels' own convention."""

# Groups as (bits, rows).
G128 = [(4, 128)] * 16
CASES: dict[str, tuple[list[tuple[int, int]], int]] = {
    **{f"uniform-{b}": ([(b, 128)] * 16, 256) for b in (2, 3, 4, 5, 6, 8)},
    **{f"short-{b}": ([(b, 32)] * 24, 96) for b in (2, 3, 4, 5, 6, 8)},
    "two-widths": ([(5, 128)] * 3 + [(4, 128)] * 29, 512),
    "two-widths-inside-a-unit": ([(4, 128)] * 1 + [(3, 128)] * 7, 128),
    "all-widths": ([(8, 128), (6, 128), (5, 128), (4, 128), (3, 128), (2, 128)], 160),
    "all-widths-32": ([(8, 32), (6, 96), (5, 32), (4, 64), (3, 32), (2, 160)], 64),
    "short-last-group": ([(4, 128)] * 5 + [(4, 96)], 32),
    "increasing": ([(2, 64), (8, 64), (4, 64), (2, 32)], 32),
    "few-scales-and-many": ([(6, 32)] * 8 + [(5, 128)] + [(4, 128)] * 23, 320),
    "wide-units": ([(8, 32)] * 7 + [(4, 128)] * 30 + [(4, 32)], 320),
    "many-scales-after-few": ([(5, 128)] * 16 + [(4, 64)] * 8 + [(3, 128)] * 5 + [(2, 96)], 320),
    "smallest": ([(4, 32)], 32),
    "one-unit": ([(6, 64)] * 4, 32),
    "seventeen-units": ([(4, 128)] * 34, 2144),
    "long": ([(5, 128)] * 14 + [(4, 128)] * 98, 4096),
    "wide": ([(4, 128)] * 32, 28672),
    "twenty-units": ([(5, 128)] * 5 + [(4, 128)] * 35, 5184),
    "twenty-eight-units": ([(5, 128)] * 7 + [(4, 128)] * 49, 5184),
}
LARGE = ("wide", "long", "twenty-units", "twenty-eight-units")
GPTQ = [
    (4, 512, 128, 128, False, "classic"),
    (4, 512, 128, 128, True, "classic"),
    (4, 4096, 32, 512, False, "v2"),
    (4, 2048, 2048, 64, False, "classic"),
    (2, 256, 64, 64, True, "v2"),
    (3, 384, 128, 96, False, "classic"),
    (3, 384, 64, 96, True, "classic"),
    (8, 1024, 128, 256, True, "classic"),
    (8, 320, 64, 32, False, "v2"),
]


def words(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)


def exl2_tensors(groups: list[tuple[int, int]], n: int, seed: int = 0) -> dict[str, Tensor]:
    first, table = 0, []
    for bits, rows in groups:
        table += [bits, first]
        first += rows * bits // 32
    k = sum(rows for _, rows in groups)
    generator = torch.Generator().manual_seed(seed)
    return {
        "q_weight": words(first, n, seed=seed),
        "q_scale": words(len(groups), n // 8, seed=seed + 1),
        "q_scale_max": (torch.rand(len(groups), generator=generator) * 0.02 + 0.001).half(),
        "q_groups": torch.tensor(table, dtype=torch.int16),
        "q_invperm": torch.randperm(k, generator=generator).to(torch.int32),
    }


def gptq_tensors(bits: int, k: int, group: int, n: int, act_order: bool, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    count = k // group
    tensors = {
        "qweight": words(k * bits // 32, n, seed=seed),
        "qzeros": words(count, n * bits // 32, seed=seed + 1),
        "scales": (torch.rand(count, n, generator=generator) * 0.01 + 0.001).half(),
    }
    if act_order:
        tensors["g_idx"] = torch.randint(0, count, (k,), generator=generator, dtype=torch.int32)
    return tensors


def unrounded(tensors: Mapping[str, Tensor], groups: list[tuple[int, int]]) -> Tensor:
    """W in float64 with the scale's roundings but without the weight's own."""
    rows, n = [], tensors["q_weight"].shape[1]
    for g, (bits, count) in enumerate(groups):
        first = int(tensors["q_groups"][2 * g + 1])
        stream = tensors["q_weight"][first : first + count * bits // 32].long() & 0xFFFFFFFF
        stream = torch.cat([stream, torch.zeros(1, n, dtype=torch.int64)])
        position = torch.arange(count) * bits
        low, shift = position // 32, (position % 32)[:, None]
        pair = (stream[low] >> shift) | torch.where(shift > 0, stream[low + 1] << (32 - shift), 0)
        code = pair & ((1 << bits) - 1)
        nibble = (tensors["q_scale"][g].long()[:, None] >> (4 * torch.arange(8))) & 15
        maximum = (tensors["q_scale_max"][g].float() / 256).half()
        scale = ((nibble.reshape(-1) + 1) ** 2 * maximum.double()).half().double()
        rows.append((code - 2 ** (bits - 1)).double() * scale)
    packed = torch.cat(rows)
    return packed[tensors["q_invperm"].long()]


def scaled_first(tensors: Mapping[str, Tensor]) -> Tensor:
    """Whether the weights of each input feature [K] are scaled, and so rounded, before they are multiplied."""
    layout = _native.CudaLayout.from_exl2("m", Exl2Parts(*(tensors[key] for key in Exl2Parts._fields)), 1, pack=False)
    scaled = torch.zeros(layout.in_features, dtype=torch.bool)
    if layout.maxima.numel() > -(-layout.rows // 128):  # a scale for every 32 rows
        units = layout.units.reshape(-1, 2)[:, 1] >> 16 == 0
        features = layout.features.long()
        of_row = units.repeat_interleave(256)[: layout.rows]
        scaled[features[features >= 0]] = of_row[features >= 0]
    return scaled


def multiplied(tensors: Mapping[str, Tensor], groups: list[tuple[int, int]]) -> Tensor:
    """W in float64 as the kernels multiply with it."""
    return torch.where(scaled_first(tensors)[:, None], exl2_dequantize(tensors).double(), unrounded(tensors, groups))


def rms(got: Tensor, want: Tensor) -> float:
    got, want = got.double().cpu(), want.double().cpu()
    assert got.isfinite().all()
    return float((got - want).norm() / want.norm())


def activations(m: int, k: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator)
    x[:, ::97] *= 50
    return x.to(dtype).cuda()


def matrix(case: str, **options: object) -> tuple[CudaQuantMatrix, dict[str, Tensor], list[tuple[int, int]]]:
    groups, n = CASES[case]
    tensors = exl2_tensors(groups, n)
    made = QuantMatrix.from_exl2(tensors, device="cuda", name=case, **options)  # type: ignore[arg-type]
    assert isinstance(made, CudaQuantMatrix)
    return made, tensors, groups


def of_four_bits(kind: str, group: int, k: int, n: int) -> CudaQuantMatrix:
    if kind == "exl2":
        made = QuantMatrix.from_exl2(exl2_tensors([(4, group)] * (k // group), n), device="cuda")
    else:
        made = QuantMatrix.from_gptq(gptq_tensors(4, k, group, n, False), bits=4, group_size=group, device="cuda")
    assert isinstance(made, CudaQuantMatrix)
    return made


@pytest.mark.parametrize("case", CASES)
def test_exl2_dequantize_is_bit_exact(case: str) -> None:
    made, tensors, _ = matrix(case)
    assert torch.equal(made.dequantize().cpu(), exl2_dequantize(tensors))


@pytest.mark.parametrize("case", [c for c in CASES if c not in LARGE])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exl2_matmuls(case: str, dtype: torch.dtype) -> None:
    made, tensors, groups = matrix(case)
    exact, rounded = multiplied(tensors, groups), exl2_dequantize(tensors).double()
    for m in (1, 2, 3, 8, 9, 16, 24, 33, 64):
        x = activations(m, made.in_features, dtype)
        wide = made.matmul(x, out=torch.empty(m, made.out_features, device="cuda"))
        assert rms(wide, x.double().cpu() @ exact) < PRECISION, m
        assert rms(wide, x.double().cpu() @ rounded) < 1e-3, m
        half = made.matmul(x)
        assert half.dtype == dtype
        assert torch.equal(half, wide.to(dtype)), "one rounding, from the same float32"


@pytest.mark.parametrize("case", LARGE)
def test_large_shapes(case: str) -> None:
    made, tensors, groups = matrix(case)
    exact = multiplied(tensors, groups).cuda()
    for m in (1, 5, 40):
        x = activations(m, made.in_features)
        wide = made.matmul(x, out=torch.empty(m, made.out_features, device="cuda"))
        assert rms(wide, x.double() @ exact) < PRECISION, m


@pytest.mark.parametrize(("bits", "k", "group", "n", "act_order", "zeros"), GPTQ)
def test_gptq(bits: int, k: int, group: int, n: int, act_order: bool, zeros: str) -> None:
    tensors = gptq_tensors(bits, k, group, n, act_order)
    options = {"bits": bits, "zeros": zeros, "group_size": group}
    made = QuantMatrix.from_gptq(tensors, device="cuda", **options)  # type: ignore[arg-type]
    want = gptq_dequantize(tensors, **options)  # type: ignore[arg-type]
    assert torch.equal(made.dequantize().cpu(), want)
    for m in (1, 4, 16, 64):
        x = activations(m, k)
        got = made.matmul(x, out=torch.empty(m, n, device="cuda"))
        assert rms(got, x.double().cpu() @ want.double()) < 1e-3, m


ALIKE = (
    "uniform-4",
    "short-3",
    "two-widths",
    "all-widths-32",
    "few-scales-and-many",
    "wide-units",
    "seventeen-units",
    "smallest",
)


@pytest.mark.parametrize("case", ALIKE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(case: str, dtype: torch.dtype) -> None:
    made, _, _ = matrix(case)
    x = activations(64, made.in_features, dtype)
    whole = made.matmul(x)
    for m in (1, 3, 9, 33) if UNDER_A_TOOL else (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63):
        for first in {0, 1, 64 - m}:
            if first + m <= 64:
                assert torch.equal(made.matmul(x[first : first + m]), whole[first : first + m]), (m, first)
    spoiled = x.clone()
    spoiled[5] = float("nan")
    keep = [i for i in range(64) if i != 5]
    assert torch.equal(made.matmul(spoiled)[keep], whole[keep])


def ways(made: CudaQuantMatrix, x: Tensor) -> dict[str, Tensor]:
    """x @ W by each kernel that takes its rows, in float32."""
    rows, bf16 = x.shape[0], x.dtype == torch.bfloat16
    names = [name for name in ("gemm_tile", "gemm_batch", "gemm_few", "gemv_ring") if takes(made, name, rows, bf16)]
    out = {name: torch.full((rows, made.out_features), float("nan"), device="cuda") for name in names}
    for name, y in out.items():
        launch_matmul(group_of(made), group_of(made).plan_with(name, _native.MatmulCall(rows, bfloat16=bf16)), x, y)
    return out


def takes(made: CudaQuantMatrix, kernel: str, rows: int, bf16: bool = False) -> bool:
    try:
        group_of(made).plan_with(kernel, _native.MatmulCall(rows, bfloat16=bf16))
    except DeviceError:
        return False
    return True


def planned(made: CudaQuantMatrix, rows: int, bf16: bool = False) -> str:
    """The kernel that `matmul` launches."""
    return group_of(made).plan_alone(rows, bfloat16=bf16).kernel


@pytest.mark.needs("bulk_copy", "wgmma")
@pytest.mark.parametrize("case", LARGE)
def test_large_shapes_agree_bit_for_bit(case: str) -> None:
    """Several tiles a block: two of seven stages, three of an odd and of an even number of stages."""
    made, _, _ = matrix(case)
    for m in (1, 2, 5):
        x = activations(m, made.in_features)
        found = ways(made, x)
        assert {"gemm_tile", "gemm_batch", "gemm_few"} <= found.keys(), m
        for name, out in found.items():
            assert torch.equal(out, found["gemm_tile"]), (m, name)
        for _ in range(3 if UNDER_A_TOOL else 50):
            again = made.matmul(x, out=torch.full_like(found["gemm_tile"], float("nan")))
            assert torch.equal(again, found["gemm_tile"]), m


@pytest.mark.needs("wgmma|mma_pipeline")
@pytest.mark.parametrize("case", [c for c in CASES if c not in LARGE])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernels_agree_bit_for_bit(case: str, dtype: torch.dtype) -> None:
    made, _, _ = matrix(case)
    for m in (1, 9, 17, 40, 64) if UNDER_A_TOOL else (1, 2, 5, 8, 9, 16, 17, 31, 32, 33, 50, 64):
        got = ways(made, activations(m, made.in_features, dtype, seed=m))
        for name, value in got.items():
            assert torch.equal(value, got["gemm_tile"]), (name, m)


@pytest.mark.needs("wgmma|mma_pipeline")
@pytest.mark.parametrize(("bits", "k", "group", "n", "act_order", "zeros"), GPTQ)
def test_the_kernels_agree_on_gptq(bits: int, k: int, group: int, n: int, act_order: bool, zeros: str) -> None:
    tensors = gptq_tensors(bits, k, group, n, act_order)
    made = QuantMatrix.from_gptq(tensors, bits=bits, zeros=zeros, group_size=group, device="cuda")  # type: ignore[arg-type]
    assert isinstance(made, CudaQuantMatrix)
    for m in (1, 8, 12, 20, 64):
        got = ways(made, activations(m, k, seed=m))
        for name, value in got.items():
            assert torch.equal(value, got["gemm_tile"]), (name, m)


@pytest.mark.needs("wgmma|mma_pipeline")
@pytest.mark.parametrize("m", [16, 17, 33, 48, 49])
def test_each_number_of_columns_has_a_kernel(m: int) -> None:
    made, _, _ = matrix("smallest")
    assert planned(made, m) == "gemm_batch"
    got = ways(made, activations(m, made.in_features, seed=m))
    assert torch.equal(got["gemm_batch"], got["gemm_tile"])


@pytest.mark.needs("wgmma|mma_pipeline")
@pytest.mark.parametrize("case", ["wide", "long"])
def test_large_shapes_by_every_way(case: str) -> None:
    made, _, _ = matrix(case)
    for m in (1, 2, 12, 32, 64):
        got = ways(made, activations(m, made.in_features, seed=m))
        for name, value in got.items():
            assert torch.equal(value, got["gemm_tile"]), (name, m)


@pytest.mark.needs("wgmma|mma_pipeline")
@pytest.mark.parametrize("kind", ["exl2", "gptq"])
@pytest.mark.parametrize("group", [128, 32])
def test_wide_matrices_give_a_block_three_items_at_a_time(kind: str, group: int) -> None:
    """80 items of 64 columns on 33 teams of blocks: two at a time would take a round more."""
    k, n = 512, 5120
    made = of_four_bits(kind, group, k, n)
    for m in (64,) if UNDER_A_TOOL else (33, 49, 64):
        got = ways(made, activations(m, k, seed=m))
        assert torch.equal(got["gemm_batch"], got["gemm_tile"]), m


@pytest.mark.needs("wgmma|mma_pipeline")
@pytest.mark.parametrize("kind", ["exl2", "gptq"])
@pytest.mark.parametrize("group", [128, 32])
def test_wide_matrices_with_a_remainder_of_columns(kind: str, group: int) -> None:
    """401 items of 64 columns, the last one not whole; 132 blocks have 396 at a time, and of EXL2 in groups of 128 a
    quarter of K each of the others. Twice, since each launch leaves the memory in which quarters meet as it was."""
    k, n = 2048, 64 * 400 + 24
    made = of_four_bits(kind, group, k, n)
    for m in (49,) if UNDER_A_TOOL else (49, 64):
        x = activations(m, k, seed=m)
        got = ways(made, x)
        assert torch.equal(got["gemm_batch"], got["gemm_tile"]), m
        again = torch.full_like(got["gemm_batch"], float("nan"))
        launch_matmul(group_of(made), group_of(made).plan_with("gemm_batch", _native.MatmulCall(m)), x, again)
        assert torch.equal(again, got["gemm_tile"]), m


def random_groups(rng: random.Random, most: int) -> list[tuple[int, int]]:
    """Groups of any widths, of up to `most` rows together: all of 128 rows but the last, or of any multiple of 32."""
    even, widths = rng.random() < 0.5, rng.sample((2, 3, 4, 5, 6, 8), rng.randint(1, 3))
    left, groups = 32 * rng.randint(1, most // 32), []
    while left:
        rows = min(left, 128 if even else 32 * rng.randint(1, 6))
        groups.append((rng.choice(widths), rows))
        left -= rows
    return groups


@pytest.mark.parametrize("seed", range(300))
def test_random_exl2_matmuls(seed: int) -> None:
    rng = random.Random(seed)
    groups, n = random_groups(rng, rng.choice((256, 1024, 3072))), 32 * rng.randint(1, 24)
    tensors, dtype = exl2_tensors(groups, n, seed), rng.choice((torch.float16, torch.bfloat16))
    bias, prescale = rng.random() < 0.3, rng.choice((1.0, 1.0, 0.375))
    if bias:
        tensors["bias"] = torch.randn(n, generator=torch.Generator().manual_seed(seed)).half()
    if rng.random() < 0.3:
        tensors["q_invperm"] = torch.arange(tensors["q_invperm"].numel(), dtype=torch.int32)
    made = QuantMatrix.from_exl2(tensors, device="cuda", prescale=prescale)
    assert torch.equal(made.dequantize().cpu(), exl2_dequantize(tensors))
    exact = multiplied(tensors, groups)
    x = activations(64, made.in_features, dtype, seed)
    want = (x.double().cpu() @ exact + (tensors["bias"].double() if bias else 0.0)) * prescale
    alone = made.matmul(x[:1], out=torch.empty(1, n, device="cuda"))
    for m in (rng.randint(1, 2), rng.randint(3, 8), rng.randint(9, 32), rng.randint(33, 64)):
        wide = made.matmul(x[:m], out=torch.full((m, n), float("nan"), device="cuda"))
        assert rms(wide, want[:m]) < PRECISION, (groups, n, m)
        assert torch.equal(wide[:1], alone), m
        assert torch.equal(made.matmul(x[:m]), wide.to(dtype)), m


@pytest.mark.parametrize("seed", range(200))
def test_random_gptq_matmuls(seed: int) -> None:
    rng = random.Random(seed)
    bits, group = rng.choice((2, 3, 4, 4, 4, 8)), rng.choice((32, 64, 128, 128, 256))
    k, n, act_order = group * rng.randint(1, max(1, 2048 // group)), 32 * rng.randint(1, 24), rng.random() < 0.5
    tensors = gptq_tensors(bits, k, group, n, act_order, seed)
    options = {"bits": bits, "zeros": rng.choice(("classic", "v2")), "group_size": group}
    made = QuantMatrix.from_gptq(tensors, device="cuda", **options)  # type: ignore[arg-type]
    want = gptq_dequantize(tensors, **options)  # type: ignore[arg-type]
    assert torch.equal(made.dequantize().cpu(), want)
    x = activations(64, k, rng.choice((torch.float16, torch.bfloat16)), seed)
    right = x.double().cpu() @ want.double()
    scaled = group < 128 and k % 256 == 0 and not act_order  # all weights, before they are multiplied
    alone = made.matmul(x[:1], out=torch.empty(1, n, device="cuda"))
    for m in (rng.randint(1, 2), rng.randint(3, 8), rng.randint(9, 32), rng.randint(33, 64)):
        got = made.matmul(x[:m], out=torch.full((m, n), float("nan"), device="cuda"))
        assert rms(got, right[:m]) < (PRECISION if scaled else 1e-3), (k, n, m)
        assert torch.equal(got[:1], alone), m


def test_batches_on_their_way_at_once() -> None:
    """Matmuls queued one after the other under dependent launch, through scratch memory that is used again at once."""
    made, _, _ = matrix("seventeen-units")
    inputs = [activations(m, made.in_features, seed=m) for m in (9, 64, 33, 16, 64, 10)]
    alone = []
    for x in inputs:
        alone.append(made.matmul(x))
        torch.cuda.synchronize()
    before = programmatic_launch()
    set_programmatic_launch(True)
    try:
        for _ in range(5):
            together = [made.matmul(x) for x in inputs]
            assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    finally:
        set_programmatic_launch(before)


def test_rows_that_begin_anywhere() -> None:
    made, _, _ = matrix("two-widths")
    x = activations(20, made.in_features)
    flat = torch.cat([torch.zeros(3, dtype=x.dtype, device="cuda"), x.reshape(-1)])
    assert torch.equal(made.matmul(flat[3:].view_as(x)), made.matmul(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_identity_permutation(dtype: torch.dtype) -> None:
    groups, n = CASES["two-widths"]
    tensors = exl2_tensors(groups, n)
    tensors["q_invperm"] = torch.arange(4096, dtype=torch.int32)
    made = QuantMatrix.from_exl2(tensors, device="cuda")
    exact = multiplied(tensors, groups)
    for m in (1, 3, 8):
        x = activations(m, made.in_features, dtype)
        wide = made.matmul(x, out=torch.empty(m, n, device="cuda"))
        assert rms(wide, x.double().cpu() @ exact) < PRECISION


def test_bias_and_prescale() -> None:
    groups, n = CASES["two-widths"]
    tensors = exl2_tensors(groups, n)
    tensors["bias"] = torch.randn(n).half()
    made = QuantMatrix.from_exl2(tensors, device="cuda", prescale=0.375)
    exact = multiplied(tensors, groups)
    for m in (1, 12, 70):
        x = activations(m, made.in_features)
        want = (x.double().cpu() @ exact + tensors["bias"].double()) * 0.375
        assert rms(made.matmul(x), want) < 1e-3


def test_many_rows_take_the_dequantized_way() -> None:
    made, tensors, _ = matrix("two-widths")
    rounded = exl2_dequantize(tensors).double()
    for dtype, bound in ((torch.float16, 1e-3), (torch.bfloat16, 4e-3)):
        x = activations(200, made.in_features, dtype)
        assert rms(made.matmul(x), x.double().cpu() @ rounded) < bound
    x = x * 1000  # bfloat16 beyond the range of halves
    got = made.matmul(x, out=torch.empty(200, made.out_features, device="cuda"))
    assert rms(got, x.double().cpu() @ rounded) < 4e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_rows_are_bitwise_identical_when_asked(dtype: torch.dtype) -> None:
    made, _, _ = matrix("two-widths")
    x = activations(200, made.in_features, dtype)
    set_row_invariant(True)
    try:
        whole = made.matmul(x)
        cut = torch.cat([made.matmul(part) for part in x.split([1, 70, 100, 29])])
    finally:
        set_row_invariant(False)
    assert torch.equal(whole, cut)


def test_bf16_keeps_its_range() -> None:
    made, tensors, groups = matrix("uniform-4")
    exact = multiplied(tensors, groups)
    for scale in (1e-30, 1e-10, 1.0, 1e20):
        x = (activations(3, made.in_features).float() * scale).to(torch.bfloat16)
        got = made.matmul(x, out=torch.empty(3, made.out_features, device="cuda"))
        assert rms(got.double() / scale, (x.double().cpu() @ exact) / scale) < PRECISION
    assert torch.equal(
        made.matmul(torch.zeros_like(x)), torch.zeros(3, made.out_features, device="cuda", dtype=x.dtype)
    )


def test_captured_chain_with_dependent_launch() -> None:
    up, _, _ = matrix("uniform-4")
    groups = [(4, 128)] * 2
    down = QuantMatrix.from_exl2(exl2_tensors(groups, 2048, seed=3), device="cuda", prescale=0.05)
    x = activations(4, up.in_features)

    def chain(a: Tensor) -> Tensor:
        for _ in range(20):
            a = down.matmul(up.matmul(a) * 0.01)
        return a

    before = programmatic_launch()
    set_programmatic_launch(False)
    want = chain(x)
    set_programmatic_launch(True)
    assert torch.equal(chain(x), want)
    static, graph = x.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(static)
    set_programmatic_launch(before)
    for _ in range(5):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 9, 33, 64])
def test_results_may_lie_at_any_element(rows: int, dtype: torch.dtype) -> None:
    """A result one element into a buffer: no store of two elements at once."""
    made, _, _ = matrix("long")
    x = activations(rows, made.in_features)
    want = made.matmul(x, out=torch.empty(rows, made.out_features, dtype=dtype, device="cuda"))
    buffer = torch.zeros(rows * made.out_features + 2, dtype=dtype, device="cuda")
    got = made.matmul(x, out=buffer[1:-1].view(rows, made.out_features))
    assert torch.equal(got, want)
    assert buffer[[0, -1]].tolist() == [0, 0]


@pytest.mark.parametrize("rows", [3, 4, 5])
def test_a_shallow_ring_is_bitwise_identical_every_time(rows: int) -> None:
    """Rows of 14,336 leave room for few stages, and seven stages a tile change hands between the warps: a warp that is
    ahead of a late copy must not take one stage for another (an H200 hung here within minutes of serving)."""
    made, _, _ = matrix("long")
    x = activations(rows, made.in_features)
    want, out = made.matmul(x), made.matmul(x)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    turns, matmuls, seconds = (1, 2, 120) if UNDER_A_TOOL else (40, 200, 10)
    for _ in range(turns):
        for _ in range(matmuls):
            made.matmul(x, out=out)
            wrong += (out != want).any()
        done, until = torch.cuda.Event(), time.monotonic() + seconds
        done.record()
        while not done.query():
            if time.monotonic() > until:
                pytest.exit("the ring kernel does not end: this GPU's process is lost", 3)
            time.sleep(0.001)
    assert int(wrong) == 0


def test_a_plan_is_for_the_matrices_that_it_was_made_for() -> None:
    """The plan of a batch holds the addresses of its matrices."""
    made, other = matrix("uniform-4")[0], matrix("uniform-4", prescale=2.0)[0]
    x = activations(16, made.in_features)
    out = torch.full((16, made.out_features), float("nan"), device="cuda", dtype=x.dtype)
    call = _native.MatmulCall(16)
    plan = group_of(made).plan_with("gemm_batch", call)
    with pytest.raises(DeviceError, match="a plan of other matrices"):
        launch_matmul(group_of(other), plan, x, out)
    launch_matmul(group_of(other), group_of(other).plan_with("gemm_batch", call), x, out)
    assert torch.equal(out, other.matmul(x))


def test_bad_operands() -> None:
    made, tensors, _ = matrix("uniform-4")
    k = made.in_features
    with pytest.raises(DTypeError, match="float32"):
        made.matmul(torch.zeros(1, k, device="cuda"))
    with pytest.raises(DTypeError, match="cpu"):
        made.matmul(torch.zeros(1, k, dtype=torch.float16))
    with pytest.raises(ShapeError, match=str(k)):
        made.matmul(torch.zeros(1, k + 1, dtype=torch.float16, device="cuda"))
    with pytest.raises(ShapeError, match="out"):
        made.matmul(torch.zeros(1, k, dtype=torch.float16, device="cuda"), out=torch.zeros(1, 1, device="cuda"))
    assert made.matmul(torch.zeros(0, k, dtype=torch.float16, device="cuda")).shape == (0, made.out_features)
    broken = dict(tensors, q_invperm=tensors["q_invperm"].clone().fill_(0))
    with pytest.raises(FormatError, match="broken"):
        QuantMatrix.from_exl2(broken, device="cuda", name="broken")
    assert made.matmul(activations(6, k).view(2, 3, k)).shape == (2, 3, made.out_features)
    assert made.nbytes < 1.05 * sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("finished", [False, True])
def test_matrices_are_dequantized_in_the_same_memory(finished: bool) -> None:
    """Matrices of different sizes one after the other; with bias and prescale, too. Results are those of `matmul`."""
    sizes = ((256, 96), (128, 64), (256, 96))
    made = []
    for seed, (k, n) in enumerate(sizes):
        tensors = exl2_tensors([(4, 128)] * (k // 128), n, seed=seed)
        if finished:
            tensors["bias"] = torch.randn(n, generator=torch.Generator().manual_seed(seed)).half()
        matrix = QuantMatrix.from_exl2(tensors, prescale=0.5 if finished else 1.0, device="cuda:0")
        assert isinstance(matrix, CudaQuantMatrix)
        assert matrix.plain is not finished
        made.append(matrix)
    memory = WeightMemory(256 * 96, made[0].device)
    for matrix in made:
        x = torch.randn(80, matrix.in_features, generator=torch.Generator().manual_seed(9)).half().cuda()
        out = x.new_empty(80, matrix.out_features)
        matrix.matmul_in(memory, x, out)
        assert torch.equal(out, matrix.matmul(x))
        if matrix.plain:
            sums = (out.clone(), out.clone())
            matrix.add_matmul(x, sums[0])
            matrix.add_matmul_in(memory, x, sums[1])
            assert torch.equal(*sums)
