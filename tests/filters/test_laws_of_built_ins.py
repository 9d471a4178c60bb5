"""Every built-in filter obeys every law that applies to it; `HYPOTHESIS_PROFILE=thorough` tries 1000 examples a law."""

import os
import re

import pytest
from effort import trials

from exl_filters import (
    AllOf,
    AnyOf,
    BanFilter,
    ExLlamaV2PrefixFilter,
    ExLlamaV2SelectFilter,
    LengthFilter,
    LoggedFilter,
    SequenceFilter,
    TokenSetFilter,
    TriggeredFilter,
)
from exl_filters.testing import (
    anything,
    check_filter,
    check_machine,
    filter_laws,
    finite,
    json_schema,
    real_vocabulary,
    starts_with,
)

pytestmark = pytest.mark.sampled(10)

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
BUDGET = {"profile": "deep"} if THOROUGH else {"profile": "quick", "examples": trials(8, 4)}

SELECT = ["yes", "no", "😀x", "no way"]
PREFIX = ["{", "[é"]
PATTERN = r"(yes|no)[ab😀]{1,3}-?"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "é"]}, "b": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


def select(vocab, *options):
    return ExLlamaV2SelectFilter(None, vocab, list(options))


def schema_language():
    """jsonschema is the judge; without it the laws that need one do not apply."""
    try:
        return json_schema(SCHEMA, ['{"a":"x"}', '{"a": "é", "b": true}'])
    except ImportError:
        return None


def grammar(**source):
    def make(vocab):
        pytest.importorskip("llguidance", reason="extra `grammar`")
        from exl_filters.grammar import ExLlamaV2GrammarFilter

        return ExLlamaV2GrammarFilter(None, vocab, **source)

    return make


def enforcer(vocab):
    lmfe = pytest.importorskip("lmformatenforcer", reason="extra `enforcer`")
    from exl_filters.token_enforcer import ExLlamaV2TokenEnforcerFilter

    return ExLlamaV2TokenEnforcerFilter(None, vocab, lmfe.RegexParser("(yes|no)[ab]{1,3}-?"))


def slots(vocab):
    named = sorted(vocab.special_ids - vocab.stop_ids)
    return TokenSetFilter(None, vocab, [[*vocab.ids_of(b"a"), *named], vocab.ids_of(b"b")])


def without(*texts):
    """All texts that do not hold one of these."""
    free = anything()
    banned = [t.encode() for t in texts]

    def allowed(text):
        return not any(t in text for t in banned)

    sentences = free.sentences.filter(allowed)
    return type(free)(f"without {texts}", allowed, allowed, sentences, [b"a cat", *banned])


# name: (factory, language, further claims)
GOOD = {
    "select": (lambda v: select(v, *SELECT), SELECT, ()),
    "select of any case": (lambda v: ExLlamaV2SelectFilter(None, v, ["yeS"], True), re.compile("[yY][eE][sSſ]"), ()),
    "select, the first that fits": (
        lambda v: ExLlamaV2SelectFilter(None, v, ["a", "abc", "b"], policy="first"),
        ["a", "b"],
        (),
    ),
    "prefix": (lambda v: ExLlamaV2PrefixFilter(None, v, PREFIX), starts_with(PREFIX), ()),
    "pattern": (grammar(regex=PATTERN, no_forcing=True), re.compile(PATTERN), ()),
    "pattern, canonical": (grammar(regex=PATTERN), re.compile(PATTERN), ()),
    "schema": (grammar(json_schema=SCHEMA, no_forcing=True), schema_language(), ()),
    "schema, canonical": (grammar(json_schema=SCHEMA), schema_language(), ()),
    "ebnf": (grammar(ebnf='root ::= "a" ("b" | "cd")* "é"\n', no_forcing=True), re.compile("a(b|cd)*é"), ()),
    "choice, ended by EOS": (grammar(choice=SELECT, no_forcing=True, on_complete="eos"), SELECT, ()),
    "token enforcer": (enforcer, re.compile("(yes|no)[ab]{1,3}-?"), ()),
    "all of": (
        lambda v: AllOf([select(v, "yes", "no", "no way"), ExLlamaV2PrefixFilter(None, v, "n")]),
        ["no", "no way"],
        (),
    ),
    "any of": (lambda v: AnyOf([select(v, "yes", "no"), select(v, "no way", "yes")]), ["yes", "no", "no way"], ()),
    "sequence": (
        lambda v: SequenceFilter([select(v, "yes", "no", "no way"), select(v, "!", "é")]),
        [a + b for a in ("yes", "no", "no way") for b in ("!", "é")],
        (),
    ),
    "triggered": (lambda v: TriggeredFilter(select(v, "yes", "no"), on="the"), None, ()),
    "logged": (lambda v: LoggedFilter(select(v, "yes", "no")), ["yes", "no"], ()),
    "ban": (lambda v: BanFilter(None, v, texts=["the", "😀"]), without("the", "😀"), ()),
    "length in tokens": (lambda v: LengthFilter(None, v, 2, 4), None, ()),
    "length in characters": (lambda v: LengthFilter(None, v, min_chars=2, max_chars=5), None, ()),
    "token set": (slots, None, ()),
}


def laws_of(name):
    factory, language, claims = GOOD[name]
    return filter_laws(factory, language=language, capabilities=claims, **BUDGET)


@pytest.mark.covers("filters: broken-filters", "filters: laws")
class TestLaws:
    """One test a filter, one item a law."""


def _add(name):
    @laws_of(name)
    def test(self, law):
        law()

    test.__name__ = f"test_{re.sub(r'[^a-z]+', '_', name.lower())}"
    setattr(TestLaws, test.__name__, test)


for _name in GOOD:
    _add(_name)


@pytest.mark.covers("filters: vocabularies")
@pytest.mark.parametrize("trained", ["bpe", "unigram"])
@pytest.mark.parametrize("name", ["select", "prefix", "pattern", "schema, canonical"])
def test_on_trained_vocabularies(name, trained):
    """The laws that compare a filter with itself in a renumbered vocabulary make others; the rest run on these."""
    factory, language, claims = GOOD[name]
    laws = [str(n) for n in (1, 2, 4, 5, 8, 9, 13, 18, 19, 21, 22, 23, 24, 25, 26, 28, 31, 33)]
    vocabulary = real_vocabulary(trained)
    check_filter(
        factory,
        language=language,
        capabilities=claims,
        vocabulary=vocabulary,
        laws=laws,
        profile="quick",
        examples=3,
        raise_on_failure=True,
    )


@pytest.mark.covers("filters: law-kit-forms")
@pytest.mark.parametrize("name", GOOD)
def test_long_mixed_histories(name):
    """Clones, rewinds, refusals and background work in any order, against a fresh filter that replays the journal."""
    factory, language, claims = GOOD[name]
    check_machine(
        factory, language, capabilities=claims, profile="ci", examples=100 if THOROUGH else 4, steps=20, shrink=False
    )


def test_there_is_one_of_each_kind():
    kinds = {"select", "prefix", "pattern", "schema", "ebnf", "token enforcer", "all of", "any of", "sequence"}
    assert kinds <= GOOD.keys()
    assert finite(SELECT).whole(b"yes")
