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
