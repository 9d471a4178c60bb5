"""`exl bench`: prefill and decode speed on this machine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from exl_core import ExLlamaV2Config
from exl_core.loading.parallel_plan import plan_tp
from exl_core.loading.plan import plan
from exl_generate.cli.models import Loaded, load, model_folder
from exl_generate.cli.tables import show_table
from exl_generate.dynamic import PAGED_PAGE_SIZE, ExLlamaV2DynamicJob
from exl_generate.errors import CapacityError, RequestError
from exl_generate.sampling import Settings
from exl_kernels import threads
from exl_kernels.kv import KVKind

__all__ = ["check", "measure", "run"]

#: Positions of one sequence in a step, as the dynamic generator counts them by default.
MAX_Q_SIZE = 8


def run(
    folder: Path | None,
    prompt_tokens: int,
    new_tokens: int,
    batches: list[int],
    cache: KVKind,
    as_json: bool,
    tp: bool = False,
) -> None:
    """One line per batch size: a JSON object each with `as_json`. `tp`: every matrix sharded over all devices."""
    place = model_folder(folder)
    loaded = load(place, tp)
    check(loaded.config, prompt_tokens, new_tokens, batches, cache, tp)
    rows = [measure(loaded, prompt_tokens, new_tokens, batch, cache) for batch in batches]
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    show_table(
        f"{Path(loaded.config.model_dir or '').name}, {threads.num_threads()} threads, {threads.isa()}, cache {cache}",
        ["batch", "prefill tok/s", "decode tok/s", "tok/s per sequence"],
        [
            [
                str(r["batch"]),
                f"{r['prefill_tps']:.0f}",
                f"{r['decode_tps']:.1f}",
                f"{r['decode_tps'] / r['batch']:.1f}",
            ]
            for r in rows
        ],
    )


def check(
    config: ExLlamaV2Config,
    prompt_tokens: int,
    new_tokens: int,
    batches: list[int],
    cache: KVKind,
    tp: bool = False,
) -> None:
    """Reject what the model or the machine has no room for, before anything is loaded.

    Raises:
        RequestError: prompt and new tokens are more than the model's context.
        CapacityError: a batch has more sequences than a step takes, or its cache does not fit.
    """
    length = prompt_tokens + new_tokens
    if length > config.max_seq_len:
        raise RequestError(f"prompt and new tokens are {length}, the model's limit is {config.max_seq_len}")
    _check_batch(config, max(batches), length, cache, tp)


def _cache_tokens(batch: int, length: int) -> int:
    """Sequences of `length` tokens each, and a page more for each."""
    return batch * (length + PAGED_PAGE_SIZE)


def _check_batch(config: ExLlamaV2Config, batch: int, length: int, cache: KVKind, tp: bool) -> None:
    """Refuse more sequences than one step or this machine's memory holds, before anything is loaded."""
    most = config.max_batch_size * config.max_input_len // MAX_Q_SIZE
    if batch > most:
        raise CapacityError(f"--batch {batch}: a step of this model has at most {most} sequences")
    tokens = _cache_tokens(batch, length)
    found = (plan_tp if tp else plan)(config, cache=cache, cache_tokens=tokens)
    if not found.fits:
        raise CapacityError(f"--batch {batch} needs a cache of {tokens} tokens: {found.verdict()}")


def measure(loaded: Loaded, prompt_tokens: int, new_tokens: int, batch: int, cache: str) -> dict[str, Any]:
    """Tokens per second over prompts that share nothing; everything is run once before, so that nothing is built on
    the clock."""
    generator = loaded.generator(cache, _cache_tokens(batch, prompt_tokens + new_tokens), max_batch_size=batch)
    for attempt in range(2):
        generator.reset_page_table()
        ids = torch.arange(batch * prompt_tokens).reshape(batch, prompt_tokens)
        ids = (ids * 7919 + attempt) % loaded.config.vocab_size
        new = new_tokens if attempt else 2
        jobs = [ExLlamaV2DynamicJob(row[None], new, gen_settings=Settings.greedy()) for row in ids]
        generator.enqueue(jobs)
        start = time.perf_counter()
        while not all(job.prefilled and job.new_tokens for job in jobs):
            generator.iterate()
        first = time.perf_counter()
        done = sum(job.new_tokens for job in jobs)
        while generator.num_remaining_jobs():
            generator.iterate()
        end = time.perf_counter()
    return {
        "model": str(loaded.config.model_dir),
        "batch": batch,
        "cache": cache,
        "threads": threads.num_threads(),
        "isa": threads.isa(),
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "prefill_tps": batch * prompt_tokens / (first - start),
        "decode_tps": (batch * new_tokens - done) / (end - first),
    }
