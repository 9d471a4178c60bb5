"""The kernels that a GPU launches are those that the selection names."""

from __future__ import annotations

import pytest
import torch

from exl_kernels import _native
from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.fused import FusedLinear, Norm
from exl_kernels.selection import Card, MatrixShape

pytestmark = pytest.mark.cuda

K = 1024
FAMILIES = {"gemv_ring": "ring_", "gemm_few": "few_", "gemm_batch": "batch_", "gemm_tile": "matmul_"}


def matrix(n: int, seed: int) -> tuple[QuantMatrix, MatrixShape]:
    generator = torch.Generator().manual_seed(seed)
    groups = K // 128
    tensors = {
        "q_weight": torch.randint(-(2**31), 2**31, (16 * groups, n), generator=generator).to(torch.int32),
        "q_scale": torch.zeros(groups, n // 8, dtype=torch.int32),
        "q_scale_max": torch.full((groups,), 0.01).half(),
        "q_groups": torch.tensor([[4, 16 * g] for g in range(groups)], dtype=torch.int16).flatten(),
        "q_invperm": torch.arange(K, dtype=torch.int32),
    }
    return QuantMatrix.from_exl2(tensors, device="cuda"), MatrixShape.from_exl2(tensors)


def launched() -> set[str]:
    """Families of matmul kernels that have run since the last call."""
    now: dict[str, int] = _native.cuda_launches()
    new = {name for name, count in now.items() if count > launched.before.get(name, 0)}  # type: ignore[attr-defined]
    launched.before = now  # type: ignore[attr-defined]
    return {kernel for kernel, start in FAMILIES.items() if any(name.startswith(start) for name in new)}


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 33, 64])
def test_what_is_selected_is_launched(rows: int) -> None:
    launched.before = _native.cuda_launches()  # type: ignore[attr-defined]
    card = Card.device(torch.cuda.current_device())
    made = [matrix(n, seed) for seed, n in enumerate((512, 512))]
    quantized, shapes = [m for m, _ in made], [shape for _, shape in made]
    x = torch.randn(rows, K, device="cuda").half()
    weight = torch.ones(K, device="cuda").half()
    launched()
    for gate, norm, residual in ((False, False, False), (True, True, False), (False, False, True)):
        before = Norm(weight, 1e-5) if norm else None
        used, known = (quantized, shapes) if gate else (quantized[:1], shapes[:1])
        fused = FusedLinear(used, norm=before, activation="silu" if gate else None)
        out = x.new_empty(rows, fused.out_features)
        fused(x, out, torch.zeros_like(out) if residual else None)
        expected = card.fused_matmul(known, rows, gate=gate, norm=norm, residual=residual)
        assert launched() == {expected.kernel}, (gate, norm, residual, expected)
    quantized[0].matmul(x)
    assert launched() == {card.matmul(shapes[0], rows).kernel}
