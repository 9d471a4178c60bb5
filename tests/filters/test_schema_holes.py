"""Ways around a schema: names written with escapes, names given twice, llguidance's own options, costly divisors."""

import json

import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from exl_filters import CompileBudget, FilterCompileError, FilterStack, Vocabulary

pytest.importorskip("llguidance", reason="extra `grammar`")
import json_schema_suite as suite

from exl_filters.grammar import ExLlamaV2GrammarFilter
from exl_filters.schema_checks import check_schema

pytestmark = pytest.mark.sampled(2)

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


def test_members_besides_the_required_ones_are_counted():
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
def test_limits_are_integers_of_zero_or_more(limit):
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


def test_divisors_below_the_limit_are_accepted():
    assert takes({"type": "integer", "multipleOf": 1000000}, "3000000")
    assert takes({"type": "number", "multipleOf": 0.01}, "0.07")
    apart = {"anyOf": [{"type": "integer", "multipleOf": 997}, {"type": "integer", "multipleOf": 991}]}
    assert takes(apart, "1982")


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ('{"type": "integer", "multipleOf": 1' + "0" * 400 + "}", r"#: multipleOf is above the limit of 1\.797"),
        ('{"items": {"multipleOf": -' + "7" * 4000 + "}}", r"#/items: multipleOf is above the limit of 1\.797"),
        (json.dumps({"allOf": [{"multipleOf": 3**600 + 2 * i} for i in range(20)]}), "limit of 100000"),
        ('{"type": "number", "exclusiveMinimum": 1e999}', "expected value|invalid number"),
        ('{"type": "number", "exclusiveMaximum": -1e999}', "expected value|invalid number"),
        ('{"type": "number", "minimum": 1e999, "exclusiveMinimum": true}', "expected value|invalid number"),
    ],
)
def test_numbers_that_no_float_holds_are_refused(schema, reason, trust):
    with pytest.raises(FilterCompileError, match=reason):
        takes(schema, "0", budget=CompileBudget(seconds=120, trust=trust))


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


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/default", "default": {"type": "object", "minProperties": 3}},
        {"$ref": "#/examples/0", "examples": [{"type": "object", "properties": {"a": {"type": "integer"}}}]},
        {"$ref": "#/x/enum/0", "x": {"enum": [{"type": "string"}]}},
        {"$ref": "#/$defs/a/de%66ault", "$defs": {"a": {"default": {"type": "string"}}}},
        {"properties": {"a": {"$ref": "#there"}}, "default": [{"$anchor": "there", "type": "string"}]},
    ],
)
def test_no_reference_leads_into_data(schema):
    with pytest.raises(FilterCompileError, match="leads into const, enum, default or examples"):
        takes(schema, "1")


def test_references_to_names_like_keywords():
    schema = {"$ref": "#/$defs/default", "$defs": {"default": {"properties": {"enum": {"const": 1}}}}}
    assert takes(schema, '{"enum": 1}')
    assert not takes(schema, '{"enum": 2}')
    inner = {"properties": {"enum": {"const": 1}, "x": {"$ref": "#/properties/enum"}}}
    assert takes(inner, '{"x": 1}')
    assert not takes(inner, '{"x": 2}')


def test_a_required_member_is_counted_once_however_it_is_spelled():
    schema = {"type": "object", "required": ["a"], "minProperties": 2}
    assert not takes(schema, '{"a": 1, "\\u0061": 2}')
    assert takes(schema, '{"a": 1, "b": 2}')


WHOLE = st.integers(-12, 12)
BETWEEN = st.decimals(-13, 13, places=2).map(float)
LOWER, UPPER = st.sampled_from(["minimum", "exclusiveMinimum"]), st.sampled_from(["maximum", "exclusiveMaximum"])


