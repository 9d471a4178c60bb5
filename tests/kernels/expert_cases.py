"""Experts, rows and choices of the tests of mixtures of experts on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from test_cuda_linear import exl2_tensors, gptq_tensors
from torch import Tensor

from exl_kernels.activation import gated_activation
from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.cuda import CudaQuantMatrix

Expert = tuple[QuantMatrix, QuantMatrix, QuantMatrix]


def exl2(
    k: int, n: int, entry: int, number: int, order: Tensor | None = None, *, even: bool = False, **options: Any
) -> CudaQuantMatrix:
    """Widths differ by expert, and unless `even` by group; order: the permutation of K."""
    if even:
        groups = [((4, 5, 3)[number % 3], entry)] * (k // entry)
    elif entry == 128:
        width = (4, 5, 3)[number % 3]
        groups = [(width, 128)] * (k // 128) + ([(width, k % 128)] if k % 128 else [])
        groups[0] = (min(8, (6, 8, 4)[number % 3]), groups[0][1])
    else:
        groups = [((8, 6, 5, 4, 3, 2)[min(5, (number + i) // 3 % 6)], 32) for i in range(k // 32)]
        groups.sort(reverse=True)
    tensors = exl2_tensors(groups, n, seed=17 * number + n + k)
    tensors["q_scale_max"] *= 0.1
    if order is not None:
        tensors["q_invperm"] = order
    made = QuantMatrix.from_exl2(tensors, device="cuda", name=f"expert {number}", **options)
    assert isinstance(made, CudaQuantMatrix)
    return made


def gptq(k: int, n: int, group: int, number: int, act_order: bool = False) -> CudaQuantMatrix:
    tensors = gptq_tensors(4, k, group, n, act_order, seed=31 * number + n)
    tensors["scales"] *= 0.1
    made = QuantMatrix.from_gptq(tensors, bits=4, group_size=group, device="cuda", name=f"expert {number}")
    assert isinstance(made, CudaQuantMatrix)
    return made


def experts_of(kind: str, count: int, hidden: int, width: int) -> list[Expert]:
    """kind: format and group, `-own` where gate and up have permutations of their own, `-even` where all groups of an
    expert have one width of at most 5 bits, `-act` with act-order."""
    found: list[Expert] = []
    for number in range(count):
        name, entry = kind.split("-")[:2]
        if name == "exl2":
            shared = None
            if "own" not in kind:
                shared = torch.randperm(hidden, generator=torch.Generator().manual_seed(number)).to(torch.int32)
            # Gate and up of other widths have other places of padding rows.
            up, even = number if "own" not in kind else number + 1, "even" in kind
            gate, raised, down = (
                exl2(hidden, width, int(entry), number, shared, even=even),
                exl2(hidden, width, int(entry), up, shared, even=even),
                exl2(width, hidden, int(entry), number + 1, even=even),
            )
        else:
            acts = "act" in kind
            gate, raised, down = (
                gptq(hidden, width, int(entry), 3 * number, acts),
                gptq(hidden, width, int(entry), 3 * number + 1, acts),
                gptq(width, hidden, int(entry), 3 * number + 2, acts),
            )
        found.append((gate, raised, down))
    return found


def float_experts_of(
    dtype: torch.dtype, count: int, hidden: int, width: int, *, scale: float = 0.03, **options: Any
) -> list[Expert]:
    """Largest weights differ by matrix: as BF16 halves of some have a factor, those of others have none."""
    generator = torch.Generator().manual_seed(hidden + width)

    def made(number: int, n: int, k: int, largest: float) -> QuantMatrix:
        weight = torch.randn(n, k, generator=generator).mul_(largest).to(dtype)
        given = dict(options)
        if given.pop("biased", False):
            given["bias"] = torch.randn(n, generator=generator)
        return QuantMatrix.from_float(weight, device="cuda", name=f"expert {number}", **given)

    found: list[Expert] = []
    for number in range(count):
        own = scale * 4.0 ** (number % 3 - 2)  # below 2^-4 or not
        found.append(
            (
                made(number, width, hidden, own),
                made(number, width, hidden, 2 * scale),
                made(number, hidden, width, scale),
            )
        )
    return found


def one_by_one(
    h: Tensor, weights: Tensor, ids: Tensor, experts: Sequence[Expert], activation: Any, **more: Tensor | None
) -> Tensor:
    """Expert after expert over the rows that chose it, batch-invariant, then the sum in the order of choice."""
    parts = torch.empty((*ids.shape, h.shape[1]), dtype=torch.float32, device=h.device)
    for number, (gate, up, down) in enumerate(experts):
        rows, places = (ids == number).nonzero(as_tuple=True)
        if len(rows):
            x = h[rows]
            inner = gated_activation(gate.matmul(x, invariant=True), up.matmul(x, invariant=True), activation)
            parts[rows, places] = down.matmul(inner, invariant=True).float()
    y = parts[:, 0] * weights[:, :1]
    for c in range(1, ids.shape[1]):
        y += parts[:, c] * weights[:, c : c + 1]
    shared, factors, residual = (more.get(name) for name in ("shared", "shared_weights", "residual"))
    if shared is not None:
        y += shared.float() if factors is None else shared.float() * factors.view(-1, 1)
    return y.half() if residual is None else residual.clone().add_(y.half())


def rows_of(count: int, hidden: int, seed: int = 0) -> Tensor:
    x = torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed))
    x[:, ::41] *= 8
    return x.half().cuda()


def chosen_of(rows: int, experts: int, chosen: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:chosen] for _ in range(rows)])
    weights = torch.rand(rows, chosen, generator=generator).softmax(-1)
    return weights.cuda(), ids.cuda()
