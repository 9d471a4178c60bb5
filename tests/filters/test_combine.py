"""Filters made of filters, and filters over ids: laws, and the cases they are for."""

import re

import pytest
from answers import allowed_ids, mask_ids
from effort import trials
from hypothesis import given
from hypothesis import strategies as st

from exl_filters import (
    AllOf,
    AnyOf,
    BanFilter,
    ExLlamaV2PrefixFilter,
    ExLlamaV2SelectFilter,
    FilterCompileError,
    FilterDeadEnd,
    FilterStack,
    LengthFilter,
    TokenSetFilter,
    TriggeredFilter,
    Vocabulary,
    bits,
    from_spec,
)
from exl_filters.testing import filter_laws

pytestmark = pytest.mark.sampled(5)


def select(v, *options):
    return ExLlamaV2SelectFilter(None, v, list(options))


@filter_laws(
    lambda v: AllOf([select(v, "yes", "no", "no way"), ExLlamaV2PrefixFilter(None, v, "n")]),
    language=["no", "no way"],
    profile="quick",
    examples=trials(10, 4),
)
def test_laws_of_all_of(law):
    law()


@filter_laws(
    lambda v: AnyOf([select(v, "yes", "no"), select(v, "no way", "yes")]),
    language=["yes", "no", "no way"],
    profile="quick",
    examples=trials(10, 4),
)
def test_laws_of_any_of(law):
    law()


@filter_laws(lambda v: TriggeredFilter(select(v, "yes", "no"), on="the"), profile="quick", examples=trials(10, 4))
def test_laws_of_triggered(law):
    law()


@filter_laws(lambda v: BanFilter(None, v, texts=["the", "😀"]), profile="quick", examples=trials(10, 4))
def test_laws_of_ban(law):
    law()


@filter_laws(lambda v: LengthFilter(None, v, 2, 4), profile="quick", examples=trials(10, 4))
def test_laws_of_length(law):
    law()


LETTERS = [*"abcdefghijklmnopqrstuvwxyz <>", "the", "<think>", "</think>", "yes", "no", "</s>"]
V = Vocabulary(LETTERS, eos_token_id=len(LETTERS) - 1, special_ids=[LETTERS.index("<think>"), len(LETTERS) - 1])
assert V.eos_token_id is not None
EOS = V.eos_token_id


def stack(*filters):
    return FilterStack(filters, vocab_size=V.size, stop_ids=[EOS])


def spelled(s, *pieces):
    return [s.feed(LETTERS.index(p)) for p in pieces]


def pieces(s):
    mask = s.next_mask()
    return None if mask is None else {LETTERS[i] for i in bits.to_ids(mask)}


@pytest.mark.covers("filters: triggers")
@pytest.mark.parametrize("on", ["</think>", LETTERS.index("</think>")])
def test_a_schema_that_holds_after_the_thinking(on):
    s = stack(TriggeredFilter(select(V, "yes", "no"), on=on))
    s.begin()
    assert pieces(s) is None
    spelled(s, "h", "m", "yes")
    assert pieces(s) is None
    spelled(s, "</think>")
    assert pieces(s) == {"y", "yes", "n", "no"}
    s.rewind(1)
    assert pieces(s) is None
    assert spelled(s, "</think>", "n") == [False, False]
    assert pieces(s) == {"o"}
    assert spelled(s, "o") == [True]
    s.rewind(1)
    assert pieces(s) == {"o"}


def test_a_cue_spelled_in_other_tokens():
    s = stack(TriggeredFilter(select(V, "yes"), on="the"))
    spelled(s, "t", "t", "h", "e")
    assert pieces(s) == {"y", "yes"}


def test_a_cue_inside_a_token_is_not_missed():
    letters = ["t", "h", "e\n\n", "yes", " the end", "</s>"]
    v = Vocabulary(letters, eos_token_id=5, special_ids=[5])
    s = FilterStack([TriggeredFilter(select(v, "yes"), on="the")], vocab_size=6, stop_ids=[5])
    for path in ([0, 1, 2], [4], [0, 1, 1, 4]):
        s.begin()
        for token in path:
            assert s.next_mask() is None
            s.feed(token)
        assert mask_ids(s) == [3]


