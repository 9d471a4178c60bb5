"""A model on one GPU, split by layers over several, and sharded over several: decode steps, the generator, prompts.

    python benchmarks/bench_devices.py [--shape 8b] [--bits 4.0] [--context 256] [--batch 1 --batch 8 ..] [--sharded]

Random weights of true shapes (gpu_model.py), the same on one GPU and split over all: logits of several steps must be
bitwise equal first; else no speed is printed. The sharded model has weights of its own. JSON lines, then a table with
the share of one GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import unittest.mock
from functools import partial
from typing import Any

import bench_step
import torch
from bench_step import NAMES, PAGE, SPARE, fill_cache, host_time, paged, replay_time, through_generator
from gpu_model import build
from gpu_timing import emit, environment
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Cache_TP
from exl_core.execution.environment import GRAPHS_VARIABLE
from exl_kernels.device import set_row_invariant

CHUNK = 2048
WARM = 6
"""Prompts that are not timed: those of one size are captured after four."""


def _sharded_cache(base: Any, model: ExLlamaV2, max_seq_len: int) -> ExLlamaV2Cache_TP:
    return ExLlamaV2Cache_TP(model, base, max_seq_len=max_seq_len)


CACHES: dict[str, Any] = {**bench_step.CACHES}
CACHES |= {f"tp-{kind}": partial(_sharded_cache, base) for kind, base in bench_step.CACHES.items()}


def logits_of(model: ExLlamaV2, kind: str, batch: int) -> Tensor:
    """Logits of a prompt's end and the eight steps after it, all queued before the first is read; on the CPU."""
    cache = CACHES[kind](model, max_seq_len=PAGE * batch)
    ids = torch.randint(300, model.config.vocab_size, (batch, 40), generator=torch.Generator().manual_seed(batch))
    found = []
    set_row_invariant(True)  # otherwise prompts of more than 64 rows may differ in the last bits
    try:
        for begin, q_len in [(0, 24), *((at, 1) for at in range(24, 30)), (30, 4), (34, 4)]:
            part = ids[:, begin : begin + q_len]
            params = paged(cache, batch, begin, q_len)
            found.append(model.forward_chunk(part, cache, attn_params=params)["logits"].clone())
    finally:
        set_row_invariant(False)
    return torch.cat(found, 1).cpu()


def same(split: ExLlamaV2, kind: str, batches: list[int], one: ExLlamaV2 | None = None) -> bool:
    """Whether the results of captured steps are bitwise those of one GPU; without `one`, of the model's eager steps."""
    right = True
    for batch in batches:
        with unittest.mock.patch.dict(os.environ, {} if one is not None else {GRAPHS_VARIABLE: "0"}):
            split.decode.clear()
            a = logits_of(split if one is None else one, kind, batch)
        split.decode.clear()
        before = split.decode.steps
        b = logits_of(split, kind, batch)
        if split.decode.steps - before < 6 or split.decode.failures:
            print(f"CHECK FAILED: not captured: {split.decode.reason} {split.decode.failures}", file=sys.stderr)
            right = False
        for first, last in ((0, 24), (24, 30), (30, 38)):
            if not torch.equal(a[:, first:last], b[:, first:last]):
                apart = (a[:, first:last] != b[:, first:last]).float().mean()
                kind_of = "split" if one is not None else "sharded"
                print(
                    f"CHECK FAILED: {kind_of}, batch {batch}, places {first} to {last}: {apart:.2%} differ",
                    file=sys.stderr,
                )
                right = False
        split.decode.clear()
    return right


