"""Float matrices on a GPU: bitwise the same for any number of rows, and within bounds of sums in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_cuda_linear import rms
from torch import Tensor

from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.cuda import CudaFloatMatrix
from exl_kernels.selection import PACKED_ROWS

pytestmark = pytest.mark.cuda

ROWS = (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 100, 129)
"""Whole and partial blocks of every kernel."""


def made(weight: Tensor, bias: Tensor | None = None, **options: Any) -> CudaFloatMatrix:
    matrix = QuantMatrix.from_float(weight, bias, device="cuda", **options)
    assert isinstance(matrix, CudaFloatMatrix)
    return matrix


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wanted(x: Tensor, weight: Tensor, bias: Tensor | None = None, prescale: float = 1.0) -> Tensor:
    y = x.double().cpu() @ weight.double().t()
    return (y if bias is None else y + bias.double()) * prescale


@pytest.mark.parametrize("k", [1, 3, 8, 40, 64, 72, 100, 520, 1024, 2050, 4160])
@pytest.mark.parametrize("n", [1, 15, 17, 130])
def test_results_of_any_shape_do_not_depend_on_the_number_of_rows(k: int, n: int) -> None:
    """Rows of every kernel are bitwise those of a call of one row, whatever the tail of K and of the features."""
    weight, bias, x = random(n, k).half(), random(n, seed=2), random(max(ROWS), k, seed=3).half().cuda()
    matrix = made(weight, bias, prescale=0.5)
    alone = torch.cat([matrix.matmul(row) for row in x.split(1)])
    want = wanted(x, weight, bias, 0.5)
    assert (alone.double().cpu() - want).abs().max() <= 2e-3 * max(1.0, float(want.abs().max()))
    for rows in ROWS:
        assert torch.equal(matrix.matmul(x[:rows], invariant=True), alone[:rows]), rows
        assert torch.equal(matrix.matmul(x[-rows:], invariant=True), alone[-rows:]), rows


@pytest.mark.parametrize("n", [1000, 8192, 27008])
def test_blocks_that_share_k_and_blocks_with_all_of_it_agree(n: int) -> None:
    """Blocks of 1,000 features share K with others on any card, those of 27,008 features do not."""
    weight, x = random(n, 1056).half() * 0.05, random(40, 1056, seed=2).half().cuda()
    matrix = made(weight)
    alone = matrix.matmul(x[:8])
    assert rms(alone, wanted(x[:8], weight)) < 1e-3
    for rows in (17, 40):
        found = matrix.matmul(x[:rows])
        assert torch.equal(found[:8], alone), rows
        assert torch.equal(found[-8:], matrix.matmul(x[rows - 8 : rows])), rows


@pytest.mark.parametrize("weights", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 40, 200])
def test_element_types(weights: torch.dtype, rows: int) -> None:
    weight, bias, x = random(96, 256).to(weights), random(96, seed=2), random(rows, 256, seed=3)
    matrix = made(weight, bias, prescale=0.5)
    for dtype in (torch.float16, torch.bfloat16):
        some = x.to(dtype).cuda()
        want = wanted(some, weight, bias, 0.5)
        for invariant in (False, True):
            assert rms(matrix.matmul(some, invariant=invariant), want) < 6e-3
            for out_dtype in (torch.float16, torch.bfloat16, torch.float32):
                out = torch.empty(rows, 96, dtype=out_dtype, device="cuda")
                assert matrix.matmul(some, out=out, invariant=invariant) is out
                assert rms(out, want) < (6e-3 if out_dtype == torch.bfloat16 else 2e-3)
        precise = matrix.matmul_precise(some)
        assert precise.dtype == torch.float32
        assert rms(precise, want) < (1e-3 if weights == torch.float32 else 1e-6)  # float32 weights are kept as halves
    assert torch.equal(matrix.dequantize().cpu(), weight.t().half())


@pytest.mark.parametrize("factor", [2.0**-30, 1e-6, 0.01, 1.0, 3e5, 2.0**60])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_any_size_are_held_as_halves(factor: float, dtype: torch.dtype) -> None:
    """A power of two of the matrix keeps small weights exact and large ones finite, alone and with torch's matmul."""
    weight = (random(40, 64) * factor).to(dtype)
    x = random(70, 64, seed=2).to(torch.bfloat16).cuda()
    matrix = made(weight)
    want = wanted(x, weight)
    for some in (1, 64, 70):
        out = torch.empty(some, 40, dtype=torch.float32, device="cuda")
        matrix.matmul(x[:some], out=out)
        assert ((out.double().cpu() - want[:some]).abs().max() / want.abs().max()) < 2e-3


