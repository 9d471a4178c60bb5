"""What filters cost: tables, masks, combination, application. Prints JSON lines.

    python benchmarks/bench_filters.py [--size 128000] [--steps 10]

The vocabulary is made of the words of Python's own library and their beginnings. llguidance is timed alone in the same
run. Times are wall clock per call, one thread, microseconds unless named otherwise.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from exl_filters import ExLlamaV2PrefixFilter, ExLlamaV2SelectFilter, FilterStack, Vocabulary, bits

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "email": {"type": "string"},
        "kind": {"enum": ["person", "robot", "cat"]},
        "scores": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "kind", "scores", "address"],
    "additionalProperties": False,
}
DOCUMENT = json.dumps(
    {
        "name": "Anna \u2013 Maria",
        "age": 42,
        "email": "anna@example.org",
        "kind": "person",
        "scores": [1.5, 2, 3.25],
        "address": {"street": "Long Road 1, second floor", "city": "Old Town"},
    },
    ensure_ascii=False,
)


def make_vocabulary(size: int) -> Vocabulary:
    """`size` tokens: all bytes, then words of the standard library with and without a space, and their beginnings."""
    found: dict[bytes, None] = {bytes([i]): None for i in range(256)}
    for path in sorted(Path(json.__file__).parents[1].rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        for word in re.findall(r" ?\w+|\s+|[^\w\s]+", text):
            raw = word.encode()[:16]
            for end in (len(raw), len(raw) - 1, len(raw) - 3):
                if end > 0:
                    found[raw[:end]] = None
        if len(found) >= size - 2:
            break
    tokens: list[bytes | None] = [*list(found)[: size - 2]]
    tokens += [None] * (size - len(tokens))
    return Vocabulary(tokens, eos_token_id=size - 1, special_ids=[size - 1, size - 2])


def times(call: Callable[[], object], repeat: int = 200) -> list[float]:
    """Microseconds of each of `repeat` calls."""
    taken = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        taken.append((time.perf_counter() - start) * 1e6)
    return taken


def report(name: str, taken: list[float], **more: Any) -> None:
    ordered = sorted(taken)
    figures = {
        "mean": statistics.fmean(ordered),
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
    }
    print(
        json.dumps({"bench": name, **{k: round(v, 1) for k, v in figures.items()}, "n": len(taken), **more}), flush=True
    )


def grammar(vocabulary: Vocabulary, steps: int) -> None:
    from exl_filters.grammar import ExLlamaV2GrammarFilter
    from exl_filters.llg import tokenizer_for

    start = time.perf_counter()
    tokenizer_for(vocabulary)
    report("llguidance tokenizer, ms", [(time.perf_counter() - start) * 1e3])
    report("schema compile", times(lambda: ExLlamaV2GrammarFilter(None, vocabulary, json_schema=SCHEMA), 10))
    template = ExLlamaV2GrammarFilter(None, vocabulary, json_schema=SCHEMA)
    path = [int(i) for i in vocabulary.encode(DOCUMENT)[0]]
    ours, raw, feeds, raw_feeds = [], [], [], []
    for round_ in range(steps + 1):
        stack = FilterStack([template], vocab_size=vocabulary.size, stop_ids=vocabulary.stop_ids)
        stack.begin("")
        matcher = template._template.start()
        for token in path:
            start = time.perf_counter()
            stack.next_mask()
            middle = time.perf_counter()
            stack.feed(token)
            fed = time.perf_counter()
            matcher.raw.unsafe_compute_mask_ptr(matcher._pointer, matcher._words.nbytes)
            masked = time.perf_counter()
            matcher.raw.consume_token(token)
            end = time.perf_counter()
            if round_:  # the first pass warms llguidance's lexer
                ours.append((middle - start) * 1e6)
                feeds.append((fed - middle) * 1e6)
                raw.append((masked - fed) * 1e6)
                raw_feeds.append((end - masked) * 1e6)
        assert stack.ended, "the document is not of the schema"
    report("mask, FilterStack", ours, tokens=len(path))
    report("mask, llguidance alone", raw)
    report("feed, FilterStack", feeds)
    report("feed, llguidance alone", raw_feeds)
    stacks = [FilterStack([template], vocab_size=vocabulary.size, stop_ids=vocabulary.stop_ids) for _ in range(64)]
    for stack in stacks:
        stack.begin("")
    taken = []
    for token in path:
        start = time.perf_counter()
        for stack in stacks:
            stack.next_mask()
            stack.feed(token)
        taken.append((time.perf_counter() - start) * 1e6)
    report("one step of 64 filters", taken)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=128_000)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    vocabulary = make_vocabulary(args.size)
    start = time.perf_counter()
    _ = vocabulary.trie
    report("trie, ms", [(time.perf_counter() - start) * 1e3], tokens=vocabulary.size, python=sys.version.split()[0])
    prefix = ExLlamaV2PrefixFilter(None, vocabulary, ["{", "["])
    select = ExLlamaV2SelectFilter(None, vocabulary, ["yes, of course", "no", "maybe later"])
    for name, f in (("prefix", prefix), ("select", select)):
        report(f"{name} next()", times(f.next))
        words = bits.empty(vocabulary.size)
        report(f"{name} fill_bitmask()", times(lambda f=f, words=words: f.fill_bitmask(words)))
        report(
            f"{name} first fill_bitmask()",
            times(lambda f=f, words=words: (f._table._choices.clear(), f.fill_bitmask(words)), 50),
        )
    rng = np.random.default_rng(0)
    one = bits.from_ids(np.flatnonzero(rng.random(args.size) < 0.7), args.size)
    two = bits.from_ids(np.flatnonzero(rng.random(args.size) < 0.01), args.size)
    target = one.copy()
    report("and of two masks", times(lambda: bits.and_into(two, target)))
    logits = rng.standard_normal(args.size).astype(np.float32)
    report("apply a wide mask", times(lambda: bits.apply(one, logits)))
    report("apply a narrow mask", times(lambda: bits.apply(two, logits)))
    try:
        grammar(vocabulary, args.steps)
    except ImportError as error:
        print(json.dumps({"bench": "grammar", "skipped": str(error)}))


if __name__ == "__main__":
    main()
