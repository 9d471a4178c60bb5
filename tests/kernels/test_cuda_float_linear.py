"""Float matrices on a GPU, which torch multiplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_cuda_linear import rms

from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.cuda import CudaFloatMatrix

pytestmark = pytest.mark.cuda


def test_float_matrices() -> None:
    weight, bias = torch.randn(96, 256), torch.randn(96)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        made = QuantMatrix.from_float(weight.to(dtype), bias, prescale=0.5, device="cuda")
        assert isinstance(made, CudaFloatMatrix)
        for x_dtype in (torch.float16, torch.bfloat16):
            x = torch.randn(3, 256, dtype=x_dtype, device="cuda")
            want = (x.double().cpu() @ weight.to(dtype).double().t() + bias.double()) * 0.5
            assert rms(made.matmul(x), want) < 6e-3
            precise = made.matmul_precise(x)
            assert precise.dtype == torch.float32
            assert rms(precise, want) < (1e-3 if dtype == torch.float32 else 1e-6)  # float32 weights are kept as halves
        assert torch.equal(made.dequantize().cpu(), weight.to(dtype).t().half())


def test_precise_matmuls_of_a_row_do_not_depend_on_the_others() -> None:
    made = QuantMatrix.from_float(torch.randn(60, 2048, dtype=torch.float16) * 0.05, device="cuda")
    assert isinstance(made, CudaFloatMatrix)
    x = torch.randn(700, 2048, dtype=torch.float16, device="cuda")
    whole = made.matmul_precise(x)
    for begin, end in ((0, 1), (5, 7), (10, 74), (100, 613)):
        assert torch.equal(made.matmul_precise(x[begin:end]), whole[begin:end])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_many_batch_invariant_rows_of_float_matrices_are_those_of_a_block(
    dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS takes blocks of 64 rows, also for the last rows, so a row does not depend on the number of rows."""
    given = torch.randn(96) if bias else None
    made = QuantMatrix.from_float(torch.randn(96, 4096, dtype=torch.float16) * 0.05, given, device="cuda")
    x = torch.randn(300, 4096, device="cuda").to(dtype)
    for out_dtype in (dtype, torch.float32):

        def matmul(rows: torch.Tensor, out_dtype: torch.dtype = out_dtype) -> torch.Tensor:
            out = torch.empty(len(rows), 96, dtype=out_dtype, device="cuda")
            return made.matmul(rows, out=out, invariant=True)

        blocks = torch.cat([matmul(x[begin : begin + 64]) for begin in range(0, 256, 64)])
        for rows in (65, 70, 128, 150, 256):
            assert torch.equal(matmul(x[:rows])[: rows // 64 * 64], blocks[: rows // 64 * 64])
        assert torch.equal(matmul(x[:250]), blocks[:250])
        several = made.matmul(x[:256].view(2, 128, -1), invariant=True)
        assert torch.equal(several.view(256, -1), made.matmul(x, invariant=True)[:256])

    seen, library = set(), torch.mm

    def watched(rows: torch.Tensor, *given: Any, **named: Any) -> Any:
        seen.add(len(rows))
        return library(rows, *given, **named)

    monkeypatch.setattr(torch, "mm", watched)
    made.matmul(x, invariant=True)
    assert seen == {64}, "also where cuBLAS happens to sum other numbers of rows in one order"