@examples(150, 9)
@given(LOWER, st.one_of(WHOLE, BETWEEN), UPPER, st.one_of(WHOLE, BETWEEN), st.booleans(), BETWEEN)
def test_no_number_gets_around_its_bounds(lower, low, upper, high, joined, other):
    """Bounds of every kind, near and far, whole and not; what is taken validates with jsonschema."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = {"type": "number", lower: low, upper: high}
    if joined:
        schema = {"allOf": [{"type": "number", lower: low}, {upper: high}]}
    for value in (low, high, other):
        for text in {repr(value), f"{value:.0f}", f"{value:.3f}", "-0", "0.0"}:
            try:
                taken = takes(schema, text)
            except FilterCompileError:
                return
            if taken:
                jsonschema.validate(json.loads(text), schema)


def test_a_whole_number_left_out_next_to_a_near_bound_is_refused():
    for schema in (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.37},
        {"type": "number", "minimum": -0.7, "exclusiveMaximum": 0},
        {"allOf": [{"type": "number", "exclusiveMinimum": 1}, {"maximum": 1.5}]},
        {"type": "number", "exclusiveMinimum": 0, "anyOf": [{"maximum": 0.37}, {"minimum": 5}]},
        {"exclusiveMaximum": -1, "$ref": "#/$defs/low", "$defs": {"low": {"type": "number", "minimum": -1.5}}},
    ):
        with pytest.raises(FilterCompileError, match="cannot be enforced"):
            takes(schema, "1")
    assert takes({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "0.5")
    assert not takes({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "0")


POSITIVE, SMALL = {"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}


@pytest.mark.parametrize(
    ("schema", "zero"),
    [
        ({"properties": {"a": POSITIVE}, "anyOf": [{"properties": {"a": SMALL}}, {"required": ["b"]}]}, '{"a": 0}'),
        ({"properties": {"a": POSITIVE}, "$ref": "#/$defs/o"}, '{"a": 0}'),
        ({"properties": {"a": POSITIVE}, "patternProperties": {"^a": SMALL}}, '{"a": 0}'),
        ({"additionalProperties": POSITIVE, "$ref": "#/$defs/rest"}, '{"a": 0}'),
        ({"properties": {"a": POSITIVE}, "$ref": "#/$defs/rest"}, '{"a": 0}'),
        ({"items": POSITIVE, "anyOf": [{"items": SMALL}]}, "[0]"),
        ({"items": POSITIVE, "allOf": [{"prefixItems": [SMALL]}]}, "[0]"),
        ({"$ref": "#/$defs/p"}, '{"a": 0}'),
        ({"allOf": [{"items": {"$ref": "#here"}}, {"items": SMALL}]}, "[0]"),
        ({"type": "object", "$ref": "other.json", "properties": {"a": POSITIVE, "b": SMALL}}, '{"a": 0}'),
    ],
)
def test_bounds_of_one_number_meet_wherever_they_are(schema, zero):
    defs = {
        "o": {"properties": {"a": SMALL}},
        "rest": {"additionalProperties": SMALL},
        "p": {"$ref": "#/$defs/o", "properties": {"a": POSITIVE}},
        "h": {"$anchor": "here", **POSITIVE},
    }
    with pytest.raises(FilterCompileError, match="cannot be enforced"):
        takes({"type": ["object", "array"], **schema, "$defs": defs}, zero)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        # As pydantic writes a member with a default.
        (
            {
                "properties": {"price": POSITIVE, "share": SMALL, "kind": {"allOf": [{"$ref": "#/$defs/K"}]}},
                "$defs": {"K": {"enum": ["x"]}},
            },
            '{"price": 1, "share": 0, "kind": "x"}',
        ),
        (
            {"properties": {"a": {"anyOf": [POSITIVE, {"type": "null"}]}, "b": {"minimum": 0, "anyOf": [SMALL]}}},
            '{"a": 3, "b": 0}',
        ),
        ({"anyOf": [POSITIVE, {"type": "number", **SMALL}]}, "0"),
        ({"allOf": [{"prefixItems": [POSITIVE, SMALL]}, {"minItems": 2}]}, "[1, 0]"),
        ({"properties": {"a": POSITIVE}, "additionalProperties": SMALL, "allOf": [{}]}, '{"a": 1, "b": 0}'),
        ({"$ref": "#/$defs/t", "$defs": {"t": {"items": {"$ref": "#/$defs/t"}, **POSITIVE}, "u": SMALL}}, "1"),
        (
            {
                "properties": {f"m{p}": {"type": "integer", "multipleOf": p} for p in (3, 7, 11, 13, 17, 19)},
                "allOf": [{"required": ["m3"]}],
            },
            '{"m3": 6, "m19": 38}',
        ),
    ],
)
def test_bounds_of_different_numbers_are_kept_apart(schema, text):
    assert takes(schema, text)


def test_bounds_of_different_numbers_do_not_meet():
    half = {"type": "number", "maximum": 0.5}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "number", "exclusiveMinimum": 0}, "b": {"$ref": "#/$defs/half"}},
        "$defs": {"half": half},
    }
    assert takes(schema, '{"a": 1, "b": 0.5}')
    assert not takes(schema, '{"a": 0, "b": 0.5}')


@pytest.mark.full
def test_many_bounds_that_meet_and_many_references_by_name():
    """Comparing each with each would take hours: the time limit of a test is the bar."""
    many = [{"type": "number", "exclusiveMinimum": 2 * i, "maximum": 2 * i + 1} for i in range(100_000)]
    named = [{"$ref": f"#name{i}"} for i in range(100_000)]
    check_schema({"allOf": many, "anyOf": named, "examples": [{"a": [0] * 1000}] * 20})
    with pytest.raises(FilterCompileError, match=r"exclusiveMinimum 0 next to the bound 0\.5"):
        check_schema({"allOf": [{"exclusiveMinimum": 0}, *many[1:], {"maximum": 0.5}]})
