"""CPU operators other than matmul: attention by cache kind and context, store, norms. Prints one JSON object a line.

`roof` is the read bandwidth of the same run (GB/s over a buffer that no cache holds, all threads); `share` is the
part of it that the case reaches, counting the bytes it must read. `python benchmarks/bench_cpu_ops.py [--quick]`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from exl_kernels import threads
from exl_kernels.activation import gated_activation
from exl_kernels.attention import paged_attention
from exl_kernels.kv import KVPages, store_kv
from exl_kernels.norm import rms_norm
from exl_kernels.rope import apply_rope

# name: query heads, key/value heads, head_dim
SHAPES = {"tinyllama": (32, 4, 64), "llama3-8b": (32, 8, 128), "llama2-7b": (32, 32, 128)}
KINDS: tuple[Any, ...] = ("fp16", "fp8", "q8", "q6", "q4")
PAGE = 256


def best_seconds(call: Callable[[], object], budget: float) -> float:
    """Shortest of as many calls as fit in `budget` seconds, at least three."""
    call()
    best, spent, calls = float("inf"), 0.0, 0
    while spent < budget or calls < 3:
        begin = time.perf_counter()
        call()
        took = time.perf_counter() - begin
        best, spent, calls = min(best, took), spent + took, calls + 1
    return best


def read_roof(budget: float) -> float:
    """Read bandwidth in GB/s: torch's sum over 512 MB with as many threads as the kernels use."""
    torch.set_num_threads(threads.num_threads())
    data = torch.ones(1 << 26, dtype=torch.int64)
    return data.nbytes / best_seconds(data.max, budget) / 1e9


def filled_pages(kind: Any, layers: int, tokens: int, heads: int, dim: int) -> list[KVPages]:
    out = []
    k, v = torch.randn(tokens, heads, dim), torch.randn(tokens, heads, dim)
    for _ in range(layers):
        pages = KVPages.allocate(kind, tokens // PAGE, PAGE, heads, dim)
        store_kv(pages, k, v, torch.arange(tokens))
        out.append(pages)
    return out


def bench_decode(shape: str, kind: Any, context: int, roof: float, budget: float) -> dict[str, Any]:
    """One query token over `context` keys, in enough layers that no cache holds them."""
    q_heads, heads, dim = SHAPES[shape]
    per_layer = KVPages.allocate(kind, 1, PAGE, heads, dim).nbytes * context // PAGE
    layers = max(1, min(64, (256 << 20) // per_layer))
    pages = filled_pages(kind, layers, context, heads, dim)
    table = torch.arange(context // PAGE, dtype=torch.int32)[None]
    rows, positions = torch.zeros(1, dtype=torch.int32), torch.full((1,), context - 1, dtype=torch.int32)
    q = torch.randn(1, q_heads, dim)

    def step() -> None:
        for p in pages:
            paged_attention(q, p, table, rows, positions, scale=dim**-0.5)

    seconds = best_seconds(step, budget) / layers
    rate = per_layer / seconds / 1e9
    return {
        "case": "attention_decode",
        "shape": shape,
        "kind": kind,
        "context": context,
        "us": round(seconds * 1e6, 1),
        "gb_s": round(rate, 2),
        "share": round(rate / roof, 3),
        "keys_per_us": round(context / seconds / 1e6, 1),
    }


def bench_prefill(shape: str, kind: Any, tokens: int, budget: float) -> dict[str, Any]:
    q_heads, heads, dim = SHAPES[shape]
    pages = filled_pages(kind, 1, tokens, heads, dim)[0]
    table = torch.arange(tokens // PAGE, dtype=torch.int32)[None]
    rows, positions = torch.zeros(tokens, dtype=torch.int32), torch.arange(tokens, dtype=torch.int32)
    q = torch.randn(tokens, q_heads, dim)
    seconds = best_seconds(lambda: paged_attention(q, pages, table, rows, positions, scale=dim**-0.5), budget)
    flops = 2 * 2 * q_heads * dim * tokens * (tokens + 1) / 2
    return {
        "case": "attention_prefill",
        "shape": shape,
        "kind": kind,
        "tokens": tokens,
        "ms": round(seconds * 1e3, 3),
        "gflop_s": round(flops / seconds / 1e9, 1),
    }


def bench_store(kind: Any, tokens: int, budget: float) -> dict[str, Any]:
    heads, dim = 4, 64
    pages = KVPages.allocate(kind, 8, PAGE, heads, dim)
    k, v, slots = torch.randn(tokens, heads, dim), torch.randn(tokens, heads, dim), torch.arange(tokens)
    seconds = best_seconds(lambda: store_kv(pages, k, v, slots), budget)
    return {
        "case": "store",
        "kind": kind,
        "tokens": tokens,
        "us": round(seconds * 1e6, 2),
        "elements_per_ns": round(2 * tokens * heads * dim / seconds / 1e9, 3),
    }


def bench_elementwise(tokens: int, budget: float) -> list[dict[str, Any]]:
    x, w = torch.randn(tokens, 2048), torch.randn(2048)
    gate, up = torch.randn(tokens, 5632), torch.randn(tokens, 5632)
    angles = torch.randn(4096, 32)
    cos, sin, positions = angles.cos(), angles.sin(), torch.arange(tokens)
    q = torch.randn(tokens, 32, 64)
    cases: dict[str, Callable[[], object]] = {
        "rms_norm 2048": lambda: rms_norm(x, w, 1e-5, out=x),
        "silu gate 5632": lambda: gated_activation(gate, up, "silu", out=gate),
        "rope 32x64": lambda: apply_rope(q, cos, sin, positions),
    }
    return [
        {"case": name, "tokens": tokens, "us": round(best_seconds(call, budget) * 1e6, 2)}
        for name, call in cases.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer shapes, shorter runs")
    parser.add_argument("--threads", type=int, default=0, help="kernel threads; 0 = the default")
    options = parser.parse_args()
    if options.threads:
        threads.set_num_threads(options.threads)
    budget = 0.15 if options.quick else 0.5
    roof = read_roof(budget)
    print(json.dumps({"roof_gb_s": round(roof, 2), "threads": threads.num_threads(), "isa": threads.isa()}), flush=True)
    shapes = ("tinyllama",) if options.quick else tuple(SHAPES)
    for shape in shapes:
        for kind in KINDS:
            for context in (512, 4096):
                print(json.dumps(bench_decode(shape, kind, context, roof, budget)), flush=True)
    for kind in KINDS:
        print(json.dumps(bench_prefill("tinyllama", kind, 512, budget)), flush=True)
        for tokens in (1, 512):
            print(json.dumps(bench_store(kind, tokens, budget)), flush=True)
    for tokens in (1, 512):
        for line in bench_elementwise(tokens, budget):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