def steps(model: ExLlamaV2, kind: str, context: int, batch: int) -> dict[str, object]:
    """Decode steps through the model, and through the generator."""
    assert model.device is not None
    with torch.cuda.device(model.device):
        cache = CACHES[kind](model, max_seq_len=-(-(context + SPARE) // PAGE) * PAGE * batch)
        fill_cache(cache)
        params = paged(cache, batch, context)
        ids = torch.randint(0, model.config.vocab_size, (batch, 1))

        def step() -> None:
            model.forward_chunk(ids, cache, attn_params=params)

        step()
        p50, p10, p90 = replay_time(step)
        host = host_time(step)
        model.decode.clear()
        with unittest.mock.patch.dict(bench_step.CACHES, CACHES):
            found = through_generator(model, kind, context, batch)
        return {"p50_us": p50, "p10_us": p10, "p90_us": p90, "host_us": host, "tok_s": batch * 1e6 / p50, **found}


def prompt(model: ExLlamaV2, kind: str, tokens: int) -> dict[str, object]:
    """A prompt in chunks, until its last token's logits are on the host."""
    cache = CACHES[kind](model, max_seq_len=-(-tokens // PAGE) * PAGE)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens))
    taken = []
    for _ in range(WARM + 5):
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for start in range(0, tokens, CHUNK):
            part, last = ids[:, start : start + CHUNK], start + CHUNK >= tokens
            params = paged(cache, 1, start, part.shape[1])
            out = model.forward_chunk(part, cache, attn_params=params, last_id_only=True, preprocess_only=not last)
        int(out["logits"].argmax())
        taken.append(time.perf_counter() - begin)
    seconds = statistics.median(taken[WARM:])
    return {"tokens": tokens, "p50_us": seconds * 1e6, "tok_s": tokens / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--bits", default="4.0")
    parser.add_argument("--cache", default="fp16")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--prompt", type=int, action="append")
    parser.add_argument("--sharded", action="store_true", help="also tensor parallel")
    args = parser.parse_args()
    count = torch.cuda.device_count()
    if count < 2:
        sys.exit(f"{count} GPU is visible; this benchmark compares one with several")
    batches, prompts = args.batch or [1, 8, 32], args.prompt or [2048, 8192]
    everywhere = ",".join(f"cuda:{i}" for i in range(count))
    one, split = (build(args.shape, args.bits, 32768, names) for names in ("cuda:0", everywhere))
    models = {"1": (one, args.cache), f"split {count}": (split, args.cache)}
    if args.sharded:
        models[f"tp {count}"] = (build(args.shape, args.bits, 32768, everywhere, sharded=True), f"tp-{args.cache}")
    right = same(split, args.cache, batches, one)
    if args.sharded:
        right &= same(*models[f"tp {count}"], batches)
    if not right:
        sys.exit("the check failed: no speed is printed")
    about = {
        "bench": "devices",
        **environment(),
        "model_shape": NAMES.get(args.shape, args.shape),
        "bpw": args.bits,
        "cache": args.cache,
    }
    table = [f"| tok/s (share) | {' | '.join(models)} |", "|---" * (len(models) + 1) + "|"]

    def row(name: str, speeds: list[float]) -> None:
        table.append(f"| {name} | " + " | ".join(f"{one:,.0f} ({one / speeds[0]:.3f})" for one in speeds) + " |")

    for batch in batches:
        speeds: list[tuple[float, float]] = []
        for topology, (model, kind) in models.items():
            line = {**about, "topology": topology, "batch": batch, "ctx": args.context}
            line |= steps(model, kind, args.context, batch)
            speeds.append((float(str(line["tok_s"])), float(str(line["generator_tok_s"]))))
            line |= {"share_of_one": speeds[-1][0] / speeds[0][0], "generator_share": speeds[-1][1] / speeds[0][1]}
            emit(line)
        row(f"step, batch {batch}", [step for step, _ in speeds])
        row(f"generator, batch {batch}", [generator for _, generator in speeds])
    for tokens in prompts:
        found: list[float] = []
        for topology, (model, kind) in models.items():
            line = prompt(model, kind, tokens)
            found.append(float(str(line["tok_s"])))
            emit({**about, "topology": topology, "batch": 1, **line, "share_of_one": found[-1] / found[0]})
        row(f"prompt of {tokens:,}", found)
    print("\n".join(table), flush=True)


if __name__ == "__main__":
    main()
