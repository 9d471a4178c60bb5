"""Random generations under every kind of filter on the bundled model's tokenizer: none may leave its language.

    uv run python benchmarks/soak_filters.py [--generations 10000] [--seed 0]

Logits are random, so the text is whatever the filters let through. A generation ends complete, and is then judged by
something simpler than the filter, or it is cut at the token limit and counted as cut. Prints one JSON line a filter and
exits 1 at the first violation.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from exl_filters import (
    AllOf,
    AnyOf,
    BanFilter,
    ExLlamaV2GrammarFilter,
    ExLlamaV2PrefixFilter,
    ExLlamaV2SelectFilter,
    FilterStack,
    LengthFilter,
    SequenceFilter,
    TriggeredFilter,
    Vocabulary,
    apply_mask,
)
from exl_filters.readers import from_tokenizer_json

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "packages" / "exl-generate" / "src" / "exl_generate" / "bundled" / "fable-10m" / "tokenizer.json"
MOST_TOKENS = 200

OPTIONS = ["yes", "no", "no way", "😀 sure", "naïve"]
PATTERN = r"(yes|no), (I|we) (am|are)( not)?[.!]{1,3}"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", "é"]},
        "scores": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
        "inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
NESTED = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer", "maximum": 9, "minimum": 0}, "next": {"$ref": "#/$defs/node"}},
            "required": ["v"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
EBNF = 'root ::= item ("," item){0,3}\nitem ::= "(" [a-z]{1,4} ")"\n'
LARK = 'start: "<" NAME ">" /[^<>]{0,9}/ "</>"\nNAME: /[a-z]{1,5}/\n'

Judge = Callable[[str], bool]
Named = tuple[str, list[Any], Judge]


def valid(schema: Any) -> Judge:
    validator = jsonschema.validators.validator_for(schema)(schema)
    return lambda text: bool(validator.is_valid(json.loads(text)))


def matches(pattern: str) -> Judge:
    return lambda text: re.fullmatch(pattern, text, re.DOTALL) is not None


def subjects(v: Vocabulary) -> Iterator[Named]:
    """Name, filters and judge of every kind."""

    def select(*options: str) -> Any:
        return ExLlamaV2SelectFilter(None, v, list(options))

    def grammar(**source: Any) -> Any:
        return ExLlamaV2GrammarFilter(None, v, **source)

    schema = grammar(json_schema=SCHEMA)
    yield "schema", [schema], valid(SCHEMA)
    yield "schema, compact", [grammar(json_schema=SCHEMA, whitespace="compact", no_forcing=True)], valid(SCHEMA)
    yield (
        "open string",
        [grammar(json_schema={"type": "string", "pattern": "^a"})],
        valid({"type": "string", "pattern": "^a"}),
    )
    yield "recursive schema", [grammar(json_schema=NESTED)], valid(NESTED)
    yield "schema and prefix", [schema, ExLlamaV2PrefixFilter(None, v, ['{"', "["])], valid(SCHEMA)
    yield "pattern", [grammar(regex=PATTERN)], matches(PATTERN)
    yield "pattern, any spelling", [grammar(regex=PATTERN, no_forcing=True)], matches(PATTERN)
    yield "ebnf", [grammar(ebnf=EBNF)], matches(r"\([a-z]{1,4}\)(,\([a-z]{1,4}\)){0,3}")
    yield "lark", [grammar(lark=LARK)], matches(r"<[a-z]{1,5}>[^<>]{0,9}</>")
    yield "choice", [grammar(choice=OPTIONS)], OPTIONS.__contains__
    yield "select", [select(*OPTIONS)], OPTIONS.__contains__
    yield (
        "select, any case",
        [ExLlamaV2SelectFilter(None, v, OPTIONS, case_insensitive=True)],
        lambda text: text.casefold() in {o.casefold() for o in OPTIONS},
    )
    yield (
        "prefix",
        [ExLlamaV2PrefixFilter(None, v, ["Once", "é"]), LengthFilter(None, v, 0, 20)],
        lambda text: text.startswith(("Once", "é")),
    )
    yield (
        "all of",
        [AllOf([select("no", "no way", "nay"), grammar(regex="n.*y|no")])],
        {"no", "no way", "nay"}.__contains__,
    )
    yield "any of", [AnyOf([select("no"), grammar(regex="[0-9]{1,3}")])], matches("no|[0-9]{1,3}")
    yield (
        "sequence",
        [SequenceFilter([select("yes: ", "no: "), grammar(regex="[a-f]{2,5}")])],
        matches("(yes|no): [a-f]{2,5}"),
    )
    yield (
        "triggered",
        [TriggeredFilter(select("!", "?!"), on="e"), LengthFilter(None, v, 0, 60)],
        # The cue, the rest of its token, and one of the options; or the limit came first.
        lambda text: re.fullmatch(r"[^e]*(e\S*\s?(!|\?!)?)?", text, re.DOTALL) is not None,
    )
    yield "ban", [BanFilter(None, v, texts=["the", "e"]), LengthFilter(None, v, 0, 25)], lambda text: "e" not in text
    yield (
        "length",
        [LengthFilter(None, v, min_chars=5, max_chars=12)],
        lambda text: (
            5 <= len(text) <= 12 or "\ufffd" in text  # bytes that are no text are not counted in characters
        ),
    )


def generate(stack: FilterStack, v: Vocabulary, rng: np.random.Generator, stop_share: float) -> tuple[bytes, bool]:
    """One random text, and whether it is complete. Stop tokens are taken with a likelihood of their own."""
    text = b""
    stack.begin("")
    for _ in range(MOST_TOKENS):
        mask = stack.next_mask()
        logits = apply_mask(rng.standard_normal(v.size).astype(np.float32), mask)
        stops = [i for i in v.stop_ids if stack.allows(i)]
        token = stops[0] if stops and rng.random() < stop_share else int(logits.argmax())
        if not stack.allows(token):
            sys.exit(f"token {token} was chosen and is not allowed")
        ended = stack.feed(token)
        text += v.bytes_of(token)
        if ended or token in v.stop_ids:
            return text, True
    return text, False


def soak(
    name: str, filters: list[Any], judge: Judge, v: Vocabulary, count: int, rng: np.random.Generator
) -> dict[str, Any]:
    """`count` generations; the counts of what came of them. Raises `Violation`."""
    start, cut, tokens = time.perf_counter(), 0, 0
    with FilterStack(filters, vocab_size=v.size, stop_ids=v.stop_ids, special_ids=v.special_ids) as stack:
        for index in range(count):
            raw, complete = generate(stack, v, rng, stop_share=0.2)
            tokens += len(stack._tokens)
            if not complete:
                cut += 1
                continue
            text = raw.decode("utf-8", "replace")
            if not judge(text):
                raise Violation(f"{name}, generation {index}: {raw!r} is not of the language")
    seconds = round(time.perf_counter() - start, 2)
    return {"filter": name, "generations": count, "complete": count - cut, "cut": cut, "tokens": tokens, "s": seconds}


class Violation(Exception):  # noqa: N818 - said of a text
    """A text that is not of its filter's language."""


def run(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """All kinds, `count` generations in all."""
    v = from_tokenizer_json(str(TOKENIZER))
    rng = np.random.default_rng(seed)
    kinds = list(subjects(v))
    for index, (name, filters, judge) in enumerate(kinds):
        share = count // len(kinds) + (index < count % len(kinds))
        yield soak(name, filters, judge, v, share, rng)


def main() -> None:
    parser = argparse.ArgumentParser(description="Random generations under every kind of filter.")
    parser.add_argument("--generations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    total = {"generations": 0, "complete": 0, "cut": 0, "tokens": 0}
    try:
        for line in run(args.generations, args.seed):
            print(json.dumps(line), flush=True)
            total = {key: value + line[key] for key, value in total.items()}
    except Violation as violation:
        sys.exit(f"soak_filters: {violation}")
    print(json.dumps({"all": total, "violations": 0, "seed": args.seed}))


if __name__ == "__main__":
    main()
