"""Schemas with keywords of other drafts than the one that they name: each is enforced or rejected."""

import json
from typing import Any

import pytest

from exl_filters import FilterCompileError, FilterStack, Vocabulary

pytest.importorskip("llguidance", reason="extra `grammar`")
from exl_filters.grammar import ExLlamaV2GrammarFilter

BYTES = Vocabulary([*(bytes([i]) for i in range(256)), None], eos_token_id=256, special_ids=[256])
DRAFTS = [
    None,
    *(f"http://json-schema.org/draft-0{number}/schema{end}" for number in (4, 6, 7) for end in ("#", "")),
    "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
]
MEMBERS = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 1}}, "additionalProperties": False}
TUPLE = [{"type": "string"}]
TEXT = {"x": {"type": "string"}}
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "dependentRequired": ({**MEMBERS, "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    "dependentSchemas": ({**MEMBERS, "dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1}),
    "dependencies": ({**MEMBERS, "dependencies": {"a": ["b"]}}, {"a": 1}),
    "unevaluatedProperties": ({"properties": {"a": {}}, "unevaluatedProperties": False}, {"b": 1}),
    "unevaluatedItems": ({"type": "array", "unevaluatedItems": False}, [1]),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a$"}}, {"b": 1}),
    "contains": ({"type": "array", "contains": {"const": 1}}, [2]),
    "const": ({"const": 1}, 2),
    "if": ({"type": "integer", "if": {"minimum": 1}, "then": False}, 1),
    "prefixItems": ({"type": "array", "prefixItems": TUPLE}, [1]),
    "prefixItems and items": ({"type": "array", "prefixItems": TUPLE, "items": False}, ["a", 1]),
    "list of items": ({"type": "array", "items": TUPLE}, [1]),
    "additionalItems": ({"type": "array", "items": TUPLE, "additionalItems": False}, ["a", 1]),
    "exclusiveMinimum true": ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, 3),
    "exclusiveMaximum true": ({"type": "integer", "maximum": 3, "exclusiveMaximum": True}, 3),
    "exclusiveMinimum 3": ({"type": "integer", "exclusiveMinimum": 3}, 3),
    "definitions": ({"$ref": "#/definitions/x", "definitions": TEXT}, 1),
    "$defs": ({"$ref": "#/$defs/x", "$defs": TEXT}, 1),
    "beside $ref": ({"$ref": "#/definitions/x", "minLength": 3, "definitions": TEXT}, "a"),
    "$recursiveRef": ({"items": {"$recursiveRef": "#"}, "type": "array", "maxItems": 1}, [1]),
    "$dynamicRef": ({"$dynamicRef": "#x", "$defs": {"x": {"$dynamicAnchor": "x", "type": "string"}}}, 1),
    "$anchor": ({"$ref": "#x", "$defs": {"x": {"$anchor": "x", "type": "string"}}}, 1),
}
"""A schema for each keyword, and a value that it forbids."""


def accepts(text, **source):
    template = ExLlamaV2GrammarFilter(None, BYTES, **source)
    with FilterStack([template], vocab_size=BYTES.size, stop_ids=BYTES.stop_ids) as stack:
        return stack.accept_text(text, BYTES) and (stack.ended or stack.complete)


def takes(schema, value):
    return accepts(json.dumps(value), json_schema=schema)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("case", CASES)
def test_a_keyword_is_enforced_or_rejected_whatever_the_draft(case, draft):
    schema, forbidden = CASES[case]
    named = schema if draft is None else {"$schema": draft, **schema}
    wholes = [(named, forbidden)]
    if "#" not in json.dumps(schema):  # a reference from the root
        wholes.append(({"type": "array", "items": {"anyOf": [named]}}, [forbidden]))
    for whole, value in wholes:
        try:
            assert not takes(whole, value)
        except FilterCompileError:
            assert case not in {
                "const",
                "prefixItems",
                "list of items",
                "exclusiveMinimum true",
                "definitions",
                "$defs",
            }


def test_newer_keywords_in_an_older_draft_are_enforced():
    draft = "http://json-schema.org/draft-07/schema#"
    data = {"$schema": draft}
    schema = {"$schema": draft, "type": "array", "prefixItems": [{"const": data}, {"type": "null"}], "items": False}
    assert takes(schema, [data, None])
    assert not takes(schema, [{}, None])
    assert not takes(schema, [data, 1])
    assert takes({"$schema": draft, "properties": {"const": {}, "$schema": {"const": 1}}}, {"const": 1, "$schema": 1})


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": "http://json-schema.org/draft-03/schema#", "type": "integer", "divisibleBy": 2},
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "const": "a",
            "definitions": {"x": {"id": "http://a.example/", "type": "string"}},
        },
    ],
)
def test_a_schema_that_no_draft_reads_as_written_is_rejected(schema):
    with pytest.raises(FilterCompileError, match="draft"):
        takes(schema, "a")


def test_schemas_in_lark_grammars_are_enforced_or_rejected():
    def lark(schema, **options):
        return {"lark": f'start: "a" %json {json.dumps({**schema, "x-guidance": options})} "b"'}

    old = {"$schema": "http://json-schema.org/draft-04/schema#"}
    assert not accepts("a2b", **lark({**old, "const": 1}, whitespace_flexible=False))
    assert accepts("a1b", **lark({**old, "const": 1}, whitespace_flexible=False))
    for schema in ({**old, "type": "null", "dependentRequired": {}}, {"minProperties": 2}):
        with pytest.raises(FilterCompileError):
            accepts("anullb", **lark(schema))
        assert accepts("anullb", **lark({"type": "null", **schema}, lenient=True))
