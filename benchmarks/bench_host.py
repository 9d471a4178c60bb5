"""Host cost of the dynamic generator with a model that costs nothing. JSON lines, each after a check of its results.

python benchmarks/bench_host.py [--active 64] [--queued 0 10000] [--cached-pages 1000 100000] [--vocab 32000]

Bars: 30 us a job and step at 64 active jobs, flat with 10,000 queued jobs and 100,000 cached pages; text and stop rules
10 us a token; a prompt of 8k tokens that is cached starts within 2 steps.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from exl_core.contracts import ForwardResult
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.dynamic.columns import columns_of
from exl_generate.dynamic.detokenize import PieceTable
from exl_generate.dynamic.events import Events
from exl_generate.dynamic.output import Record, TextStream
from exl_generate.dynamic.results import dicts_of
from exl_generate.dynamic.stopping import Automaton
from exl_generate.sampling import RequestSampler, Settings, Vocabulary
from exl_generate.testing import ModelBase, ScriptedCache, ScriptedConfig, ScriptedTokenizer


class FreeModel(ModelBase):
    """Returns the same logits every time, without looking at anything."""

    def __init__(self, vocab: int, max_seq_len: int = 8192) -> None:
        self.config = ScriptedConfig(vocab_size=vocab, max_seq_len=max_seq_len, max_input_len=2048)
        width = -(-vocab // 32) * 32
        self.logits = torch.randn(1, 1, width, generator=torch.Generator().manual_seed(0))
        self.logits[..., :3] = self.logits[..., vocab:] = -100.0  # no special token, no padding
        self.best = int(self.logits.argmax())
        self.computed = 0

    def forward_chunk(self, input_ids: torch.Tensor, cache: Any = None, **kw: Any) -> ForwardResult:
        self.computed += input_ids.numel()
        rows = (1, kw["attn_params"].batch_size) if kw.get("last_id_only") else input_ids.shape
        return {"logits": self.logits.expand(*rows, -1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--active", type=int, nargs="*", default=[64])
    parser.add_argument("--queued", type=int, nargs="*", default=[0, 10_000])
    parser.add_argument("--cached-pages", type=int, nargs="*", default=[1_000, 100_000])
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    tokenizer = ScriptedTokenizer([f"w{i} " for i in range(args.vocab - 3)])
    for active in args.active:
        for pages in args.cached_pages:
            for queued in args.queued:
                say(step_cost(active, queued, pages, args.vocab, args.steps, tokenizer))
        say(writing_cost(active, args.vocab, args.steps, tokenizer))
    say(text_cost(tokenizer))
    say(prefix_start(args.vocab, tokenizer))
    for name, settings in (("greedy", Settings.greedy()), ("default", Settings())):
        say(sampling_cost(name, settings, 128_256))


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


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
    ids = torch.randint(3, vocab, (active + queued, 200), generator=torch.Generator().manual_seed(1))
    jobs = [
        ExLlamaV2DynamicJob(row[None], steps + 50, gen_settings=settings, stop_conditions=["\n\n", 2]) for row in ids
    ]
    start = time.perf_counter()
    generator.enqueue(jobs)
    enqueue = time.perf_counter() - start
    while not all(job.new_tokens > 3 for job in jobs[:active]):
        generator.iterate()
    rounds = []
    for _ in range(steps):
        start = time.perf_counter()
        results = generator.iterate()
        rounds.append((time.perf_counter() - start) / active)
        assert len(results) == active
    for job in jobs[:active]:
        assert set(job.sequence.ids[200:].tolist()) == {model.best}, "a job took another token than the model's"
    return {
        "bench": "host cost per job and step",
        "active": active,
        "queued": queued,
        "cached_pages": pages,
        "vocab": vocab,
        "us": round(sum(rounds) / steps * 1e6, 1),
        "us_median": round(sorted(rounds)[steps // 2] * 1e6, 1),
        "enqueue_us": round(enqueue / len(jobs) * 1e6, 1),
    }


def writing_cost(active: int, vocab: int, steps: int, tokenizer: ScriptedTokenizer) -> dict[str, Any]:
    """Measure the cost per token of writing an iteration's results, as dicts and as columns."""
    model = FreeModel(vocab)
    cache = ScriptedCache(model, max_seq_len=active * 1024)  # type: ignore[arg-type]
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer, max_batch_size=active)
    ids = torch.randint(3, vocab, (active, 200), generator=torch.Generator().manual_seed(1))
    greedy = ExLlamaV2Sampler.Settings.greedy()
    generator.enqueue([ExLlamaV2DynamicJob(row[None], steps + 50, gen_settings=greedy) for row in ids])
    while generator.snapshot().decoding_rows < active:
        generator.iterate()
    took: dict[str, list[float]] = {"dicts": [], "columns": [], "round": []}

    def timed(events: Events) -> list[dict[str, Any]]:
        for name, write in (("dicts", dicts_of), ("columns", columns_of)) * 2:
            start = time.perf_counter()
            written = write(events)
            took[name].append(time.perf_counter() - start)
            assert len(written) == active
        return []

    for _ in range(steps):
        start, before = time.perf_counter(), sum(map(sum, took.values()))
        generator._run_step(timed)
        took["round"].append(time.perf_counter() - start - sum(map(sum, took.values())) + before)
    middle = {name: sorted(times)[len(times) // 2] / active * 1e6 for name, times in took.items()}
    return {"bench": "writing results, us per token", "active": active} | {k: round(v, 2) for k, v in middle.items()}


def text_cost(tokenizer: ScriptedTokenizer) -> dict[str, Any]:
    """Detokenizer, stop strings and banned strings, per token of ordinary text; some begin like the tokens do."""
    pieces = PieceTable.of(tokenizer, False)
    ids = torch.randint(3, tokenizer.get_vocab_size(), (20_000,), generator=torch.Generator().manual_seed(2)).tolist()
    stops, bans = ["\n\nuser:", "w999999", "</end>"], ["w777777", "never"]
    begin = time.perf_counter()
    stream = TextStream(pieces, Automaton(stops), Automaton(bans, fold=True))
    text = ""
    for token in ids:
        assert stream.push(Record(token)) is None
        text += stream.release().text
    text += stream.flush().text
    us = (time.perf_counter() - begin) / len(ids) * 1e6
    assert text == "".join(pieces[token].decode() for token in ids)
    return {"bench": "text and stop rules per token", "us": round(us, 2)}


def prefix_start(vocab: int, tokenizer: ScriptedTokenizer) -> dict[str, Any]:
    """Steps until the first token of a prompt of 8,000 tokens that was computed before."""
    model = FreeModel(vocab, 16384)
    generator = ExLlamaV2DynamicGenerator(model, ScriptedCache(model, max_seq_len=65536), tokenizer)  # type: ignore[arg-type]
    ids = torch.randint(3, vocab, (1, 8000), generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        job = ExLlamaV2DynamicJob(ids, 4, gen_settings=ExLlamaV2Sampler.Settings.greedy())
        generator.enqueue(job)
        model.computed = 0
        steps, start = 0, time.perf_counter()
        while job.new_tokens < 1:
            generator.iterate()
            steps += 1
        seconds, computed = time.perf_counter() - start, model.computed
        while generator.num_remaining_jobs():
            generator.iterate()
    assert computed == 1, f"{computed} tokens were computed again"
    return {"bench": "cached prompt of 8000 tokens", "steps": steps, "ms": round(seconds * 1e3, 2)}


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
    tokens = [sampler.sample(logits, context, i).token for i in range(200)]
    us = (time.perf_counter() - start) / 200 * 1e6
    assert name != "greedy" or set(tokens) == {int(logits.argmax())}
    return {"bench": "sampling", "settings": name, "vocab": vocab, "us": round(us, 1)}


if __name__ == "__main__":
    main()
