"""EXL2 matrices with more scales than their groups need, in one launch with others that need them; needs a GPU."""

from __future__ import annotations

import pytest
import torch
from test_cuda_linear import exl2_tensors
from torch import Tensor

from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.fused import FusedLinear
from exl_kernels.selection import Card

pytestmark = pytest.mark.cuda

K = 1280
COARSE = [(5, 128)] + [(4, 128)] * 8 + [(3, 128)]
FINE = [(6, 32)] * 4 + [(4, 32)] * 36


def matrices(groups: list[tuple[int, int]], seed: int) -> tuple[QuantMatrix, QuantMatrix]:
    """The same matrix [K, 256] as it is stored alone, and with a scale for every 32 rows."""
    tensors = exl2_tensors(groups, 256, seed=seed)
    tensors["q_scale_max"] *= 0.1
    tensors["q_invperm"] = torch.randperm(K, generator=torch.Generator().manual_seed(9)).to(torch.int32)
    plain, fine = (QuantMatrix.from_exl2(tensors, device="cuda", fine_scales=more) for more in (False, True))
    return plain, fine


def near(found: Tensor, x: Tensor, matrix: QuantMatrix) -> bool:
    exact = x.double().cpu() @ matrix.dequantize().double().cpu()
    return bool(((found.double().cpu() - exact).abs() <= 2e-3 * exact.abs().max()).all())


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 12, 40, 64])
def test_they_share_launches_with_matrices_of_small_groups(rows: int) -> None:
    (plain, fine), (small, same) = matrices(COARSE, 1), matrices(FINE, 2)
    assert torch.equal(plain.dequantize(), fine.dequantize())
    assert fine.nbytes - plain.nbytes == K // 128 * 24 * (256 // 16) + 2 * (K // 32 - K // 128)
    assert same.nbytes == small.nbytes
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).half().cuda()
    alone = [matrix.matmul(x, invariant=True) for matrix in (fine, small)]
    assert near(alone[0], x, plain)
    assert torch.equal(alone[0], plain.matmul(x, invariant=True))
    assert torch.equal(same.matmul(x, invariant=True), alone[1])
    joined, refused = FusedLinear([fine, small]), FusedLinear([plain, small])
    assert not refused.joins(rows)
    # Turing cards have no launches of several matrices for more rows.
    assert joined.joins(rows) == (rows <= 8 or bool(Card.device(0).features & {"wgmma", "mma_pipeline"}))
    assert torch.equal(joined(x, x.new_empty(rows, 512)), torch.cat(alone, 1))