@pytest.mark.covers("filters: triggers")
@pytest.mark.parametrize("after", ["release", "rearm"])
def test_the_part_after_a_sequence(after):
    s = stack(TriggeredFilter(select(V, "no"), on="the", after=after))
    assert spelled(s, "the", "no") == [False, False]
    assert pieces(s) is None
    spelled(s, "the")
    assert pieces(s) == (None if after == "release" else {"n", "no"})
    template = TriggeredFilter(select(V, "no"), on="the", after=after)
    first, second = stack(template), stack(template)
    spelled(first, "the")
    assert pieces(second) is None


@pytest.mark.covers("filters: combinators")
def test_any_of_goes_on_with_those_that_fit():
    s = stack(AnyOf([select(V, "no"), select(V, "nose", "yes")]))
    assert pieces(s) == {"n", "no", "y", "yes"}
    assert spelled(s, "no") == [False]
    assert pieces(s) == {"s", "</s>"}
    assert spelled(s, "s", "e") == [False, True]
    s.rewind(3)
    assert spelled(s, "yes") == [True]


@pytest.mark.covers("filters: combinators")
def test_slots_rotate():
    s = stack(TokenSetFilter(None, V, [[0, 1], [2, EOS - 1]]))
    assert pieces(s) == {"a", "b"}
    s.feed(0)
    assert pieces(s) == {"c", "no"}
    s.feed(2)
    assert pieces(s) == {"a", "b", "</s>"}
    s = stack(TokenSetFilter(None, V, [[0], [1]], cycle=False))
    assert [s.feed(0), s.feed(1)] == [False, True]
    assert pieces(stack(TokenSetFilter(None, V, [3, 4]))) == {"d", "e"}


@pytest.mark.covers("filters: combinators")
@given(st.lists(st.sampled_from(["ab", "ba", "a", "b", "c", "abc", "aab"]), max_size=8))
def test_banned_texts_never_arise(path):
    v = Vocabulary(["ab", "ba", "a", "b", "c", "abc", "aab", "</s>"], eos_token_id=7, special_ids=[7])
    f = BanFilter(None, v, ids=[4], texts=["aba", "bb"])
    text = ""
    for piece in path:
        allowed = {v.piece(i) for i in allowed_ids(f)} - {"</s>"}
        expected = {p for p in ("ab", "ba", "a", "b", "abc", "aab") if "aba" not in text + p and "bb" not in text + p}
        assert allowed == expected
        if piece not in allowed:
            return
        f.feed(next(i for i in range(8) if v.piece(i) == piece))
        text += piece


@pytest.mark.covers("filters: combinators")
def test_length_limits():
    s = stack(LengthFilter(None, V, 1, 2))
    assert "</s>" not in pieces(s)
    s.feed(0)
    assert pieces(s) is None
    s.feed(0)
    assert pieces(s) == {"</s>"}
    s = stack(LengthFilter(None, V, 0, 1), select(V, "abc"))
    s.feed(0)
    with pytest.raises(FilterDeadEnd):
        s.next_mask()


@pytest.mark.parametrize(
    "make",
    [
        lambda: AllOf([]),
        lambda: TriggeredFilter(select(V, "a"), on=""),
        lambda: TriggeredFilter(select(V, "a"), on="a", after="never"),  # type: ignore[arg-type]
        lambda: TokenSetFilter(None, V, [[]]),
        lambda: TokenSetFilter(None, V, [V.size]),
        lambda: BanFilter(None, V),
        lambda: BanFilter(None, V, texts=[""]),
        lambda: LengthFilter(None, V, 3, 2),
    ],
)
def test_bad_arguments(make):
    with pytest.raises(FilterCompileError):
        make()


@pytest.mark.covers("filters: specs")
@pytest.mark.parametrize(
    "f", [TokenSetFilter(None, V, [[0], [1]]), BanFilter(None, V, [3], ["ab"]), LengthFilter(None, V, 1, 2)]
)
def test_specs(f):
    assert from_spec(f.spec(), V).next() == f.next()
    assert re.match(r"\w+", f.describe())
