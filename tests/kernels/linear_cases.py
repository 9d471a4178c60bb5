"""Quantized matrices and inputs of the tests of fused matmuls on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.fused import FusedNorm
from exl_kernels.selection import LIMITS, Card

K = 1024
DTYPES = [torch.float16, torch.bfloat16]


def reads_plain_rows(rows: int) -> bool:
    """Whether a matmul of so many rows reads them as they are, where most kernels read what another launch packs.

    gemv_ring packs its own input, for up to `few_rows` rows on cards without clusters, which have no gemm_few. Turing
    cards have no kernel for packed input of more rows.
    """
    features = Card.device(0).features
    if rows > LIMITS.few_rows:
        return not features & {"wgmma", "mma_pipeline"}
    return "bulk_copy" in features and (rows <= LIMITS.gemv_rows or "clusters" not in features)


def words(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)


def activations(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype).cuda()


def exl2(
    n: int,
    *widths: int,
    seed: int = 0,
    perm: Tensor | None = None,
    bias: bool = False,
    k: int = K,
    group: int = 128,
) -> QuantMatrix:
    table, first, groups = [], 0, k // group
    for bits in (widths * groups)[:groups]:
        table += [bits, first]
        first += group // 32 * bits
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "q_weight": words(first, n, seed=seed),
        "q_scale": words(groups, n // 8, seed=seed + 1),
        "q_scale_max": (torch.rand(groups, generator=generator) * 0.02 + 0.001).half(),
        "q_groups": torch.tensor(table, dtype=torch.int16),
        "q_invperm": torch.randperm(k, generator=generator).to(torch.int32),
    }
    if perm is not None:
        tensors["q_invperm"] = perm.to(torch.int32)
    if bias:
        tensors["bias"] = torch.randn(n).half()
    return QuantMatrix.from_exl2(tensors, device="cuda")


def gptq(n: int, act_order: bool, group: int = 128, k: int = K) -> QuantMatrix:
    generator = torch.Generator().manual_seed(n)
    tensors = {
        "qweight": words(k // 8, n, seed=n),
        "qzeros": words(k // group, n // 8, seed=n + 1),
        "scales": (torch.rand(k // group, n, generator=generator) * 0.01 + 0.001).half(),
    }
    if act_order:
        tensors["g_idx"] = torch.randperm(k, generator=torch.Generator().manual_seed(3)).to(torch.int32) // group
    return QuantMatrix.from_gptq(tensors, bits=4, group_size=group, device="cuda")


def qkv(kind: str) -> list[QuantMatrix]:
    perm = torch.randperm(K, generator=torch.Generator().manual_seed(7))
    if kind == "one order":
        return [exl2(n, 4, seed=i, perm=perm) for i, n in enumerate((512, 128, 160))]
    if kind == "own orders":
        return [exl2(n, *w, seed=i, bias=True) for i, (n, w) in enumerate([(512, (4,)), (128, (5, 4)), (160, (6, 3))])]
    if kind == "groups of 32":
        return [exl2(n, 5, 4, 3, seed=i, perm=perm, group=32) for i, n in enumerate((512, 128, 160))]
    return [gptq(n, kind == "gptq act-order", 32 if kind == "gptq groups of 32" else 128) for n in (512, 128, 160)]


def norm_of(dtype: torch.dtype) -> FusedNorm:
    return FusedNorm((torch.rand(K, device="cuda") + 0.5).to(dtype), 1e-5)
