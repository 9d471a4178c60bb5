"""Thousands of mixed requests on the bundled model: none lost, no page leaked, all figures flat. One JSON line.

Kinds: choices, broken filters, banned strings, healing, CFG pairs, broken hooks, adapters, shares of pages, embeddings,
JSON by grammar; the generator's adapters are switched while jobs run, and one job in fifty is cancelled at some moment.

python benchmarks/soak_generate.py [--requests 5000] [--seed 1] [--draft none|ngram|model]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Config,
    ExLlamaV2Lora,
    ExLlamaV2MMEmbedding,
    ExLlamaV2Tokenizer,
)
from exl_filters import ExLlamaV2Filter, ExLlamaV2GrammarFilter, ExLlamaV2SelectFilter
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


SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)


class World:
    """The generator and what requests are made of."""

    def __init__(self, generator: ExLlamaV2DynamicGenerator) -> None:
        self.generator = generator
        model: Any = generator.model
        self.ends: list[int] = model.config.eos_token_ids
        self.adapters = [random_adapter(model, seed) for seed in (1, 2)]
        self.sets: list[list[ExLlamaV2Lora]] = [[], [self.adapters[0]], [self.adapters[1]], self.adapters]
        rows = torch.randn(12, model.config.hidden_size, generator=torch.Generator().manual_seed(3)) * 0.1
        self.pictures = [ExLlamaV2MMEmbedding(model, rows), ExLlamaV2MMEmbedding(model, rows.flip(0))]
        self.grammar = ExLlamaV2GrammarFilter(model, generator.tokenizer, json_schema=SCHEMA)


def random_adapter(model: ExLlamaV2, seed: int) -> ExLlamaV2Lora:
    """Rank 4 on every query projection."""
    dice, config, tensors = torch.Generator().manual_seed(seed), model.config, {}
    for layer in range(config.num_hidden_layers):
        key = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{key}.lora_A.weight"] = torch.randn(4, config.hidden_size, generator=dice) * 0.1
        tensors[f"{key}.lora_B.weight"] = torch.randn(config.hidden_size, 4, generator=dice) * 0.1
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "adapter_model.safetensors")
        about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
        (Path(folder) / "adapter_config.json").write_text(json.dumps(about))
        return ExLlamaV2Lora.from_directory(model, folder)


def main() -> None:
    os.environ.setdefault("EXL_DEVICE", "cpu")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draft", choices=["none", "ngram", "model"], default="ngram")
    args = parser.parse_args()
    print(json.dumps(soak(World(make_generator(args.draft)), args.requests, random.Random(args.seed))))


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


def request(world: World, random_: random.Random, number: int) -> ExLlamaV2DynamicJob:
    """One of every kind of request."""
    generator, tokenizer = world.generator, world.generator.tokenizer
    kind = random_.randrange(13)
    start = random_.choice(STARTS) + " and so on" * random_.randrange(0, 60)
    settings = [Settings(), Settings.greedy(), Settings(temperature=1.2, min_p=0.05, dry_multiplier=0.8)][number % 3]
    kw: dict[str, Any] = {"stop_conditions": [*world.ends, "\n\n"]}
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
    elif kind == 6:
        kw["loras"] = random_.choice(world.sets)
    elif kind == 7:
        kw["max_rq_tokens"] = random_.randrange(1, 12)
    elif kind == 8:
        picture = random_.choice(world.pictures)
        ids = tokenizer.encode(f"See {picture.text_alias} {start}", add_bos=True, embeddings=[picture])
        kw["embeddings"] = [picture]
    elif kind == 9:
        kw["filters"] = [world.grammar]
    elif kind == 10:
        kw["return_probs"] = kw["return_logits"] = True
    new = random_.randrange(1, 300 if kind == 7 else 60)
    return ExLlamaV2DynamicJob(ids, new, gen_settings=settings, seed=number, identifier=number, **kw)


@dataclass(frozen=True)
class Mark:
    """The state of the process: processor and wall seconds, memory in use, Python objects, tokens computed."""

    cpu: float
    wall: float
    memory_mb: int
    objects: int
    tokens: int

    @classmethod
    def now(cls, tokens: int, begin: float) -> Mark:
        """Memory is what is left once garbage has been collected."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory = pages * resource.getpagesize() >> 20
        return cls(time.process_time(), time.monotonic() - begin, memory, len(gc.get_objects()), tokens)


def soak(world: World, requests: int, random_: random.Random) -> dict[str, Any]:
    """Keep a few dozen requests in the queue, cancel some at a random moment, look at every page now and then."""
    generator = world.generator
    switches = requeues = 0
    running: dict[ExLlamaV2DynamicJob, float] = {}
    reasons: dict[str, int] = {}
    latencies: list[float] = []
    sent = rounds = tokens = 0
    fifth = max(1, requests // 5)
    marks: list[Mark] = []
    begin = time.monotonic()
    marks.append(Mark.now(tokens, begin))
    while sent < requests or running:
        while sent < requests and len(running) < 40:
            job = request(world, random_, sent)
            generator.enqueue(job)
            running[job] = time.monotonic()
            sent += 1
        if running and random_.random() < 0.02:
            generator.cancel(random_.choice(list(running)))
        if random_.random() < 0.01:
            generator.set_loras(random_.choice(world.sets))
            switches += 1
        for result in generator.iterate():
            if result["eos"]:
                requeues += result["job"].requeues
                latencies.append(time.monotonic() - running.pop(result["job"]))
                tokens += result["new_tokens"] + result["prompt_tokens"] - result["cached_tokens"]
                reasons[result["eos_reason"]] = reasons.get(result["eos_reason"], 0) + 1
        rounds += 1
        if rounds % 50 == 0:
            check_pages(generator)
        if len(latencies) >= fifth * len(marks) and len(marks) < 5:
            marks.append(Mark.now(tokens, begin))
    marks.append(Mark.now(tokens, begin))
    generator.iterate()
    check_pages(generator)
    table = generator.page_table
    assert sum(reasons.values()) == requests, "requests were lost"
    assert (table.unreferenced, table.reserved) == (len(table.pages), 0), "pages were lost"
    parts = list(itertools.pairwise(marks))
    fifths = [latencies[i * fifth : (i + 1) * fifth] for i in range(5)]
    return {
        "bench": "soak",
        "requests": requests,
        "reasons": reasons,
        "seconds": round(time.monotonic() - begin, 1),
        "rounds": rounds,
        "adapter_switches": switches,
        "requeues": requeues,
        "memory_mb_by_fifth": [mark.memory_mb for mark in marks[1:]],
        "memory_mb_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "objects_by_fifth": [mark.objects for mark in marks[1:]],
        "computed_tokens": tokens,
        # The processor time of this process alone: what others do on the machine moves the latency, but hardly this.
        "cpu_us_per_token_by_fifth": [round((b.cpu - a.cpu) / max(1, b.tokens - a.tokens) * 1e6) for a, b in parts],
        "busy_share_by_fifth": [round((b.cpu - a.cpu) / (b.wall - a.wall), 2) for a, b in parts],
        # The first fifth begins with an empty queue.
        "mean_latency_s_by_fifth": [round(sum(part) / len(part), 3) for part in fifths],
        "p99_latency_s_by_fifth": [round(sorted(part)[len(part) * 99 // 100], 3) for part in fifths],
    }


if __name__ == "__main__":
    main()
