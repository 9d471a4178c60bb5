"""Filters one after another, filters that tell what they do, lengths in characters, and specs of filters of filters."""

import itertools
import json
import logging
import pickle

import pytest
from effort import trials
from hypothesis import given
from hypothesis import strategies as st

from exl_filters import (
    AllOf,
    AnyOf,
    ExLlamaV2PrefixFilter,
    ExLlamaV2SelectFilter,
    FilterCompileError,
    FilterRejected,
    FilterStack,
    LengthFilter,
    LoggedFilter,
    SequenceFilter,
    TriggeredFilter,
    UnknownFilter,
    Vocabulary,
    bits,
    from_spec,
    register,
    unregister,
)
from exl_filters.testing import check_machine, filter_laws

pytestmark = pytest.mark.sampled(3)

ONE, TWO = ["yes", "no", "no way"], ["!", "?!", "é"]
BOTH = [a + b for a, b in itertools.product(ONE, TWO)]


def select(v, *options):
    return ExLlamaV2SelectFilter(None, v, list(options))


def sequence(v):
    return SequenceFilter([select(v, *ONE), select(v, *TWO)])


@pytest.mark.covers("filters: combinators")
@filter_laws(sequence, language=BOTH, profile="quick", examples=trials(10, 4))
def test_laws_of_sequence(law):
    law()


@pytest.mark.covers("filters: combinators")
@filter_laws(lambda v: LoggedFilter(select(v, *ONE)), language=ONE, profile="quick", examples=trials(10, 4))
def test_laws_of_logged(law):
    law()


@pytest.mark.covers("filters: combinators")
@filter_laws(lambda v: LengthFilter(None, v, 0, None, 2, 5), profile="quick", examples=trials(10, 4))
def test_laws_of_a_length_in_characters(law):
    law()


def test_a_long_mixed_history_of_a_sequence():
    check_machine(sequence, BOTH, profile="quick", examples=trials(10, 4), shrink=False)


PIECES = ["y", "e", "s", "n", "o", " way", "no", "!", "?", "s!", "no?", "yes!", "x", "</s>"]
V = Vocabulary(PIECES, eos_token_id=13, special_ids=[13])


def stack(*filters):
    return FilterStack(filters, vocab_size=V.size, stop_ids=[13])


def pieces(s):
    mask = s.next_mask()
    return None if mask is None else {PIECES[i] for i in bits.to_ids(mask)}


def test_parts_meet_between_tokens_and_inside_them():
    s = stack(SequenceFilter([select(V, "yes", "no", "no way"), select(V, "!", "?!")]))
    # "no?" begins with a token that is a whole part; "yes!" does not, and is the one spelling that is left out.
    assert pieces(s) == {"y", "n", "no", "no?"}
    s.feed(PIECES.index("no"))
    assert pieces(s) == {" way", "!", "?"}
    s.rewind(1)
    s.feed(PIECES.index("no?"))
    assert pieces(s) == {"!"}
    assert s.feed(PIECES.index("!"))
    s.rewind(2)
    for piece in ("y", "e"):
        s.feed(PIECES.index(piece))
    assert pieces(s) == {"s", "s!"}
    with pytest.raises(FilterRejected):
        s.feed(PIECES.index("!"))
    assert s.feed(PIECES.index("s!"))


def test_only_the_last_part_may_stop():
    s = stack(SequenceFilter([select(V, "yes", "y"), select(V, "no", "no way")]))
    s.feed(PIECES.index("y"))
    assert pieces(s) == {"e", "n", "no"}
    s.feed(PIECES.index("no"))
    assert pieces(s) == {" way", "</s>"}
    assert s.feed(13)


def test_a_part_without_an_opinion_leaves_all_open():
    s = stack(SequenceFilter([ExLlamaV2PrefixFilter(None, V, "y"), select(V, "no")]))
    assert "x" not in pieces(s)
    s.feed(PIECES.index("y"))
    assert pieces(s) is None


@given(st.text("aé😀 z", max_size=9), st.integers(0, 3), st.integers(3, 6))
def test_length_in_characters(text, least, most):
    v = Vocabulary([*(bytes([i]) for i in range(256)), None], eos_token_id=256, special_ids=[256])
    with FilterStack([LengthFilter(None, v, min_chars=least, max_chars=most)], vocab_size=257, stop_ids=[256]) as s:
        assert s.accept_text(text) == (len(text) <= most)
        if len(text) <= most:
            assert s.allows(256) == (len(text) >= least)


def test_a_logged_filter_tells_what_it_does(caplog):
    s = stack(LoggedFilter(select(V, "no")))
    with caplog.at_level(logging.DEBUG, "exl_filters"):
        s.begin()
        s.next_mask()
        s.feed(PIECES.index("n"))
        with pytest.raises(FilterRejected):
            s.feed(PIECES.index("x"))
        s.rewind(1)
        s.filters[0].next()
    told = " | ".join(record.getMessage() for record in caplog.records)
    for what in ("begin(", "mask of 2 ids ('n', 'no')", "feed(3) 'n'", "feed(12) raised FilterRejected", "rewind(1)"):
        assert what in told, told
    assert "next() allows 2 ids" in told


@pytest.mark.covers("filters: specs")
@pytest.mark.parametrize(
    "f",
    [
        AllOf([select(V, "no", "yes"), ExLlamaV2PrefixFilter(None, V, "n")]),
        AnyOf([select(V, "no"), select(V, "yes")]),
        SequenceFilter([select(V, "no"), AnyOf([select(V, "!"), select(V, "?")])]),
        TriggeredFilter(select(V, "no"), on="x", after="rearm"),
        LoggedFilter(select(V, "no")),
    ],
    ids=lambda f: type(f).__name__,
)
def test_filters_of_filters_are_data_too(f):
    spec = json.loads(json.dumps(f.spec()))
    for again in (from_spec(spec, V), pickle.loads(pickle.dumps(f))):
        assert type(again) is type(f)
        assert again.next() == f.next()
        assert again.spec() == spec


@pytest.mark.covers("filters: plugins")
def test_the_allow_list_holds_inside_of_specs(tmp_path, monkeypatch):
    site = tmp_path / "acme-1.dist-info"
    site.mkdir()
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1\n")
    (site / "entry_points.txt").write_text("[exl_filters.filters]\nacme = acme:make\n")
    (tmp_path / "acme.py").write_text(
        "from exl_filters import ExLlamaV2SelectFilter\n"
        "def make(vocab):\n    return ExLlamaV2SelectFilter(None, vocab, ['no'])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from exl_filters import registry

    registry.refresh()
    spec = {"type": "all-of", "filters": [{"type": "logged", "inner": {"type": "acme"}}]}
    try:
        with pytest.raises(UnknownFilter):
            from_spec(spec, V, allow=["select"])
        assert from_spec(spec, V, allow=["acme"]).next()[0] == [3, 6]
    finally:
        monkeypatch.undo()
        registry.refresh()


def test_bad_arguments():
    for make in (lambda: SequenceFilter([]), lambda: LengthFilter(None, V, min_chars=3, max_chars=2)):
        with pytest.raises(FilterCompileError):
            make()


def test_a_schema_keeps_its_own_type(monkeypatch):
    """Only the filters of filters hold specs: a plugin's parameter called `inner` is its own."""

    def make(vocab, inner):
        assert inner == {"type": "select"}
        return select(vocab, "no")

    register("holds-inner", make)
    try:
        assert from_spec({"type": "holds-inner", "inner": {"type": "select"}}, V).next()[0] == [3, 6]
    finally:
        unregister("holds-inner")
