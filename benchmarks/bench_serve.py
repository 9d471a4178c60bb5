"""The dynamic generator under load on a GPU: requests of mixed lengths, all queued at once.

    python benchmarks/bench_serve.py [--shape 8b] [--bits 4.0] [--cache fp16] [--requests 64] [--batch 32] [--sampled]

Random weights of true shapes (gpu_model.py), prompts of 64 to 1,024 tokens, 32 to 256 new ones. The check of bench_step
runs first; a failed one prints no speed. One JSON line: tokens a second in and out, time to the first token, time
between tokens.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from bench_step import CACHES, NAMES, PAGE, check
from gpu_model import build
from gpu_timing import emit, environment

from exl_core import ExLlamaV2Tokenizer
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exl_generate.sampling import Settings


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def serve(generator: ExLlamaV2DynamicGenerator, jobs: list[ExLlamaV2DynamicJob]) -> dict[str, object]:
    """Runs all jobs to their end; host clock at the results."""
    begin = time.perf_counter()
    generator.enqueue(jobs)
    last: dict[ExLlamaV2DynamicJob, float] = {}
    first: list[float] = []
    between: list[float] = []
    made = 0
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            ids = result.get("token_ids")
            if ids is None or not ids.numel():
                continue
            now, job = time.perf_counter(), result["job"]
            made += int(ids.numel())
            if job in last:
                between.append((now - last[job]) * 1e3)
            else:
                first.append((now - begin) * 1e3)
            last[job] = now
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "tok_s_out": made / seconds,
        "tok_s_in": sum(len(job.sequences[0].ids) for job in jobs) / seconds,
        "first_token_ms_p50": percentile(first, 0.5),
        "first_token_ms_p99": percentile(first, 0.99),
        "between_ms_p50": percentile(between, 0.5),
        "between_ms_p99": percentile(between, 0.99),
        "tokens_out": made,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--bits", default="4.0")
    parser.add_argument("--cache", default="fp16", choices=sorted(CACHES))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--sampled", action="store_true", help="temperature 0.8, top-p 0.9, top-k 50 in place of greedy"
    )
    args = parser.parse_args()
    if not check():
        sys.exit("the check failed: no speed is printed")
    model = build(args.shape, args.bits, 32768)
    cache = CACHES[args.cache](model, max_seq_len=args.batch * 6 * PAGE)
    generator = ExLlamaV2DynamicGenerator(model, cache, ExLlamaV2Tokenizer(model.config), max_batch_size=args.batch)
    settings = Settings(temperature=0.8, top_k=50, top_p=0.9) if args.sampled else Settings.greedy()
    draw = torch.Generator().manual_seed(1)

    def jobs(count: int) -> list[ExLlamaV2DynamicJob]:
        made = []
        for seed in range(count):
            tokens, new = (int(torch.randint(*span, (1,), generator=draw)) for span in ((64, 1025), (32, 257)))
            ids = torch.randint(300, model.config.vocab_size, (1, tokens), generator=draw)
            made.append(ExLlamaV2DynamicJob(ids, new, gen_settings=settings, stop_conditions=[], seed=seed))
        return made

    serve(generator, jobs(args.batch))
    emit(
        {
            "bench": "serve",
            **environment(),
            "model_shape": NAMES.get(args.shape, args.shape),
            "bpw": args.bits,
            "cache": args.cache,
            "batch": args.batch,
            "requests": args.requests,
            "sampled": args.sampled,
            **serve(generator, jobs(args.requests)),
        }
    )


if __name__ == "__main__":
    main()
