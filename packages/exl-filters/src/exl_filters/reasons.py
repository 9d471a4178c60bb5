"""Translate llguidance's error messages to terms of the schema or pattern that the caller wrote.

llguidance reports errors in the grammar text that this package makes of a schema, with its own options and type
names. This module keeps the reason and leaves out the rest.
"""

from __future__ import annotations

import re
from typing import Any

from exl_filters.schema_checks import schemas_in

__all__ = ["source_reason", "stop_reason"]

# A numbered line of the grammar text with the mark below it.
_EXCERPT = re.compile(r"^ +\d+ \| .*(\n +\^)?$", re.MULTILINE)
_PREFIX = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: |invalid regex .* \(in regex\): )?", re.DOTALL)
_PATTERN = re.compile(r"^regex parse error:\n    (?P<pattern>.*)\n    (?P<mark> *)\^+\nerror: (?P<why>.*)$")
_KEYWORDS = re.compile(r"^Unimplemented keys: (\[.*\])$")

_REWRITTEN = (
    (
        re.compile(r"^oneOf constraints are not supported.*$", re.DOTALL),
        "oneOf is enforced only if no value can match two of its schemas: use anyOf, or tell them apart by a const",
    ),
    (
        re.compile(r"^Resource '(.*)' is not present in a registry.*$", re.DOTALL),
        r"the reference '\1' leads out of the schema: copy what it names under $defs",
    ),
    (re.compile(r"^Pointer '(.*)' does not exist$"), r"the reference '#\1' leads to nothing"),
    (re.compile(r"^Unsatisfiable schema: "), "no value matches the schema: "),
    (re.compile(r"\bExpected (?:f32|f64|u32|u64|usize|i64) for\b"), "Expected a number for"),
)

_STOP_REASONS = {
    "NoExtension": "no token of the vocabulary can follow",
    "NoExtensionBias": "no token of the vocabulary can follow",
    "ParserTooComplex": "the grammar is too complex here for the parser's limits",
    "LexerTooComplex": "the patterns are too complex here for the lexer's limits",
    "InternalError": "the grammar's parser failed",
}


def source_reason(kind: str, value: Any, message: str) -> str:
    """One line that says why `value` does not compile.

    kind: the argument of the filter that `value` was given as. Lark and llguidance's own form are read as written:
    their messages keep line numbers. message: of an error in the grammar's text; other messages are returned unchanged.
    """
    if kind not in ("json_schema", "regex", "choice") or not _PREFIX.match(message):
        return message
    text = _PREFIX.sub("", _EXCERPT.sub("", message).strip())
    keywords = _KEYWORDS.match(text)
    if keywords is not None:
        text = _unsupported(re.findall(r'"([^"]+)"', keywords[1]), value)
    pattern = _PATTERN.match(text)
    if pattern is not None:
        text = f"the pattern '{pattern['pattern']}' is wrong at character {len(pattern['mark']) + 1}: {pattern['why']}"
    for old, new in _REWRITTEN:
        text = old.sub(new, text)
    return f"{kind}: {' '.join(text.split())}"


def stop_reason(message: str) -> str:
    """The reason of a matcher that stopped with an error, without the names of llguidance's types."""
    text = message.replace("<non-verbose/>", "")
    for name, reason in _STOP_REASONS.items():
        text = re.sub(rf"\b{name}\b", reason, text)
    return " ".join(text.split())


def _unsupported(keywords: list[str], schema: Any) -> str:
    """Names the keywords with the first place of each in the schema."""
    found: dict[str, str] = {}
    for at, sub in schemas_in(schema, "#"):
        for name in keywords:
            if name in sub:
                found.setdefault(name, at)
    places = ", ".join(f"{name} (at {found[name]})" if name in found else name for name in keywords)
    return f"cannot be enforced: {places}; leave it out and check the output afterwards"
