"""Decide which grammars are small and plain enough to be compiled at once, without a trial (see `trial.py`).

A grammar that passes compiles in about a second and 150 MB at most, whatever its content. Its size is small, so chains
of references are short. Nothing intersects patterns, which is what grows without bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from exl_filters.schema_checks import divisor_of, schemas_in

__all__ = ["is_plain", "is_small"]

MOST_CHARACTERS = 8192
MOST_SCHEMA_TEXT = 4 * MOST_CHARACTERS
MOST_DIVISORS = 2000
MOST_PATTERNS = 64
WHITESPACE_CHARACTERS = 64
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id"}
)
# Keywords that describe one value; two or three of them are intersected at a time.
SINGLE = frozenset(
    {
        "type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems",
        "enum", "const", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
        "exclusiveMaximum", "multipleOf", "minProperties", "$defs", "definitions",
    }
)  # fmt: skip
# Keywords that refer to other schemas: plain where no other keyword is next to them.
JOINING = frozenset({"$ref", "anyOf"})


def is_small(source: Mapping[str, Any]) -> bool:
    """Whether the one entry of `source`, as `text_source` returns it, may be plain by its number of characters.

    Indentation and a wrapper do not count in a plain schema, so the limit of its text is larger: parsing a text of that
    size takes a few milliseconds at most, and `is_plain` then measures the schema alone.
    """
    ((kind, value),) = source.items()
    if kind == "json_schema":
        return len(value) <= MOST_SCHEMA_TEXT
    return (sum(map(len, value)) if kind == "choice" else len(value)) <= MOST_CHARACTERS


def is_plain(source: Mapping[str, Any], whitespace: str = "bounded", limits: Mapping[str, int] | None = None) -> bool:
    """Whether the one entry of `source` may be compiled without a trial."""
    ((kind, value),) = source.items()
    if limits or len(whitespace) > WHITESPACE_CHARACTERS or kind == "llg":
        return False
    if kind == "choice":
        return sum(len(option) for option in value) <= MOST_CHARACTERS
    if kind == "json_schema":
        return _plain_schema(value)
    if len(value) > MOST_CHARACTERS:
        return False
    # Lark writes intersections, complements and inner grammars with these characters. In a string they are harmless.
    return kind == "regex" or not any(sign in value for sign in ("&", "~", "%json", "%regex", "@"))


def _plain_schema(schema: dict[str, Any]) -> bool:
    if len(json.dumps(schema)) > MOST_CHARACTERS:
        return False
    divisors = patterns = 0
    for _, sub in schemas_in(schema, ""):
        said = sub.keys() - ANNOTATIONS
        if not said <= SINGLE | JOINING or (said & JOINING and len(said - {"$defs", "definitions"}) > 1):
            return False
        patterns += "pattern" in said or "format" in said
        if "multipleOf" in said:
            divisors += divisor_of(sub)
    return divisors <= MOST_DIVISORS and patterns <= MOST_PATTERNS
