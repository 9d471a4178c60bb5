"""Decode attention over paged caches at the heads of an 8B Llama: time and bandwidth by context, batch and cache type.

    python benchmarks/bench_attn.py [--quick]

32 query heads, 8 key heads of 128, pages of 256 tokens. Bytes are keys, values and scales of every visible token, read
once. A case whose result is wrong against a float64 oracle prints no speed and fails the script. JSON lines.
"""

from __future__ import annotations

import argparse
import sys

import torch
from gpu_timing import emit, environment, read_roof, time_graph
from torch import Tensor

from exl_kernels.attention import paged_attention
from exl_kernels.device import require_cuda
from exl_kernels.kv import KVPages, load_kv, store_kv

HEADS, KEY_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 256


def filled(kind: str, pages: int) -> KVPages:
    made = KVPages.allocate(kind, pages, PAGE, KEY_HEADS, HEAD_DIM, device="cuda")  # type: ignore[arg-type]
    for page in range(pages):
        k = torch.randn(PAGE, KEY_HEADS, HEAD_DIM, device="cuda", dtype=torch.float16)
        store_kv(made, k, torch.randn_like(k), torch.arange(page * PAGE, (page + 1) * PAGE, device="cuda"))
    return made


def oracle(q: Tensor, pages: KVPages, context: int, first_page: int) -> Tensor:
    """Float64 attention over the codec's own decode (half roundings included: hence the bound of the check)."""
    k, v = load_kv(pages, torch.arange(context, device="cuda") + first_page * PAGE)
    group = HEADS // KEY_HEADS
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    logits = torch.einsum("hd,jhd->hj", q.double(), k) * HEAD_DIM**-0.5
    return torch.einsum("hj,jhd->hd", logits.softmax(-1), v)


def measure(common: dict[str, object], roof: float, kind: str, batch: int, context: int) -> bool:
    per_row = -(-context // PAGE)
    layer = filled(kind, batch * per_row)
    # Copies of the layer, so that no step finds its pages in the caches.
    copies = [layer]
    while sum(c.nbytes for c in copies) < 512 << 20 and len(copies) < 64:
        copies.append(filled(kind, batch * per_row))
    table = torch.arange(batch * per_row, dtype=torch.int32, device="cuda").view(batch, per_row)
    rows = torch.arange(batch, dtype=torch.int32, device="cuda")
    positions = torch.full((batch,), context - 1, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, HEADS, HEAD_DIM, device="cuda", dtype=torch.float16)
    out = torch.empty_like(q)

    def step(pages: KVPages) -> None:
        paged_attention(q, pages, table, rows, positions, scale=HEAD_DIM**-0.5, out=out)

    step(layer)
    want = oracle(q[-1], layer, context, (batch - 1) * per_row)
    error = float((out[-1].double() - want).norm() / want.norm())
    line = {**common, "bench": "attn", "cache": kind, "bs": batch, "ctx": context, "max_err": error}
    if not error < 3e-3:
        emit({**line, "wrong": True})
        return False

    def body() -> None:
        for pages in copies:
            step(pages)

    timing = time_graph(body, len(copies))
    read = layer.nbytes * context / (per_row * PAGE)
    line |= {"us": timing.p50, "us_p10": timing.p10, "us_p90": timing.p90, "bytes": read}
    emit({**line, "gbps": read / timing.p50 / 1e3, "pct_of_read_roof": 100 * read / timing.p50 * 1e6 / roof})
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="batch 1 at 256 and 16,384 tokens only")
    quick = parser.parse_args().quick
    require_cuda("cuda")
    torch.manual_seed(1)
    common, roof = environment(), read_roof()
    emit({**common, "bench": "roof", "what": "read", "gbps": roof / 1e9})
    cases = [(1, 256), (1, 16384)] if quick else [(1, 256), (1, 4096), (1, 16384), (8, 4096), (32, 1024)]
    right = True
    for batch, context in cases:
        for kind in ("fp16", "fp8", "q8", "q6", "q4"):
            right &= measure(common, roof, kind, batch, context)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
