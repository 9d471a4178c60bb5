"""xgrammar behind the grammar filter: the same laws, the same promise that nothing is enforced in part."""

import json
import random
import re

import numpy as np
import pytest
from answers import allowed_ids
from effort import examples, trials
from hypothesis import given
from hypothesis import strategies as st

from exl_filters import (
    CompileBudget,
    FilterCompileError,
    FilterRejected,
    FilterStack,
    MissingExtra,
    Vocabulary,
    apply_mask,
    bits,
)
from exl_filters.testing import check_machine, filter_laws, json_schema, real_vocabulary

pytest.importorskip("llguidance", reason="extra `grammar`")
xgrammar = pytest.importorskip("xgrammar", reason="extra `xgrammar`")
jsonschema = pytest.importorskip("jsonschema")
from exl_filters.grammar import ExLlamaV2GrammarFilter  # noqa: E402 - after the extra is known to be here

pytestmark = [pytest.mark.covers("filters: xgrammar"), pytest.mark.sampled(2)]

PATTERN = r"(yes|no)[ab😀]{1,3}-?"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "é"]}, "b": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
# The laws make a filter while tests are collected: there no process tries its grammar first.
TRUSTED = CompileBudget(trust=True)
BYTES = Vocabulary([*(bytes([i]) for i in range(256)), None], eos_token_id=256, special_ids=[256])


def make(vocab=BYTES, **source):
    return ExLlamaV2GrammarFilter(None, vocab, backend="xgrammar", **source)


@filter_laws(
    lambda v: make(v, regex=PATTERN, budget=TRUSTED),
    language=re.compile(PATTERN),
    profile="quick",
    examples=trials(8, 3),
)
def test_laws_of_a_pattern(law):
    law()


@filter_laws(
    lambda v: make(v, json_schema=SCHEMA, whitespace="compact", budget=TRUSTED),
    language=json_schema(SCHEMA, ['{"a":"x"}', '{"a":"é","b":true}']),
    profile="quick",
    examples=trials(8, 3),
)
def test_laws_of_a_schema(law):
    law()


def test_a_long_mixed_history():
    check_machine(
        lambda v: make(v, choice=["yes", "no way"]), ["yes", "no way"], profile="quick", examples=10, steps=20
    )


def test_sources():
    for source, good, bad in (
        ({"ebnf": 'root ::= "a" ("b" | "cd")*\n'}, ["a", "abcd"], ["b", "ac"]),
        ({"choice": ['say "hi"', "é"]}, ['say "hi"', "é"], ["say", "e"]),
        ({"regex": "a|bc"}, ["a", "bc"], ["b", "ab"]),
        ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 12}}, ["3", "12"], ["2", "13", '"3"']),
    ):
        for text in good + bad:
            with FilterStack([make(**source)], vocab_size=257, stop_ids=[256]) as stack:
                assert (stack.accept_text(text) and (stack.ended or stack.complete)) == (text in good), (source, text)


@pytest.mark.parametrize(
    "source",
    [
        {"json_schema": {"allOf": [{"type": "string"}]}},
        {"json_schema": {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}},
        {"json_schema": {"type": "array", "items": [{"type": "string"}]}},
        {"json_schema": {"type": "string", "pattern": "a"}},
        {"json_schema": {"type": "string", "enum": [1]}},
        {"json_schema": {"properties": {"a": {"type": "string"}}}},
        {"json_schema": {"type": "object", "properties": {"a": False}}},
        {"json_schema": {"anyOf": [{"not": {}}]}},
        {"json_schema": {"type": "integer"}, "whitespace": "[ ]?"},
        {"json_schema": {"type": "integer"}, "limits": {"max_grammar_size": 5}},
        {"json_schema": {"type": "integer"}, "leading_space": True},
        {"lark": 'start: "a"'},
        {"regex": "(?=a)a"},
        {"ebnf": "root ::= nothing"},
    ],
)
def test_unenforceable_constraints_are_refused(source):
    with pytest.raises(FilterCompileError):
        make(**source)