def test_bfloat16_weights_keep_their_bits() -> None:
    """A router keeps all, other matrices those of weights that are not far smaller than the largest."""
    weight = (random(32, 128) * 0.02).to(torch.bfloat16)
    eye = torch.eye(128, dtype=torch.float16, device="cuda")
    out = torch.empty(128, 32, dtype=torch.float32, device="cuda")
    made(weight).matmul(eye, out=out, invariant=True)
    large = weight.abs() > weight.abs().max() * 2.0**-13
    assert torch.equal(out.t().cpu()[large], weight.float()[large])
    assert (out.t().cpu() - weight.float()).abs().max() <= float(weight.abs().max()) * 2.0**-21
    tiny = (random(32, 128) * 1e-12).to(torch.bfloat16)
    tiny[0, 0] = 1.0
    router = made(tiny, precise=True)
    assert router.stored()[0].dtype == torch.bfloat16
    assert torch.equal(router.stored()[0].cpu(), tiny)


def test_a_row_is_not_disturbed_by_rows_that_are_not_finite() -> None:
    for k in (520, 1024):
        matrix, x = made(random(130, k).half()), random(64, k, seed=2).half().cuda()
        alone = matrix.matmul(x)
        x[3], x[40, 7], x[41, k - 1] = float("inf"), float("nan"), float("inf")
        found = matrix.matmul(x)
        kept = [row for row in range(64) if row not in (3, 40, 41)]
        assert torch.equal(found[kept], alone[kept])
        assert not found[[3, 40, 41]].isfinite().any()


def test_operands_that_are_not_aligned() -> None:
    weight, whole = random(130, 1024).half(), random(40 * 1024 + 1, seed=2).half().cuda()
    matrix, x = made(weight), whole[1:].view(40, 1024)
    assert x.data_ptr() % 16
    assert torch.equal(matrix.matmul(x), matrix.matmul(x.clone()))


def test_bfloat16_rows_do_not_depend_on_the_others() -> None:
    matrix, x = made(random(96, 520).half()), random(70, 520, seed=2).to(torch.bfloat16).cuda()
    x[1] *= 2.0**90
    x[2] *= 2.0**-90
    x[3] = 0
    alone = torch.cat([matrix.matmul(row) for row in x.split(1)])
    for rows in (4, 30, 70):
        assert torch.equal(matrix.matmul(x[:rows], invariant=True), alone[:rows])
    assert torch.equal(alone[3].cpu(), torch.zeros(96, dtype=torch.bfloat16))
    want = wanted(x, random(96, 520).half())
    assert ((alone.double().cpu() - want).abs().amax(1) <= 6e-3 * want.abs().amax(1)).all()


def test_several_dimensions_and_no_rows() -> None:
    matrix, x = made(random(96, 256).half()), random(256, 256, seed=2).half().cuda()
    assert torch.equal(
        matrix.matmul(x.view(2, 128, -1), invariant=True).view(256, -1), matrix.matmul(x, invariant=True)
    )
    assert matrix.matmul(x[:0]).shape == (0, 96)


def test_many_rows_that_may_depend_on_one_another_are_multiplied_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x = made(random(96, 256).half()), random(PACKED_ROWS + 1, 256, seed=2).half().cuda()
    want, seen, library = wanted(x, random(96, 256).half()), [], torch.mm

    def watched(rows: Tensor, *given: Any, **named: Any) -> Any:
        seen.append(len(rows))
        return library(rows, *given, **named)

    monkeypatch.setattr(torch, "mm", watched)
    matrix.matmul(x, invariant=True)
    matrix.matmul(x[:PACKED_ROWS])
    assert not seen
    assert rms(matrix.matmul(x, invariant=False), want) < 1e-3
    assert seen == [PACKED_ROWS + 1]


def test_precise_matmuls_of_a_row_do_not_depend_on_the_others() -> None:
    matrix = made(random(60, 2048).half() * 0.05)
    x = random(700, 2048, seed=2).half().cuda()
    whole = matrix.matmul_precise(x)
    for begin, end in ((0, 1), (5, 7), (10, 74), (100, 613)):
        assert torch.equal(matrix.matmul_precise(x[begin:end]), whole[begin:end])
