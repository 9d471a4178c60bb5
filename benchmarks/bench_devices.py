"""A model on one GPU and split by layers over several: decode steps, the generator, prompts; the share of one GPU.

    python benchmarks/bench_devices.py [--shape 8b] [--bits 4.0] [--cache fp16] [--context 256] [--batch 1 --batch 8 ..]

Random weights of true shapes (gpu_model.py), the same on one GPU and on all. Logits of several steps must be bitwise
equal first; else no speed is printed. JSON lines, then a table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from bench_step import CACHES, NAMES, PAGE, SPARE, fill_cache, host_time, paged, replay_time, through_generator
from gpu_model import build
from gpu_timing import emit, environment
from torch import Tensor

from exl_core import ExLlamaV2

CHUNK = 2048


def logits_of(model: ExLlamaV2, kind: str, batch: int) -> Tensor:
    """Logits of a prompt's end and eight steps behind it, all queued before the first is read; on the CPU."""
    cache = CACHES[kind](model, max_seq_len=PAGE * batch)
    ids = torch.randint(300, model.config.vocab_size, (batch, 40), generator=torch.Generator().manual_seed(batch))
    found = []
    for begin, q_len in [(0, 24), *((at, 1) for at in range(24, 30)), (30, 4), (34, 4)]:
        part = ids[:, begin : begin + q_len]
        found.append(model.forward_chunk(part, cache, attn_params=paged(cache, batch, begin, q_len))["logits"].clone())
    return torch.cat(found, 1).cpu()


def same(one: ExLlamaV2, split: ExLlamaV2, kind: str, batches: list[int]) -> bool:
    """Whether the results of both models are bitwise identical, with captured steps."""
    right = True
    for batch in batches:
        before = split.decode.steps
        a, b = logits_of(one, kind, batch), logits_of(split, kind, batch)
        if split.decode.steps - before < 6 or split.decode.failures:
            print(f"CHECK FAILED: not captured: {split.decode.reason} {split.decode.failures}", file=sys.stderr)
            right = False
        for first, last in ((0, 24), (24, 30), (30, 38)):
            if not torch.equal(a[:, first:last], b[:, first:last]):
                apart = (a[:, first:last] != b[:, first:last]).float().mean()
                print(f"CHECK FAILED: batch {batch}, places {first} to {last}: {apart:.2%} differ", file=sys.stderr)
                right = False
        one.decode.clear()
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
        found = through_generator(model, kind, context, batch)
        return {"p50_us": p50, "p10_us": p10, "p90_us": p90, "host_us": host, "tok_s": batch * 1e6 / p50, **found}


def prompt(model: ExLlamaV2, kind: str, tokens: int) -> dict[str, object]:
    """A prompt in chunks, until its last token's logits are on the host."""
    cache = CACHES[kind](model, max_seq_len=-(-tokens // PAGE) * PAGE)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens))
    taken = []
    for _ in range(6):
        for device in set(model.placement.names):
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for start in range(0, tokens, CHUNK):
            part, last = ids[:, start : start + CHUNK], start + CHUNK >= tokens
            params = paged(cache, 1, start, part.shape[1])
            out = model.forward_chunk(part, cache, attn_params=params, last_id_only=True, preprocess_only=not last)
        int(out["logits"].argmax())
        taken.append(time.perf_counter() - begin)
    seconds = statistics.median(taken[1:])
    return {"tokens": tokens, "p50_us": seconds * 1e6, "tok_s": tokens / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--bits", default="4.0")
    parser.add_argument("--cache", default="fp16")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--prompt", type=int, action="append")
    args = parser.parse_args()
    count = torch.cuda.device_count()
    if count < 2:
        sys.exit(f"{count} GPU is visible; this benchmark compares one with several")
    batches, prompts = args.batch or [1, 8, 32], args.prompt or [2048, 8192]
    everywhere = ",".join(f"cuda:{i}" for i in range(count))
    one, split = (build(args.shape, args.bits, 32768, names) for names in ("cuda:0", everywhere))
    if not same(one, split, args.cache, batches):
        sys.exit("the check failed: no speed is printed")
    about = {
        "bench": "devices",
        **environment(),
        "model_shape": NAMES.get(args.shape, args.shape),
        "bpw": args.bits,
        "cache": args.cache,
    }
    table = ["| | one GPU, tok/s | split by layers, tok/s | share |", "|---|---|---|---|"]
    for batch in batches:
        speeds = []
        for topology, model in (("1", one), (f"split {count}", split)):
            line = {**about, "topology": topology, "batch": batch, "ctx": args.context}
            line |= steps(model, args.cache, args.context, batch)
            speeds.append((float(str(line["tok_s"])), float(str(line["generator_tok_s"]))))
            line |= {"share_of_one": speeds[-1][0] / speeds[0][0], "generator_share": speeds[-1][1] / speeds[0][1]}
            emit(line)
        for at, name in enumerate(("step", "generator")):
            alone, all_gpus = speeds[0][at], speeds[1][at]
            table.append(f"| {name}, batch {batch} | {alone:,.0f} | {all_gpus:,.0f} | {all_gpus / alone:.3f} |")
    for tokens in prompts:
        speeds = []
        for topology, model in (("1", one), (f"split {count}", split)):
            found = prompt(model, args.cache, tokens)
            speeds.append((float(str(found["tok_s"])), 0.0))
            emit({**about, "topology": topology, "batch": 1, **found, "share_of_one": speeds[-1][0] / speeds[0][0]})
        alone, all_gpus = speeds[0][0], speeds[1][0]
        table.append(f"| prompt of {tokens:,} | {alone:,.0f} | {all_gpus:,.0f} | {all_gpus / alone:.3f} |")
    print("\n".join(table), flush=True)


if __name__ == "__main__":
    main()
