"""Measure what speculation costs and gains: one JSON line for each way of drafting, all on one machine.

    python benchmarks/bench_draft.py [--model FOLDER --draft FOLDER] [--new 400] [--rounds 7] [--sample]

Each round runs every way once: "none" (no drafting), "draft" (a draft model), "ngram", and both of them with as many
guesses as allowed in every step ("draft-most", "ngram-most"). A line has the tokens a second of the fastest round, the
median over the rounds of the speed relative to "none" in the same round, and guesses that held and did not. All ways
must give the same tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.bundled import default_model_dir, draft_model_dir
from exl_generate.testing import AsAsked

PROMPTS = ("Once upon a time there was a fox. ", "One rainy day,", "The old bear said:")


def load(folder: Path, length: int) -> ExLlamaV2:
    config = ExLlamaV2Config(str(folder))
    config.max_seq_len = min(config.max_seq_len, length)
    model = ExLlamaV2(config)
    model.load()
    return model


def generators(args: argparse.Namespace) -> dict[str, ExLlamaV2DynamicGenerator]:
    model, draft = load(args.model, args.length), load(args.draft, args.length)
    tokenizer = ExLlamaV2Tokenizer(model.config)
    length = model.config.max_seq_len
    made = {}
    for way in ("none", "draft", "ngram", "draft-most", "ngram-most"):
        kw: dict[str, Any] = {"use_ngram_draft": True} if way.startswith("ngram") else {}
        if way.startswith("draft"):
            kw = {"draft_model": draft, "draft_cache": ExLlamaV2Cache(draft, max_seq_len=length)}
        made[way] = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=length), tokenizer, **kw)
        if way.endswith("-most"):
            made[way].drafter.length = AsAsked(made[way].num_draft_tokens)
    return made


def run(generator: ExLlamaV2DynamicGenerator, args: argparse.Namespace) -> tuple[float, list[list[int]], int, int]:
    """Tokens a second of all prompts one after the other, their tokens, guesses that held and did not."""
    settings = ExLlamaV2Sampler.Settings() if args.sample else ExLlamaV2Sampler.Settings.greedy()
    tokens, seconds, held, lost = [], 0.0, 0, 0
    for prompt in PROMPTS:
        ids = generator.tokenizer.encode(prompt, add_bos=True)
        job = ExLlamaV2DynamicJob(ids, args.new, gen_settings=settings, seed=1)
        generator.enqueue(job)
        start = time.perf_counter()
        while generator.num_remaining_jobs():
            generator.iterate()
        seconds += time.perf_counter() - start
        tokens.append(job.sequence.ids[ids.shape[1] :].tolist())
        held, lost = held + job.accepted_draft_tokens, lost + job.rejected_draft_tokens
    return sum(map(len, tokens)) / seconds, tokens, held, lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=default_model_dir())
    parser.add_argument("--draft", type=Path, default=draft_model_dir())
    parser.add_argument("--new", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--sample", action="store_true", help="default settings instead of greedy ones")
    args = parser.parse_args()
    made = generators(args)
    rounds = []
    for _ in range(args.rounds + 1):
        rounds.append({way: run(generator, args) for way, generator in made.items()})
        assert all(found[1] == rounds[-1]["none"][1] for found in rounds[-1].values()), "tokens differ"
    for way in made:
        line = {
            "case": way,
            "tokens_per_s": round(max(found[way][0] for found in rounds[1:])),
            "speed": round(statistics.median(found[way][0] / found["none"][0] for found in rounds[1:]), 3),
            "held": rounds[-1][way][2],
            "lost": rounds[-1][way][3],
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
