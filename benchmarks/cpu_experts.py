"""Cases of bench_cpu.py: the experts of one layer in one call, one expert after the other, and a dense MLP.

The three are timed in turn, so that a drift of the machine reaches all of them: GB/s are of the matrices that a call
reads. Rows choose their experts at random; the dense MLP is as wide as the experts that a call reads on average.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from make_random_model import random_exl2
from torch import Tensor

from exl_kernels.activation import gated_activation
from exl_kernels.block import MlpBlock
from exl_kernels.linear import QuantMatrix
from exl_kernels.moe import CpuExperts

__all__ = ["FAMILIES", "bench_family"]

Expert = tuple[QuantMatrix, QuantMatrix, QuantMatrix]


@dataclass(frozen=True)
class Family:
    """The sizes of a mixture; several layers, so that calls in turn read other memory."""

    hidden: int
    inner: int
    experts: int
    chosen: int
    layers: int


FAMILIES = {
    "qwen3-30b-a3b": Family(2048, 768, 128, 8, 3),
    "mixtral-8x7b": Family(4096, 14336, 8, 2, 1),
}
DENSE_BYTES = 512 << 20  # the dense MLPs in turn hold at least this much


def matrices(hidden: int, inner: int, bits: float, generator: torch.Generator, copies: int) -> list[Expert]:
    """Gate, up and down with memory of their own and, to be made quickly, the same codes."""
    shapes = ((hidden, inner), (hidden, inner), (inner, hidden))
    seed = int(torch.randint(2**31, (), generator=generator))
    rng = np.random.default_rng(seed)
    drawn = [random_exl2(k, n, bits, rng) for k, n in shapes]
    drawn[1]["q_invperm"] = drawn[0]["q_invperm"]  # as files have it: gate and up take the same inputs
    return [tuple(QuantMatrix.from_exl2(tensors) for tensors in drawn) for _ in range(copies)]  # type: ignore[misc]


def one_by_one(experts: Sequence[Expert], h: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Run one expert after another, as `MoE` does with experts that cannot share calls."""
    chosen, hidden = ids.shape[1], h.shape[1]
    out = torch.empty(*ids.shape, hidden)
    flat, order = ids.reshape(-1).sort(stable=True)
    begin = 0
    for (gate, up, down), count in zip(experts, torch.bincount(flat, minlength=len(experts)).tolist(), strict=True):
        if count:
            places = order[begin : begin + count]
            x = h[places // chosen]
            inner = gate.matmul(x)
            gated_activation(inner, up.matmul(x), "silu", out=inner)
            out.view(-1, hidden)[places] = down.matmul(inner)
            begin += count
    y = out[:, 0] * weights[:, :1]
    for slot in range(1, chosen):
        y += out[:, slot] * weights[:, slot : slot + 1]
    return y


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def bench_family(name: str, bits: float, rows: Sequence[int], seconds: float, roof: Callable[[], float]) -> list[Any]:
    """Fields of one JSON line for each number of rows; `roof` measures the read bandwidth."""
    family, generator = FAMILIES[name], torch.Generator().manual_seed(0)
    layers = [matrices(family.hidden, family.inner, bits, generator, family.experts) for _ in range(family.layers)]
    grouped = [CpuExperts(layer, "silu") for layer in layers]
    each = sum(matrix.nbytes for matrix in layers[0][0])
    return [_bench_rows(name, bits, layers, grouped, each, count, seconds, roof, generator) for count in rows]


def _bench_rows(
    name: str,
    bits: float,
    layers: list[list[Expert]],
    grouped: list[CpuExperts],
    each: int,
    rows: int,
    seconds: float,
    roof: Callable[[], float],
    generator: torch.Generator,
) -> dict[str, Any]:
    family = FAMILIES[name]
    unused = (1 - family.chosen / family.experts) ** rows
    read = family.experts * (1 - unused)
    width = round(read * family.inner / 32) * 32
    copies = max(1, round(DENSE_BYTES / (each * width / family.inner)))
    dense = matrices(family.hidden, width, bits, generator, copies)
    blocks = [MlpBlock(None, gate, (up, down), "silu") for gate, up, down in dense]
    h, x = torch.randn(rows, family.hidden), torch.randn(rows, family.hidden)
    weights = torch.rand(rows, family.chosen)
    turns: dict[str, list[float]] = {"together": [], "one_by_one": [], "dense": []}
    dense_bytes, turn, before = sum(matrix.nbytes for matrix in dense[0]), 0, roof()
    while turn < 10 or sum(map(sum, turns.values())) < seconds:
        layer = turn % len(layers)

        def choice() -> tuple[Tensor, int]:
            drawn = torch.rand(rows, family.experts, generator=generator).topk(family.chosen).indices
            return drawn, each * len(set(drawn.flatten().tolist()))

        ids, size = choice()
        turns["together"].append(size / seconds_of(partial(grouped[layer], h, weights, ids)))
        ids, size = choice()
        turns["one_by_one"].append(size / seconds_of(partial(one_by_one, layers[layer], h, weights, ids)))
        turns["dense"].append(dense_bytes / seconds_of(partial(blocks[turn % copies].forward, x)))
        turn += 1
    bandwidth = (before + roof()) / 2
    rates = {key: statistics.median(values[2:]) for key, values in turns.items()}
    return {
        "family": name,
        "bits": bits,
        "rows": rows,
        "experts_read": read,
        "dense_width": width,
        **{f"{key}_gb_s": rate / 1e9 for key, rate in rates.items()},
        **{f"{key}_best_gb_s": max(values) / 1e9 for key, values in turns.items()},
        "roof_gb_s": bandwidth / 1e9,
        "share": rates["together"] / bandwidth,
        "over_one_by_one": _ratio(turns["together"], turns["one_by_one"]),
        "over_dense": _ratio(turns["together"], turns["dense"]),
    }


def _ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """The median of the ratios turn by turn, without the first turns."""
    return statistics.median(a / b for a, b in zip(first[2:], second[2:], strict=True))
