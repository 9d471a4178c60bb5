"""Thousands of mixed requests on the bundled model: none lost, no page leaked, memory and latency flat. One JSON line.

python benchmarks/soak_generate.py [--requests 5000] [--seed 1] [--draft none|ngram|model]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from typing import Any

from exl_core import ExLlamaV2, ExLlamaV2Cache_Q8, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_filters import ExLlamaV2Filter, ExLlamaV2SelectFilter
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.bundled import default_model_dir, draft_model_dir
from exl_generate.testing import check_pages

STARTS = [
    "Once upon a time,",
    "One rainy day, a small fox",
    "The old bear",
    "Tell me",
    "A JSON record:",
    "In the harbour",
]
Settings = ExLlamaV2Sampler.Settings


class Broken(ExLlamaV2Filter):
    """Raises at the third token."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self.at = 0

    def clone(self, c: Any = None) -> Broken:
        return Broken()

    def begin(self, prefix_str: Any = "") -> None:
        self.at = 0

    def feed(self, token: Any) -> None:
        self.at += 1

    def next(self) -> tuple[None, set[int]]:
        if self.at == 3:
            raise RuntimeError("broken on purpose")
        return None, set()


def broken_hook(result: Any) -> None:
    """Raises now and then."""
    if int(result.sampled_token) % 41 == 0:
        raise RuntimeError("broken on purpose")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draft", choices=["none", "ngram", "model"], default="ngram")
    args = parser.parse_args()
    print(json.dumps(soak(make_generator(args.draft), args.requests, random.Random(args.seed))))


def make_generator(draft: str) -> ExLlamaV2DynamicGenerator:
    """The bundled model with a small cache, so that pages are scarce."""

    def read(folder: Any) -> ExLlamaV2:
        model = ExLlamaV2(ExLlamaV2Config(folder))
        model.load()
        return model

    model = read(default_model_dir())
    kw: dict[str, Any] = {"use_ngram_draft": True} if draft == "ngram" else {}
    if draft == "model":
        small = read(draft_model_dir())
        kw = {"draft_model": small, "draft_cache": ExLlamaV2Cache_Q8(small, max_seq_len=4096)}
    cache = ExLlamaV2Cache_Q8(model, max_seq_len=4096)
    return ExLlamaV2DynamicGenerator(model, cache, ExLlamaV2Tokenizer(model.config), max_batch_size=12, **kw)


def request(generator: ExLlamaV2DynamicGenerator, random_: random.Random, number: int) -> ExLlamaV2DynamicJob:
    """One of every kind of request."""
    tokenizer = generator.tokenizer
    kind = random_.randrange(8)
    start = random_.choice(STARTS) + " and so on" * random_.randrange(0, 60)
    settings = [Settings(), Settings.greedy(), Settings(temperature=1.2, min_p=0.05, dry_multiplier=0.8)][number % 3]
    kw: dict[str, Any] = {"stop_conditions": [tokenizer.eos_token_id, "\n\n"]}
    ids: Any = tokenizer.encode(start, add_bos=True)
    if kind == 0:
        kw["filters"] = [ExLlamaV2SelectFilter(generator.model, tokenizer, [" yes", " no", " perhaps"])]
    elif kind == 1:
        kw["filters"] = [Broken()]
    elif kind == 2:
        kw["banned_strings"] = ["the", "said"]
    elif kind == 3:
        kw["token_healing"] = True
    elif kind == 4:
        ids = [ids, tokenizer.encode("No", add_bos=True)]
        settings = Settings(cfg_scale=1.5)
    elif kind == 5:
        settings = Settings(post_sampling_hooks=[broken_hook])
    return ExLlamaV2DynamicJob(
        ids, random_.randrange(1, 60), gen_settings=settings, seed=number, identifier=number, **kw
    )


def soak(generator: ExLlamaV2DynamicGenerator, requests: int, random_: random.Random) -> dict[str, Any]:
    """Keep a few dozen requests in the queue, cancel one in ten at a random moment, look at every page now and then."""
    running: dict[ExLlamaV2DynamicJob, float] = {}
    reasons: dict[str, int] = {}
    latencies: list[float] = []
    sent = rounds = 0
    early = 0
    begin = time.monotonic()
    while sent < requests or running:
        while sent < requests and len(running) < 40:
            job = request(generator, random_, sent)
            generator.enqueue(job)
            running[job] = time.monotonic()
            sent += 1
        if running and random_.random() < 0.02:
            generator.cancel(random_.choice(list(running)))
        for result in generator.iterate():
            if result["eos"]:
                latencies.append(time.monotonic() - running.pop(result["job"]))
                reasons[result["eos_reason"]] = reasons.get(result["eos_reason"], 0) + 1
        rounds += 1
        if rounds % 50 == 0:
            check_pages(generator)
        if len(latencies) == requests // 5 and not early:
            early = _memory_mb()
    generator.iterate()
    check_pages(generator)
    table = generator.page_table
    assert sum(reasons.values()) == requests, "requests were lost"
    assert (table.unreferenced, table.reserved) == (len(table.pages), 0), "pages were lost"
    fifth = max(1, requests // 5)
    return {
        "bench": "soak",
        "requests": requests,
        "reasons": reasons,
        "seconds": round(time.monotonic() - begin, 1),
        "rounds": rounds,
        "memory_mb_at_a_fifth": early,
        "memory_mb_at_the_end": _memory_mb(),
        "mean_latency_first_fifth_s": round(sum(latencies[:fifth]) / fifth, 3),
        "mean_latency_last_fifth_s": round(sum(latencies[-fifth:]) / fifth, 3),
    }


def _memory_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    main()