def test_unknown_backends_and_a_missing_library(monkeypatch):
    with pytest.raises(FilterCompileError):
        ExLlamaV2GrammarFilter(None, BYTES, regex="a", backend="outlines")  # type: ignore[arg-type]
    monkeypatch.setitem(__import__("sys").modules, "xgrammar", None)
    with pytest.raises(MissingExtra):
        make(Vocabulary(["a", None], eos_token_id=1, special_ids=[1]), regex="a")


def test_no_surrogates_in_bytes_or_in_tokens():
    v = Vocabulary(
        [*(bytes([i]) for i in range(256)), b"\xed\xa0", b"\xed", b"\xa0", None], eos_token_id=259, special_ids=[259]
    )
    f = make(v, json_schema={"type": "string"})
    f.feed(ord('"'))
    assert {0xED, 257} <= set(f.next()[0])
    assert 256 not in f.next()[0]
    with pytest.raises(FilterRejected):
        f.feed(256)
    f.feed(0xED)
    assert not {0xA0, 258} & set(f.next()[0])
    with pytest.raises(FilterRejected):
        f.feed(258)
    f.rewind(1)
    assert 0xED in f.next()[0]


SIMPLE = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={"minimum": st.integers(-9, 3), "maximum": st.integers(3, 200)},
    ),
    st.sampled_from(
        [{"type": "boolean"}, {"type": "null"}, {"type": "string"}, {"const": "x"}, {"enum": ["é", 1, None]}]
    ),
)


def larger(inner):
    objects = st.dictionaries(st.sampled_from(["a", "b", "cé"]), inner, min_size=1).flatmap(
        lambda properties: st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.just(properties),
                "required": st.lists(st.sampled_from(sorted(properties)), unique=True),
                "additionalProperties": st.sampled_from([False, {"type": "integer"}]),
            }
        )
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner},
        optional={"minItems": st.integers(0, 2), "maxItems": st.integers(2, 3)},
    )
    return st.one_of(objects, arrays, st.lists(inner, min_size=1, max_size=2).map(lambda of: {"anyOf": of}))


@examples(40, 15)
@given(st.recursive(SIMPLE, larger, max_leaves=4), st.integers(0, 2**32 - 1))
def test_complete_outputs_are_valid(schema, seed):
    try:
        template = make(json_schema=schema)
    except FilterCompileError:
        return
    rng, text, ended = np.random.default_rng(seed), b"", False
    with FilterStack([template], vocab_size=257, stop_ids=[256], prefer_eos=True) as stack:
        for _ in range(120):
            token = int(apply_mask(rng.standard_normal(257).astype(np.float32), stack.next_mask()).argmax())
            ended = stack.feed(token)
            text += BYTES.bytes_of(token)
            if ended:
                jsonschema.validate(json.loads(text.decode()), schema)
                return


def test_masks_do_not_depend_on_the_width_of_the_buffer():
    f = make(choice=["yes", "no"])
    for size in (257, 288, 320):
        words = bits.full(size)
        assert f.fill_bitmask(words)
        assert bits.to_ids(words) == f.next()[0]


def test_a_grammar_from_a_process_is_the_grammar_from_here():
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 100, "maxItems": 101}
    elsewhere = ExLlamaV2GrammarFilter(None, BYTES, json_schema=schema, backend="xgrammar")
    here = ExLlamaV2GrammarFilter(None, BYTES, json_schema=schema, backend="xgrammar", budget=CompileBudget(trust=True))
    rng = random.Random(0)
    for _ in range(40):
        assert elsewhere.next() == here.next()
        token = rng.choice(allowed_ids(here))
        elsewhere.feed(token)
        here.feed(token)


def test_compiling_has_a_budget():
    """xgrammar has no limits: 20,000 optional classes take it minutes."""
    with pytest.raises(FilterCompileError, match=r"within 0\.5 s|more than 512 MB"):
        make(real_vocabulary("bpe"), regex="[a-z]?" * 20_000, budget=CompileBudget(0.5, 512))


# An error in a process of its own is in the default run by tests of `test_compile_budget.py`, with another library.
@pytest.mark.parametrize("budget", [CompileBudget(trust=True), pytest.param(CompileBudget(), marks=pytest.mark.full)])
def test_an_error_of_the_library_names_it(budget):
    with pytest.raises(FilterCompileError, match="xgrammar"):
        make(ebnf="root ::= (" + "a" * 300, budget=budget)
