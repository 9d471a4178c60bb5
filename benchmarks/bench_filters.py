"""Measure what filters cost: tables, masks, combination, application; llguidance and xgrammar in the same run.

    uv run python benchmarks/bench_filters.py [--size 128000] [--rounds 10]

The vocabulary is a byte-level BPE trained on this machine's Python text. Prints JSON lines: wall clock per call in
microseconds and one thread, unless named otherwise, with the bar where there is one. Every piece is checked first; a
wrong one stops the run before any speed is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import tokenizers
from filters_vocabulary import trained_tokenizer

from exl_filters import ExLlamaV2PrefixFilter, ExLlamaV2SelectFilter, FilterStack, Vocabulary, bits, vocabulary_of

if TYPE_CHECKING:
    from exl_filters.llg import Matcher

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


def times(call: Callable[[], object], repeat: int = 200) -> list[float]:
    """Microseconds of each of `repeat` calls."""
    taken = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        taken.append((time.perf_counter() - start) * 1e6)
    return taken


def report(name: str, taken: list[float], *, bar: float | None = None, of: str = "mean", **more: Any) -> None:
    """One JSON line; `bar`: the most that the figure named by `of` may be."""
    ordered = sorted(taken)
    figures = {
        "mean": statistics.fmean(ordered),
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        "max": ordered[-1],
    }
    line = {"bench": name, **{k: round(v, 1) for k, v in figures.items()}, "n": len(taken), **more}
    if bar is not None:
        line |= {"bar": f"{of} <= {bar:g}", "met": figures[of] <= bar}
    print(json.dumps(line), flush=True)


@contextlib.contextmanager
def clocked(into: list[float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    into.append((time.perf_counter() - start) * 1e6)


def simple(vocabulary: Vocabulary) -> None:
    """Prefix, Select, and what is done with masks."""
    size = vocabulary.size
    prefix = ExLlamaV2PrefixFilter(None, vocabulary, ["{", "["])
    select = ExLlamaV2SelectFilter(None, vocabulary, ["yes, of course", "no", "maybe later"])
    check(all(vocabulary.bytes_of(i)[:1] in (b"{", b"[") for i in prefix.next()[0] or ()), "prefix")
    options = (b"yes, of course", b"no", b"maybe later")
    begins = [i for i in range(size) if (raw := vocabulary.bytes_of(i)) and any(o.startswith(raw) for o in options)]
    check(select.next()[0] == begins, "select")
    for name, f in (("prefix", prefix), ("select", select)):
        words = bits.empty(size)

        def afresh(f: Any = f) -> None:
            f._table._choices.clear()
            f.next()

        report(f"{name} next()", times(f.next), bar=50, tokens=size)
        report(f"{name} next(), first time in a state", times(afresh, 50), bar=100)
        report(f"{name} fill_bitmask()", times(partial(f.fill_bitmask, words)))
    rng = np.random.default_rng(0)
    open_, narrow = rng.random(size) < 0.7, rng.random(size) < 0.01
    one, two = (bits.from_ids(np.flatnonzero(flags), size) for flags in (open_, narrow))
    target = one.copy()
    bits.and_into(two, target)
    check(bits.to_ids(target) == np.flatnonzero(open_ & narrow).tolist(), "intersection")
    report("intersection of two masks", times(lambda: bits.and_into(two, target)), bar=10)
    logits = rng.standard_normal(size).astype(np.float32)
    for name, words, flags in (("70 %", one, open_), ("1 %", two, narrow)):
        masked = bits.apply(words, logits.copy())
        check(bool((masked == np.where(flags, logits, -np.inf)).all()), "apply")
        report(f"apply a mask of {name} to logits", times(partial(bits.apply, words, logits)), bar=100)


def grammar(vocabulary: Vocabulary, path: list[int], rounds: int) -> None:
    """The schema, step by step: ours, llguidance and xgrammar take turns at every token."""
    from exl_filters.grammar import ExLlamaV2GrammarFilter
    from exl_filters.llg import tokenizer_for

    taken: list[float] = []
    with clocked(taken):
        tokenizer_for(vocabulary)
    report("tables of a tokenizer for grammars, ms", [t / 1e3 for t in taken], bar=1500, of="max")
    template = ExLlamaV2GrammarFilter(None, vocabulary, json_schema=SCHEMA)
    report("schema compile", times(lambda: ExLlamaV2GrammarFilter(None, vocabulary, json_schema=SCHEMA), 20), bar=5000)
    theirs = xgrammar_matchers(vocabulary)
    names = ["ours", "ours feed", "llguidance", "llguidance feed", "xgrammar", "xgrammar feed"]
    taken_by: dict[str, list[float]] = {name: [] for name in names}
    raw_words = bits.empty(vocabulary.size)
    pointer, octets = raw_words.ctypes.data, raw_words.nbytes
    for round_ in range(rounds + 1):
        stack = FilterStack([template], vocab_size=vocabulary.size, stop_ids=vocabulary.stop_ids)
        stack.begin("")
        raw = cast("Matcher", template._template.start()).raw
        other = theirs() if theirs else None
        step: dict[str, list[float]] = {name: [] for name in names}
        for index, token in enumerate(path):
            # In turns: the second finds llguidance's tables in the processor's cache.
            for ours in (True, False) if (index + round_) % 2 else (False, True):
                start = time.perf_counter()
                if ours:
                    mask = stack.next_mask()
                else:
                    raw.unsafe_compute_mask_ptr(pointer, octets)
                step["ours" if ours else "llguidance"].append((time.perf_counter() - start) * 1e6)
            check(mask is not None and bits.test(mask, token), "the document is not of the schema")
            check(mask is not None and (mask == raw_words).all(), "our mask is not llguidance's")
            with clocked(step["ours feed"]):
                ended = stack.feed(token)
            with clocked(step["llguidance feed"]):
                raw.consume_token(token)
            if other is not None:
                with clocked(step["xgrammar"]):
                    other.mask()
                with clocked(step["xgrammar feed"]):
                    check(other.accept(token), "xgrammar refuses the document")
        check(ended, "the document does not end the constraint")
        if round_:  # the first pass warms the lexers
            for name in names:
                taken_by[name] += step[name]
    for name in names:
        if taken_by[name]:
            bar = 60 if name == "ours" else None
            report(f"{name.replace(' feed', '')}: {'feed' if 'feed' in name else 'mask'}", taken_by[name], bar=bar)
    report("ours: mask, 99 of 100", taken_by["ours"], bar=250, of="p99")
    ratio = statistics.fmean(taken_by["ours"]) / statistics.fmean(taken_by["llguidance"])
    print(json.dumps({"bench": "our mask / llguidance's", "ratio": round(ratio, 3), "bar": "1.2", "met": ratio <= 1.2}))
    own = [a + b - c - d for a, b, c, d in zip(*(taken_by[n] for n in names[:2] + names[2:4]), strict=True)]
    report("Python around llguidance, mask and feed of a step", own, bar=25)
    concurrent(template, vocabulary, path)


def concurrent(template: Any, vocabulary: Vocabulary, path: list[int], count: int = 64) -> None:
    """A step of many jobs: on the caller's thread, and on two threads."""

    def begun() -> list[FilterStack]:
        stops = vocabulary.stop_ids
        stacks = [FilterStack([template], vocab_size=vocabulary.size, stop_ids=stops) for _ in range(count)]
        for stack in stacks:
            stack.begin("")
        return stacks

    def advance(stacks: list[FilterStack], token: int) -> None:
        for stack in stacks:
            stack.next_mask()
            stack.feed(token)

    taken: list[float] = []
    stacks = begun()
    for token in path:
        with clocked(taken):
            advance(stacks, token)
    report(f"one step of {count} filters", taken, bar=count * 80)
    stacks, taken = begun(), []
    with ThreadPoolExecutor(2) as pool:
        for token in path:
            with clocked(taken):
                list(pool.map(lambda part, token=token: advance(part, token), (stacks[::2], stacks[1::2])))
    report(f"one step of {count} filters, two threads", taken, bar=count * 80)


