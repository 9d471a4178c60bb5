"""Ways around a schema: names written with escapes, names given twice, llguidance's own options, costly divisors."""

import json
import sys
from pathlib import Path

import pytest

from exl_filters import FilterCompileError, FilterStack, Vocabulary

pytest.importorskip("llguidance", reason="extra `grammar`")
from exl_filters.grammar import ExLlamaV2GrammarFilter

sys.path.insert(0, str(Path(__file__).parent))
import json_schema_suite as suite

BYTES = Vocabulary([*(bytes([i]) for i in range(256)), None], eos_token_id=256, special_ids=[256])
NAMES = ["a", "\n", "\x01", '"', "/", "\\", "\x7f", "é", "😀"]


def takes(schema, text, **options):
    template = ExLlamaV2GrammarFilter(None, BYTES, json_schema=schema, **options)
    with FilterStack([template], vocab_size=BYTES.size, stop_ids=BYTES.stop_ids) as stack:
        return stack.accept_text(text, BYTES) and (stack.ended or stack.complete)


def spellings(name):
    units = name.encode("utf-16-be")
    escaped = "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
    return {escaped, escaped.upper().replace("\\U", "\\u"), json.dumps(name)[1:-1], "\\/" if name == "/" else escaped}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "rest",
    [{}, {"additionalProperties": {"type": "string"}}, {"patternProperties": {"^b": {"type": "null"}}}],
)
def test_no_spelling_of_a_name_gets_around_its_schema(name, rest):
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, **rest}
    for spelled in spellings(name):
        text = f'{{"{spelled}": "x"}}'
        assert set(json.loads(text)) == {name}
        assert not takes(schema, text), text
    assert takes(schema, '{"other": "x"}')
    assert any(takes(schema, f'{{"{s}": 1}}') for s in [*spellings(name), name])


def test_no_spelling_gets_around_a_pattern_of_names():
    schema = {"type": "object", "patternProperties": {"^a": {"type": "integer"}}}
    assert takes(schema, '{"a": 1}')
    assert not takes(schema, '{"\\u0061": "x"}')
    nested = {"type": "array", "items": {"$ref": "#/$defs/o"}, "$defs": {"o": {"properties": {"a": {"const": 1}}}}}
    assert takes(nested, '[{"a": 1}]')
    assert not takes(nested, '[{"\\u0061": 2}]')


def test_control_characters_where_no_name_is_at_stake():
    assert takes({"const": "a\x00"}, '"a\\u0000"')
    assert takes({"type": "string"}, '"\\u001b"')
    for keyword, value in (("const", "a\x00"), ("enum", [["\x7f"]])):
        with pytest.raises(FilterCompileError, match=f"{keyword}.*control characters"):
            takes({"properties": {"b": {keyword: value}}}, "{}")
    assert takes({"properties": {"b": {"const": '\n\t\b\f\r"\\'}}}, '{"b": "\\n\\t\\b\\f\\r\\"\\\\"}')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2},
        {"minProperties": 2},
        {"type": "object", "required": ["a"], "minProperties": 3},
        {"allOf": [{"minProperties": 2.0}, {"type": "object"}]},
    ],
)
def test_members_that_may_be_one_given_twice_are_not_counted(schema):
    with pytest.raises(FilterCompileError, match="minProperties"):
        takes(schema, "{}")


def test_members_beside_the_required_ones_are_counted():
    schema = {"type": "object", "required": ["a"], "minProperties": 2}
    assert takes(schema, '{"a": 1, "b": 1}')
    assert not takes(schema, '{"a": 1, "a": 1}')
    assert not takes({"type": "object", "minProperties": 1}, "{}")


@pytest.mark.parametrize(
    "schema",
    [
        {"x-guidance": {"item_separator": ";"}, "type": "array"},
        {"x-guidance": {"whitespace_pattern": "a*"}},
        {"x-guidance": 5},
        {"properties": {"a": {"x-guidance": {"lenient": True}}}},
        {"anyOf": [{"type": "null", "x-guidance": {}}]},
    ],
)
def test_the_engines_options_are_not_the_schemas_to_set(schema):
    with pytest.raises(FilterCompileError, match="x-guidance"):
        takes(schema, "null")


def test_a_member_or_a_value_may_bear_the_options_name():
    assert takes({"properties": {"x-guidance": {"type": "integer"}}}, '{"x-guidance": 1}')
    assert takes({"const": {"x-guidance": 1}}, '{"x-guidance": 1}')
    assert takes({"properties": {"minProperties": {"type": "integer"}}}, '{"minProperties": 7}')


@pytest.mark.parametrize("limit", [-1, 2**80, "x", 1.5, None])
def test_limits_are_counts(limit):
    with pytest.raises(FilterCompileError, match="limits"):
        ExLlamaV2GrammarFilter(None, BYTES, regex="a", limits={"step_max_items": limit})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999983},
        {"type": "integer", "multipleOf": 9999830},
        {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]},
    ],
)
def test_divisors_of_more_states_than_the_limit_are_refused(schema):
    with pytest.raises(FilterCompileError, match="limit of 100000"):
        takes(schema, "0")


def test_divisors_below_it_are_not():
    assert takes({"type": "integer", "multipleOf": 1000000}, "3000000")
    assert takes({"type": "number", "multipleOf": 0.01}, "0.07")
    apart = {"anyOf": [{"type": "integer", "multipleOf": 997}, {"type": "integer", "multipleOf": 991}]}
    assert takes(apart, "1982")


@pytest.mark.parametrize("source", [{"regex": r"[^\s\S]"}, {"json_schema": {"$ref": "#"}}])
def test_a_grammar_of_no_text_is_refused_at_construction(source):
    with pytest.raises(FilterCompileError, match="begin it"):
        ExLlamaV2GrammarFilter(None, BYTES, **source)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "required": ["b"]}, "requires"),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]}, "requires"),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "null"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
            "requires",
        ),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, "open object"),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "string"}}, "open"),
    ],
)
def test_names_that_xgrammar_would_not_hold_to_are_refused(schema, reason):
    pytest.importorskip("xgrammar")
    with pytest.raises(FilterCompileError, match=reason):
        takes(schema, "{}", backend="xgrammar")


def test_a_worse_baseline_is_written_only_when_told(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "baseline_file", lambda backend: tmp_path / f"{backend}.txt")
    suite.write_baseline("e", {"g/0": "ar"})
    with pytest.raises(SystemExit, match="accept-worse"):
        suite.write_baseline("e", {"g/0": "aw"})
    with pytest.raises(SystemExit, match="accept-worse"):
        suite.write_baseline("e", {"h/0": "ar"})
    assert suite.read_baseline("e") == {"g/0": "ar"}
    suite.write_baseline("e", {"g/0": "ax"}, accept_worse=True)
    assert suite.read_baseline("e") == {"g/0": "ax"}
