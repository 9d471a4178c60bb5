"""Measure drafts from text without a model: cost by length of the history, and guesses that hold on recorded edits.

    python benchmarks/bench_ngram.py [--files 40] [--most 4 7] [--max-ngram 4 17 33] [--price 0.05] [--only cost|trace]

Each line is JSON. "suffix" is `exl_kernels.drafting`, "trie" is `NGramTrie`, which counts contexts in a dictionary.

- "cost": nanoseconds to append a token and to look up four guesses after 10, 1,000 and 100,000 tokens of code, or of a
  text that never repeats itself ("never"); fastest of several runs.
- "trace": a recorded answer replaces the model: a guess holds if it equals the recorded token. Files of
  this repository are the prompts. The answers are the same files with edits: an identifier gets another name, lines are
  removed, and lines of other files are added ("rewrite"), or the unified diff of the same edits ("diff"). The edits are
  drawn with a fixed seed. Tokens are pieces of words of at most six letters, spaces and single signs, about as long as
  those of a tokenizer trained on code. "tokens_per_step" counts the model's own token. `--price` is the cost of a row
  of a step, relative to the step: guesses that are worth less are left out ("suffix" only), and "speed" is the speed
  relative to no drafting under this price.
"""

from __future__ import annotations

import argparse
import difflib
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from exl_generate.dynamic.speculation import NGramTrie
from exl_kernels.drafting import DraftHistory, DraftRates, DraftText

ROOT = Path(__file__).resolve().parent.parent
#: The dictionary keeps every context as a tuple: longer ones take it minutes.
LONGEST_TRIE = 8
PIECE = re.compile(r" ?[A-Za-z]{1,6}| +|\n+|\d|[^\w\s]|_|\S")
Ids = np.ndarray[Any, np.dtype[np.int64]]
Guess = Callable[[Ids, int], tuple[list[int], list[float]]]


class Words:
    """Give each piece of text a number."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self.known.setdefault(piece, len(self.known)) for piece in PIECE.findall(text)]


def sources(count: int) -> list[str]:
    """Python files of the packages, in a fixed order, of 60 to 400 lines."""
    files = [path.read_text() for path in sorted(ROOT.glob("packages/*/src/**/*.py"))]
    fitting = [text for text in files if 60 <= text.count("\n") <= 400]
    return random.Random(1).sample(fitting, min(count, len(fitting)))


def edited(text: str, others: list[str], rng: random.Random) -> str:
    """Return the file with one identifier renamed, four blocks removed and four blocks of other files added."""
    names = [name for name in re.findall(r"\b[a-z_]{5,}\b", text) if text.count(name) > 3]
    if names:
        text = re.sub(rf"\b{rng.choice(names)}\b", f"{rng.choice(['new', 'old', 'known'])}_{rng.choice(names)}", text)
    lines = text.split("\n")
    for _ in range(4):
        at = rng.randrange(len(lines))
        del lines[at : at + rng.randint(1, 5)]
        other = rng.choice(others).split("\n")
        start = rng.randrange(len(other))
        lines[at:at] = other[start : start + rng.randint(1, 5)]
    return "\n".join(lines)


def traces(count: int, words: Words) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Return (prompt, answer) of each request, by kind."""
    rng, files = random.Random(2), sources(count)
    made: dict[str, list[tuple[list[int], list[int]]]] = {"rewrite": [], "diff": []}
    for text in files:
        new = edited(text, files, rng)
        diff = "\n".join(difflib.unified_diff(text.split("\n"), new.split("\n"), "a", "b", lineterm=""))
        prompt = words.encode(text + "\n\nRewrite the file.\n\n")
        made["rewrite"].append((prompt, words.encode(new)))
        made["diff"].append((prompt, words.encode(diff)))
    return made


# ---- drafters ------------------------------------------------------------------------------------------------------


def trie(max_ngram: int) -> Guess:
    """The dictionary of contexts."""
    known = NGramTrie(max_ngram)

    def guess(ids: Ids, most: int) -> tuple[list[int], list[float]]:
        known.update(ids)
        context = ids[-max_ngram:].tolist()
        found: list[int] = []
        while len(found) < most and (token := known.predict(context)) is not None:
            found.append(token)
            context.append(token)
        return found, [1.0] * len(found)

    return guess


def suffix(max_ngram: int, rates: DraftRates, shared: DraftHistory | None = None) -> Guess:
    """The native drafter."""
    text = DraftText(max_ngram, 1 << 20)

    def guess(ids: Ids, most: int) -> tuple[list[int], list[float]]:
        text.follow(ids, rates)
        return text.guess(most, rates, shared)

    return guess


# ---- measurements --------------------------------------------------------------------------------------------------