def xgrammar_matchers(vocabulary: Vocabulary) -> Callable[[], Any] | None:
    """A maker of xgrammar matchers for the schema, after timing its tables; None where it is not installed."""
    try:
        import xgrammar
    except ImportError as error:
        print(json.dumps({"bench": "xgrammar", "left out": str(error)}))
        return None
    taken: list[float] = []
    with clocked(taken):
        tokens = [vocabulary.bytes_of(i) for i in range(vocabulary.size)]
        info = xgrammar.TokenizerInfo(tokens, vocab_size=vocabulary.size, stop_token_ids=sorted(vocabulary.stop_ids))
    report("xgrammar: tables, ms", [t / 1e3 for t in taken])

    def compiled() -> Any:
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        return compiler.compile_json_schema(json.dumps(SCHEMA))

    report("xgrammar: schema compile, one thread", times(compiled, 3))
    grammar, words = compiled(), np.zeros((1, bits.word_count(vocabulary.size)), dtype=np.int32)

    class Matcher:
        def __init__(self) -> None:
            self.raw = xgrammar.GrammarMatcher(grammar)

        def mask(self) -> None:
            self.raw.fill_next_token_bitmask(words)

        def accept(self, token: int) -> bool:
            return bool(self.raw.accept_token(token))

    return Matcher


def check(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"bench_filters: wrong: {what}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What filters cost.")
    parser.add_argument("--size", type=int, default=128_000)
    parser.add_argument("--rounds", type=int, default=10, help="times the document is walked")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json with </s>, in place of a trained one")
    args = parser.parse_args()
    tokenizer = tokenizers.Tokenizer.from_file(args.tokenizer) if args.tokenizer else trained_tokenizer(args.size)
    path = tokenizer.encode(DOCUMENT, add_special_tokens=False).ids
    taken: list[float] = []
    with clocked(taken):
        vocabulary = named_eos(tokenizer)
        _ = vocabulary.trie
    check(vocabulary.decode(path) == DOCUMENT, "the vocabulary does not spell the document")
    report(
        "tables of a tokenizer, ms",
        [t / 1e3 for t in taken],
        bar=1500,
        of="max",
        tokens=vocabulary.size,
        python=sys.version.split()[0],
        document=len(path),
    )
    simple(vocabulary)
    grammar(vocabulary, path, args.rounds)


def named_eos(tokenizer: Any) -> Vocabulary:
    """The vocabulary of a bare tokenizer, which does not say which token ends a text."""

    class Named:
        backend_tokenizer = tokenizer
        eos_token_id = tokenizer.token_to_id("</s>")

    return vocabulary_of(Named())


if __name__ == "__main__":
    main()
