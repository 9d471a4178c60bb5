"""Decode attention over paged caches: time, bandwidth and share of the read roof by context, batch and cache kind.

    python benchmarks/bench_attn.py [--quick]

Random keys and values in shuffled pages of 256 tokens, 32 query and 8 key heads of 128 (an 8B Llama) unless said
otherwise. Layers rotate over at least 768 MB, launches are nodes of one graph. Bytes are those of the keys, values and
scales that a layer must read. A case whose result is wrong against float64 prints no speed and makes the script fail.
`own`: the token's rotation and the storing of its key and value are in the time.
`prefill` lines: tokens of one chunk at the end of the context, TFLOP/s of the two matmuls over what the mask leaves.
JSON lines.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpu_timing import emit, environment, read_roof, time_graph
from torch import Tensor

from exl_kernels.attention import cuda as attention_cuda
from exl_kernels.attention import paged_attention
from exl_kernels.device import require_cuda, set_programmatic_launch
from exl_kernels.kv import KVKind, KVPages, store_kv
from exl_kernels.reference import attention as twin
from exl_kernels.rope import apply_rope

PAGE = 256
ROTATE = 768 << 20


@dataclass(frozen=True)
class Shape:
    """The shape of one case."""

    kind: KVKind
    context: int
    batch: int = 1
    tokens: int = 1  # of each sequence, the last ones of the context
    q_heads: int = 32
    heads: int = 8
    dim: int = 128
    own: bool = (
        False  # the last token's key and value come with the call: rotated, stored and attended to in one launch
    )


class Layers:
    """Copies of one layer's cache over more memory than the GPU's caches hold, and one call's operands."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        pages_each = -(-shape.context // PAGE)
        total = pages_each * shape.batch
        first = KVPages.allocate(shape.kind, total, PAGE, shape.heads, shape.dim, "cuda")
        self.bytes = first.nbytes * shape.context // (pages_each * PAGE)
        copies = 1 if shape.tokens > 16 else max(2, -(-ROTATE // first.nbytes))
        self.layers = [first] + [
            KVPages.allocate(shape.kind, total, PAGE, shape.heads, shape.dim, "cuda") for _ in range(copies - 1)
        ]
        slots = torch.arange(total * PAGE, device="cuda")
        for part in torch.split(slots, 1 << 14):
            k, v = (
                torch.randn(len(part), shape.heads, shape.dim, device="cuda", dtype=torch.float16) for _ in range(2)
            )
            for pages in self.layers:
                store_kv(pages, k, v, part)
        self.table = torch.randperm(total, device="cuda").to(torch.int32).view(shape.batch, pages_each)
        self.rows = torch.arange(shape.batch, device="cuda", dtype=torch.int32).repeat_interleave(shape.tokens)
        at = torch.arange(shape.context - shape.tokens, shape.context, device="cuda", dtype=torch.int32)
        self.positions = at.repeat(shape.batch)
        self.q = torch.randn(shape.batch * shape.tokens, shape.q_heads, shape.dim, device="cuda", dtype=torch.float16)
        self.out = torch.empty_like(self.q)
        self.k, self.v = (torch.randn(shape.batch, shape.heads, shape.dim, device="cuda").half() for _ in range(2))
        self.rope_positions = self.positions.long()
        page = self.table.long()[self.rows.long(), self.rope_positions // PAGE]
        self.slots = page * PAGE + self.rope_positions % PAGE
        angles = torch.randn(shape.context, shape.dim // 2, device="cuda")
        self.cos, self.sin = angles.cos(), angles.sin()

    def run(self, layer: int) -> Tensor:
        pages = self.layers[layer % len(self.layers)]
        scale, where = self.shape.dim**-0.5, (self.table, self.rows, self.positions)
        if self.shape.own:
            return attention_cuda.attend_own(
                *(self.q, self.k, self.v, pages),
                tables=attention_cuda.AttentionTables(
                    self.table, rows=self.rows, positions=self.positions, max_keys=self.shape.context
                ),
                slots=self.slots,
                rotation=attention_cuda.Rotation(
                    cos=self.cos, sin=self.sin, positions=self.rope_positions, interleaved=False
                ),
                options=attention_cuda.attention_options(scale, window=0, softcap=0.0),
                out=self.out,
                early=True,
            )
        return paged_attention(self.q, pages, *where, scale=scale, out=self.out, max_keys=self.shape.context)

    def error(self) -> float:
        """Largest error against float64 of the last token, relative to the largest result."""
        self.out.fill_(float("nan"))
        got = self.run(0)[-1:].double().cpu()
        pages = self.layers[0]
        scales = [None if t is None else t.cpu() for t in (pages.key_scales, pages.value_scales)]
        cpu = KVPages(pages.kind, pages.head_dim, pages.key.cpu(), pages.value.cpu(), *scales)
        last = [t[-1:].cpu() for t in (self.rows, self.positions)]
        q = self.q[-1:].clone()
        if self.shape.own:
            apply_rope(q, self.cos, self.sin, self.rope_positions[-1:])
        want = twin.paged_attention(q.double().cpu(), cpu, self.table.cpu(), *last, scale=self.shape.dim**-0.5)
        return float((got - want).abs().max() / want.abs().max())

    def body(self) -> tuple[Callable[[], None], int]:
        count = max(len(self.layers), 8) if self.shape.tokens <= 16 else 2

        def launches() -> None:
            for i in range(count):
                self.run(i)

        return launches, count


def measure(common: dict[str, object], roof: float, shape: Shape) -> bool:
    layers = Layers(shape)
    line: dict[str, object] = {**common, "bench": "attn", "cache": shape.kind, "bs": shape.batch, "ctx": shape.context}
    line |= {"q_len": shape.tokens, "own": shape.own, "heads": f"{shape.q_heads}/{shape.heads}x{shape.dim}"}
    error = layers.error()
    line["max_err"] = error
    if not error < 4e-3:
        emit({**line, "wrong": True})
        return False
    body, count = layers.body()
    times = {}
    with attention_cuda.counters("cuda"):
        for pdl in (False, True):
            set_programmatic_launch(pdl)
            times[pdl] = time_graph(body, count, samples=15)
    set_programmatic_launch(True)
    best = times[True]
    line |= {"us_plain": times[False].p50, "us_pdl": best.p50, "us_p10": best.p10, "us_p90": best.p90}
    if shape.tokens <= 16:
        gbps = layers.bytes / best.p50 / 1e3
        line |= {"bytes": layers.bytes, "gbps": gbps, "pct_of_read_roof": 100 * gbps * 1e9 / roof}
    else:
        seen = shape.tokens * (2 * shape.context - shape.tokens + 1) / 2
        line["tflops"] = 4 * seen * shape.q_heads * shape.dim * shape.batch / best.p50 / 1e6
    emit(line)
    return True


def cases(quick: bool) -> list[Shape]:
    kinds: tuple[KVKind, ...] = ("fp16", "fp8", "q8", "q6", "q4")
    if quick:
        found = [Shape(k, c) for k in ("fp16", "q4") for c in (64, 256, 1024, 4096, 16384)]
        found += [Shape(k, c, own=True) for k in ("fp16", "q4") for c in (64, 256, 1024, 16384)]
        found += [Shape(k, 256, batch=b, own=True) for k in ("fp16", "q4") for b in (8, 32, 64)]
        found += [Shape(k, 4096, batch=b) for k in ("fp16", "q4") for b in (8, 32)]
        return [*found, *(Shape(k, 2048, tokens=2048) for k in ("fp16", "q4"))]
    found = [Shape(k, c) for k in kinds for c in (256, 1024, 4096, 16384, 65536)]
    found += [
        Shape(k, c, batch=b, own=True)
        for k in kinds
        for c, b in ((256, 1), (1024, 1), (16384, 1), (256, 32), (256, 64))
    ]
    found += [Shape(k, 4096, batch=b) for k in ("fp16", "q4") for b in (8, 32)]
    found += [Shape(k, 16384, tokens=4) for k in ("fp16", "q4")]
    found += [Shape("fp16", 16384, q_heads=32, heads=4, dim=64), Shape("fp16", 16384, q_heads=16, heads=8, dim=256)]
    found += [Shape(k, c, tokens=2048) for k in ("fp16", "q4") for c in (2048, 16384)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a dozen cases")
    options = parser.parse_args()
    require_cuda("cuda")
    torch.manual_seed(1)
    common, roof = environment(), read_roof()
    emit({**common, "bench": "roof", "what": "read", "gbps": roof / 1e9})
    right = [measure(common, roof, shape) for shape in cases(options.quick)]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
