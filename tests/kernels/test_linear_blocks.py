"""Quantized matrices inside fused sub-layers: joint matmuls of one input are bitwise identical to separate calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exl_kernels import threads
from exl_kernels.activation import gated_activation
from exl_kernels.block import BlockNorm, MlpBlock
from exl_kernels.formats import exl2_quantize
from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.cuda import CudaFloatMatrix
from exl_kernels.norm import rms_norm

HIDDEN, INNER = 96, 160


def matrix(k: int, n: int, seed: int, compute: Any) -> QuantMatrix:
    """One permutation a seed: a joint product packs activations once where they agree."""
    gen = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=gen) * k**-0.5
    bias = torch.randn(n, generator=gen).half()
    tensors = exl2_quantize(weight, 4, 32, perm=torch.randperm(k, generator=gen))
    return QuantMatrix.from_exl2({**tensors, "bias": bias}, compute=compute)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("modes", [("int8", "int8"), ("exact", "exact"), ("int8", "exact")])
@pytest.mark.parametrize("seeds", [(1, 1), (1, 2)])
@pytest.mark.parametrize("rows", [1, 2, 5, 70])
def test_joint_matmuls(modes: tuple[str, str], seeds: tuple[int, int], rows: int) -> None:
    gate, up = (matrix(HIDDEN, INNER, seed, mode) for seed, mode in zip(seeds, modes, strict=True))
    down = matrix(INNER, HIDDEN, 3, modes[0])
    gen = torch.Generator().manual_seed(7)
    norm, x = torch.rand(HIDDEN, generator=gen) + 0.5, torch.randn(rows, HIDDEN, generator=gen)
    h = rms_norm(x, norm, 1e-5)
    expected = x + down.matmul(gated_activation(gate.matmul(h), up.matmul(h), "silu"))
    block = MlpBlock(BlockNorm(norm, 1e-5), gate, (up, down), "silu")
    before = threads.num_threads()
    for n in (1, 2, 5):
        threads.set_num_threads(n)
        assert torch.equal(block.forward(x.clone()), expected)
    threads.set_num_threads(before)


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 200])
def test_float_matrices_of_a_gpu_multiply_padded_blocks_of_one_shape(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch multiplies alike on a CPU, where the shapes that a library gets can be watched."""
    gen = torch.Generator().manual_seed(rows)
    weight, bias = torch.randn(24, 40, generator=gen).half(), torch.randn(24, generator=gen)
    x = torch.randn(rows, 40, generator=gen).half()
    whole = torch.nn.functional.pad(x, (0, 0, 0, -rows % 64))
    seen, library = [], torch.mm

    def watched(given: torch.Tensor, *more: Any, **named: Any) -> Any:
        seen.append(len(given))
        return library(given, *more, **named)

    for made in (CudaFloatMatrix(weight, None, 1.0, "exact", ""), CudaFloatMatrix(weight, bias, 0.5, "exact", "")):
        expected = torch.cat([made.matmul(block) for block in torch.split(whole, 64)])[:rows]
        with monkeypatch.context() as patch:
            patch.setattr(torch, "mm", watched)
            padded = made.matmul_padded(x)
            assert all(count in (0, 64) for count in seen)
            seen.clear()
            found = made.matmul(x, invariant=True)
            assert torch.equal(found, expected if rows > 64 else made.matmul(x))
            assert set(seen) == ({64} if rows > 64 else {rows})
            seen.clear()
        assert torch.equal(padded, expected)
