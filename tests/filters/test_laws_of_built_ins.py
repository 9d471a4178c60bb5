"""The built-in filters obey the laws."""

import re

import pytest

from exl_filters import ExLlamaV2PrefixFilter, ExLlamaV2SelectFilter
from exl_filters.testing import filter_laws, json_schema, starts_with

SELECT = ["yes", "no", "😀x", "no way"]
PREFIX = ["{", "[é"]


@filter_laws(lambda vocab: ExLlamaV2SelectFilter(None, vocab, SELECT), language=SELECT, profile="quick", examples=12)
def test_select(law):
    law()


@filter_laws(
    lambda vocab: ExLlamaV2SelectFilter(None, vocab, ["yeS"], True),
    language=re.compile("[yY][eE][sSſ]"),
    profile="quick",
    examples=12,
    laws=[str(n) for n in (5, 8, 12, 13, 18, 21, 22, 23, 24, 25, 26, 28, 31, 32, 35)],
)
def test_select_of_any_case(law):
    law()


@filter_laws(
    lambda vocab: ExLlamaV2PrefixFilter(None, vocab, PREFIX), language=starts_with(PREFIX), profile="quick", examples=12
)
def test_prefix(law):
    law()


PATTERN = r"(yes|no)[ab😀]{1,3}-?"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "é"]}, "b": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


def schema_language():
    """jsonschema is the judge; without it the laws that need one do not apply."""
    texts = ['{"a":"x"}', '{"a": "é", "b": true}']
    try:
        return json_schema(SCHEMA, texts)
    except ImportError:
        return None


def grammar(vocab, **source):
    pytest.importorskip("llguidance", reason="extra `grammar`")
    from exl_filters.grammar import ExLlamaV2GrammarFilter

    return ExLlamaV2GrammarFilter(None, vocab, **source)


@filter_laws(
    lambda vocab: grammar(vocab, regex=PATTERN, no_forcing=True), language=re.compile(PATTERN), profile="quick"
)
def test_grammar_of_a_pattern(law):
    law()


@filter_laws(
    lambda vocab: grammar(vocab, regex=PATTERN),
    language=re.compile(PATTERN),
    capabilities=["canonical_only"],
    profile="quick",
    examples=12,
    laws=[str(n) for n in (5, 8, 9, 12, 13, 18, 21, 22, 25, 26, 31, 33, 34)],
)
def test_grammar_with_canonical_forcing(law):
    law()


@filter_laws(
    lambda vocab: grammar(vocab, json_schema=SCHEMA, no_forcing=True),
    language=schema_language(),
    profile="quick",
    examples=12,
    laws=[str(n) for n in (7, 8, 9, 10, 13, 18, 20, 21, 23, 24, 25, 26, 29, 31, 32, 33)],
)
def test_grammar_of_a_schema(law):
    law()


def enforcer(vocab):
    lmfe = pytest.importorskip("lmformatenforcer", reason="extra `enforcer`")
    from exl_filters.token_enforcer import ExLlamaV2TokenEnforcerFilter

    return ExLlamaV2TokenEnforcerFilter(None, vocab, lmfe.RegexParser("(yes|no)[ab]{1,3}-?"))


@filter_laws(enforcer, language=re.compile("(yes|no)[ab]{1,3}-?"), profile="quick", examples=12)
def test_token_enforcer(law):
    law()
