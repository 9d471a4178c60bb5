"""Host cost of the dynamic generator: microseconds per job and step, beside a model that costs nothing. JSON lines.

python benchmarks/bench_generate.py [--active 64] [--queued 10000] [--cached-pages 100000] [--vocab 32000]
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.sampling import RequestSampler, Settings, Vocabulary
from exl_generate.testing import ScriptedCache, ScriptedConfig, ScriptedTokenizer


class FreeModel:
    """Returns the same logits every time, without looking at anything."""

    def __init__(self, vocab: int) -> None:
        self.config = ScriptedConfig(vocab_size=vocab, max_seq_len=8192, max_input_len=2048)
        self.logits = torch.randn(1, 1, -(-vocab // 32) * 32)

    def forward_chunk(self, input_ids: torch.Tensor, **kw: Any) -> dict[str, torch.Tensor]:
        return {"logits": self.logits.expand(*input_ids.shape, -1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--active", type=int, default=64)
    parser.add_argument("--queued", type=int, nargs="*", default=[0, 10_000])
    parser.add_argument("--cached-pages", type=int, nargs="*", default=[1_000, 100_000])
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    tokenizer = ScriptedTokenizer([f"w{i} " for i in range(args.vocab - 3)])
    for pages in args.cached_pages:
        for queued in args.queued:
            print(json.dumps(step_cost(args.active, queued, pages, args.vocab, args.steps, tokenizer)))
    for name, settings in (("greedy", Settings.greedy()), ("default", Settings())):
        print(json.dumps(sampling_cost(name, settings, 128_256)))


def step_cost(
    active: int, queued: int, pages: int, vocab: int, steps: int, tokenizer: ScriptedTokenizer
) -> dict[str, Any]:
    """One round of `active` jobs, `queued` more waiting, all `pages` of the cache holding something."""
    model = FreeModel(vocab)
    cache = ScriptedCache(model, max_seq_len=pages * 256)  # type: ignore[arg-type]
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer, max_batch_size=active)
    for page in generator.page_table.pages:
        generator.page_table.fill(page, 0, page.tokens[:0])
    settings = ExLlamaV2Sampler.Settings.greedy()
    ids = torch.randint(3, vocab, (active + queued, 200))
    jobs = [
        ExLlamaV2DynamicJob(row[None], steps + 50, gen_settings=settings, stop_conditions=["\n\n", 2]) for row in ids
    ]
    start = time.perf_counter()
    generator.enqueue(jobs)
    enqueue = time.perf_counter() - start
    while not all(job.new_tokens > 3 for job in jobs[:active]):
        generator.iterate()
    start = time.perf_counter()
    for _ in range(steps):
        generator.iterate()
    cost = (time.perf_counter() - start) / steps / active
    return {
        "bench": "host cost per job and step",
        "active": active,
        "queued": queued,
        "cached_pages": pages,
        "vocab": vocab,
        "us": round(cost * 1e6, 1),
        "enqueue_us": round(enqueue / len(jobs) * 1e6, 1),
    }


def sampling_cost(name: str, settings: Settings, vocab: int) -> dict[str, Any]:
    """One token from a vocabulary of `vocab`, 2,000 tokens of context."""
    tokenizer = ScriptedTokenizer([], ScriptedConfig(vocab_size=vocab))
    tokenizer.pieces = [b"x"] * vocab
    sampler = RequestSampler(settings, Vocabulary(tokenizer), 1)
    logits = torch.randn(vocab).numpy()
    context = torch.randint(0, vocab, (2000,)).numpy()
    for i in range(20):
        sampler.sample(logits, context, i)
    start = time.perf_counter()
    for i in range(200):
        sampler.sample(logits, context, i)
    us = (time.perf_counter() - start) / 200 * 1e6
    return {"bench": "sampling", "settings": name, "vocab": vocab, "us": round(us, 1)}


if __name__ == "__main__":
    main()