def replay(guess: Guess, prompt: list[int], answer: list[int], most: int, price: float) -> tuple[int, int, int]:
    """Return steps, guesses and guesses that held. A guess is made if its row is worth its price."""
    ids = np.array([*prompt, *answer], dtype=np.int64)
    at, steps, drafted, held = len(prompt), 0, 0, 0
    pace = 1.0
    while at < len(ids):
        tokens, chances = guess(ids[:at], min(most, len(ids) - at - 1))
        found = [token for token, chance in zip(tokens, chances, strict=True) if chance >= price * pace]
        right = next((i for i, token in enumerate(found) if token != ids[at + i]), len(found))
        at += right + 1
        steps, drafted, held = steps + 1, drafted + len(found), held + right
        # as the generator knows it: tokens for the time of a step without guesses
        pace += 0.02 * ((right + 1) / (1 + price * len(found)) - pace)
    return steps, drafted, held


def trace_lines(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    words = Words()
    for kind, requests in traces(args.files, words).items():
        tokens = sum(len(answer) for _, answer in requests)
        for max_ngram in args.max_ngram:
            for most in args.most:
                for drafter in ("trie", "suffix", "suffix shared"):
                    if drafter == "trie" and max_ngram > LONGEST_TRIE:
                        continue
                    rates, shared = DraftRates(), DraftHistory(max_ngram, 1 << 18)
                    steps = drafted = held = 0
                    for prompt, answer in requests:
                        guess = trie(max_ngram)
                        if drafter != "trie":
                            guess = suffix(max_ngram, rates, shared if "shared" in drafter else None)
                        found = replay(guess, prompt, answer, most, args.price)
                        steps, drafted, held = steps + found[0], drafted + found[1], held + found[2]
                        shared.append(np.array(answer, dtype=np.int64))
                        shared.cut()
                    yield {
                        **{"case": "trace", "trace": kind, "drafter": drafter, "max_ngram": max_ngram, "most": most},
                        **{"tokens": tokens, "tokens_per_step": round(tokens / steps, 3)},
                        **{"drafted": drafted, "held": held, "acceptance": round(held / max(1, drafted), 3)},
                        "speed": round(tokens / (steps + args.price * drafted), 3),
                    }


def fastest(run: Callable[[], object], times: int) -> float:
    """Seconds of the fastest run."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def cost_lines(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    words = Words()
    code: list[int] = []
    for text in sources(1000):
        code += words.encode(text)
    while len(code) < 110_000:
        code += code
    rng = np.random.default_rng(1)
    never = rng.permutation(1 << 20)
    for kind, ids in (("code", np.array(code, dtype=np.int64)), ("never", never)):
        for max_ngram in args.max_ngram:
            for length in (10, 1_000, 100_000):
                for drafter in ("trie", "suffix") if max_ngram <= LONGEST_TRIE else ("suffix",):
                    yield {"case": "cost", "text": kind, **cost(drafter, max_ngram, ids, length)}


def cost(drafter: str, max_ngram: int, text: Ids, length: int) -> dict[str, Any]:
    """Cost of the next tokens after `length` tokens: appended in batches, and looked up after each token."""
    appended, looked_up, memory = [], [], 0
    for _ in range(5):
        rates, native, known = DraftRates(), DraftText(max_ngram, 1 << 20), NGramTrie(max_ngram)
        more = min(1000, 100 * length)

        def append(end: int) -> None:
            if drafter == "trie":
                known.update(text[:end])  # noqa: B023
            else:
                native.follow(text[:end], rates)  # noqa: B023

        def look_up(at: int) -> None:
            if drafter == "trie":
                context = text[at - max_ngram : at].tolist()
                for _ in range(4):
                    if (token := known.predict(context)) is None:  # noqa: B023
                        break
                    context.append(token)
            else:
                native.guess(4, rates)  # noqa: B023

        append(length)
        start = time.perf_counter()
        append(length + more)
        appended.append((time.perf_counter() - start) / more)

        def look_up_often() -> None:
            for _ in range(200):
                look_up(length + more)  # noqa: B023

        looked_up.append(fastest(look_up_often, 3) / 200)
        memory = native.memory
    line: dict[str, Any] = {"drafter": drafter, "max_ngram": max_ngram, "history": length}
    line |= {"append_ns": round(min(appended) * 1e9), "lookup_ns": round(min(looked_up) * 1e9)}
    if drafter == "suffix":
        line["bytes_per_token"] = round(memory / (length + more))
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=40)
    parser.add_argument("--most", type=int, nargs="+", default=[4, 7])
    parser.add_argument("--max-ngram", type=int, nargs="+", default=[4, 17, 33])
    parser.add_argument("--price", type=float, default=0.05)
    parser.add_argument("--only", choices=["cost", "trace"])
    args = parser.parse_args()
    for name, lines in (("cost", cost_lines), ("trace", trace_lines)):
        if args.only in (None, name):
            for line in lines(args):
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
