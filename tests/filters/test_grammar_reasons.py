"""Errors of schemas and patterns: one line, in the words of whoever wrote them."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="extra `grammar`")

from exl_filters import FilterCompileError, Vocabulary
from exl_filters.grammar import ExLlamaV2GrammarFilter

BYTES = Vocabulary([*(bytes([i]) for i in range(256)), None], eos_token_id=256, special_ids=[256])
INTERNALS = re.compile(
    r"x-guidance|%json|whitespace_pattern|json_allowed_escapes|lenient|coerce_one_of|NoExtension|non-verbose|"
    r"\b[fui](32|64)\b|usize|at \d+\(\d+\)|\n"
)


def reason(**source: Any) -> str:
    with pytest.raises(FilterCompileError) as found:
        ExLlamaV2GrammarFilter(None, BYTES, **source)
    assert not INTERNALS.search(str(found.value)), str(found.value)
    return str(found.value)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "strin"}, "Invalid type: strin"),
        ({"type": "integer", "minimum": "x"}, "Expected a number for 'minimum', got \"x\""),
        ({"required": "a"}, "Expected array for 'required', got \"a\""),
        ({"properties": 3}, "properties must be an object"),
        ({"$ref": "#/nowhere"}, "the reference '#/nowhere' leads to nothing"),
        (
            {"$ref": "http://example.com/x"},
            "the reference 'http://example.com/x' leads out of the schema: copy what it names under $defs",
        ),
        ({"type": "string", "pattern": "a(("}, "the pattern 'a((' is wrong at character 3: unclosed group"),
        (
            {"oneOf": [{"type": "string"}, {"type": "string"}]},
            "oneOf is enforced only if no value can match two of its schemas: use anyOf, or tell them apart by a const",
        ),
        (
            {"type": "integer", "minimum": 5, "maximum": 2},
            "no value matches the schema: minimum (5) is greater than maximum (2)",
        ),
        (
            {"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "array", "uniqueItems": True}}},
            "cannot be enforced: not (at #/properties/a); leave it out and check the output afterwards",
        ),
        (
            {"if": {}, "then": {}},
            "cannot be enforced: if (at #), then (at #); leave it out and check the output afterwards",
        ),
    ],
)
def test_schemas(schema: dict[str, Any], message: str) -> None:
    assert reason(json_schema=schema) == f"json_schema: {message}"


def test_a_schema_of_no_value_names_itself() -> None:
    schema = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    shown = reason(json_schema=schema)
    assert shown.startswith("Grammar(json_schema={")
    assert shown.endswith("no text can begin it (llguidance: no token of the vocabulary can follow)")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("((", "the pattern '((' is wrong at character 2: unclosed group"),
        ("ab[b-a]", "the pattern 'ab[b-a]' is wrong at character 4: invalid character class range"),
        ("(?=a)b", "the pattern '(?=a)b' is wrong at character 1: look-around"),
        (r"\p{Weird}", r"the pattern '\p{Weird}' is wrong at character 1: Unicode property not found"),
        ("a\n(", r"the pattern 'a\n(' is wrong at character 4: unclosed group"),
    ],
)
def test_patterns(pattern: str, message: str) -> None:
    assert reason(regex=pattern).startswith(f"regex: {message}")


def test_a_lark_grammar_keeps_its_line_numbers() -> None:
    with pytest.raises(FilterCompileError, match=r"at \d+\(\d+\)"):
        ExLlamaV2GrammarFilter(None, BYTES, lark="start: nothing")
