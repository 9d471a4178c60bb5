"""Prefix and Select against brute force over every token, and the reference's results on ASCII."""

import itertools

import pytest
from answers import mask_ids
from hypothesis import assume, given
from hypothesis import strategies as st

from exl_filters import (
    ExLlamaV2PrefixFilter,
    ExLlamaV2SelectFilter,
    FilterCompileError,
    FilterRejected,
    FilterStack,
    FilterUsageError,
    Vocabulary,
)

TEXTS = st.text(alphabet='abcßé😀İ{"', max_size=6)


@st.composite
def vocabularies(draw, all_bytes=True):
    words = draw(st.lists(TEXTS.map(str.encode), max_size=12))
    cuts = [w[i:j] for w in words[:4] for i in range(len(w)) for j in range(i + 1, len(w) + 1)]
    tokens = [bytes([i]) for i in range(256)] * all_bytes + words + draw(st.permutations(cuts))[:20] + [b"", None]
    return Vocabulary([*tokens, b"</s>"], eos_token_id=len(tokens), special_ids=[len(tokens)])


def allowed(f, v):
    ids, ends = f.next()
    return None if ids is None else set(ids) - v.stop_ids, set(ends) - v.stop_ids, bool(ids and v.stop_ids & set(ids))


def walk(draw, f, v, steps=8):
    """Feed permitted tokens at random; yields the text after each."""
    text = b""
    yield text
    for _ in range(steps):
        ids, _, _ = allowed(f, v)
        if not ids or f.ended():
            return
        token = draw(st.sampled_from(sorted(ids)))
        f.feed(token)
        text += v.bytes_of(token)
        yield text


@pytest.mark.covers("filters: prefix-select")
@given(st.data(), vocabularies(), st.lists(TEXTS, min_size=1, max_size=4), st.booleans(), st.booleans())
def test_select_allows_exactly_what_keeps_an_option_reachable(data, v, options, fold, first):
    f = ExLlamaV2SelectFilter(None, v, options, fold, policy="first" if first else "longest")

    def key(raw):
        return raw.decode("utf-8", "surrogateescape").casefold() if fold else raw

    wanted = [key(o.encode()) for o in options]
    if first:
        wanted = [w for w in wanted if not any(w != o and w.startswith(o) for o in wanted)]

    def possible(raw):
        if not fold:
            return any(w.startswith(raw) for w in wanted)
        whole, cut = raw, b""
        while whole and (not valid(whole)):
            whole, cut = whole[:-1], whole[-1:] + cut
        if len(cut) > 3:
            return False
        starts = [w[len(key(whole)) :] for w in wanted if w.startswith(key(whole))]
        if not cut:
            return bool(starts)
        return any(
            chr(c).encode().startswith(cut) and any(s.startswith(chr(c).casefold()) for s in starts)
            for c in [*map(ord, 'abcABCßẞséÉ😀iİİ{"ſS'), 0x307]
        )

    for text in walk(data.draw, f, v):
        whole = key(text) in wanted if valid(text) else False
        extendable = {i for i in range(v.size) if v.bytes_of(i) and possible(text + v.bytes_of(i))}
        ids, ends, stop = allowed(f, v)
        if f.ended():
            assert whole
            break
        assert ids == extendable
        assert stop == whole
        for token in ends:
            end = text + v.bytes_of(token)
            assert key(end) in wanted
            assert not any(possible(end + bytes([b])) for b in range(256))


def valid(raw):
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.covers("filters: prefix-select")
@given(st.data(), vocabularies(), st.lists(TEXTS, min_size=1, max_size=4), st.booleans())
def test_prefix_allows_exactly_what_reaches_a_prefix(data, v, strings, overshoot):
    f = ExLlamaV2PrefixFilter(None, v, strings, overshoot=overshoot)
    # The shorter of two nested prefixes decides: the longer one is never what is arrived at.
    wanted = [s.encode() for s in strings if not any(s != other and s.startswith(other) for other in strings)]
    for text in walk(data.draw, f, v):
        ids, ends, stop = allowed(f, v)
        assert not ends
        if any(text.startswith(w) for w in wanted):
            assert ids is None
            break
        assert not stop
        assert ids == {
            i
            for i in range(v.size)
            if v.bytes_of(i)
            and (
                any(w.startswith(text + v.bytes_of(i)) for w in wanted)
                or any((text + v.bytes_of(i)).startswith(w) for w in wanted if overshoot)
            )
        }


@pytest.mark.covers("filters: healing")
@given(vocabularies(), st.lists(TEXTS, min_size=1, max_size=3), TEXTS.filter(bool), st.booleans())
def test_healing_first_tokens_start_with_the_prefix(v, options, prefix, is_select):
    kind = ExLlamaV2SelectFilter if is_select else ExLlamaV2PrefixFilter
    assume(is_select or "" not in options)
    fresh, healed = kind(None, v, options), kind(None, v, options)
    healed.begin(prefix)
    raw = prefix.encode()
    # A surplus counts as allowed when some way of spelling it is: with all bytes present, when it is a reachable text.
    wanted = {i for i in range(v.size) if v.bytes_of(i).startswith(raw) and reachable(fresh, v.bytes_of(i)[len(raw) :])}
    ids, _, stop = allowed(healed, v)
    assert not stop
    if wanted:
        assert ids == wanted
        healed.feed(min(wanted))
        surplus = v.bytes_of(min(wanted))[len(raw) :]
        fresh.begin("")
        for byte in surplus:
            fresh.feed(byte)
        assert healed.next()[0] == fresh.next()[0]
    else:
        assert ids == {i for i in range(v.size) if v.bytes_of(i) and raw.startswith(v.bytes_of(i))}


def reachable(f, text):
    f.begin("")
    for i, byte in enumerate(text):
        ids, _ = f.next()
        if ids is None:
            return True
        if byte not in ids or (f.ended() and i < len(text)):
            return False
        f.feed(byte)
    return True


LETTERS = [*"abcdefghijklmnopqrstuvwxyzTY", "ca", "cat", "Th", "The", "Then", "yes", "Yes", "YES", '{"', "{", "[", "[_"]
PLAIN = Vocabulary([*LETTERS, "</s>"], eos_token_id=len(LETTERS), special_ids=[len(LETTERS)])


def pieces(ids):
    return {PLAIN.piece(i) for i in ids}


@pytest.mark.covers("filters: prefix-select")
def test_reference_results_on_ascii():
    f = ExLlamaV2SelectFilter(None, PLAIN, ["cat", "catalog"], policy="first")
    ids, ends = f.next()
    assert pieces(ids) == {"c", "ca", "cat"}
    assert pieces(ends) == {"cat"}
    f = ExLlamaV2SelectFilter(None, PLAIN, ["yes"], True)
    assert pieces(f.next()[1]) == {"yes", "Yes", "YES"}
    prefix = ExLlamaV2PrefixFilter(None, PLAIN, ["{", "["])
    assert pieces(prefix.next()[0]) == {"{", '{"', "[", "[_"}
    assert prefix.next()[1] == set()
    prefix.feed(LETTERS.index('{"'))
    assert prefix.next() == (None, set())
    assert prefix.current_prefixes == {"{"}
    assert prefix.current_str == '{"'


def test_nested_options_leave_the_longer_reachable():
    f = ExLlamaV2SelectFilter(None, PLAIN, ["cat", "catalog"])
    f.feed(LETTERS.index("cat"))
    assert f.is_complete()
    assert not f.ended()
    ids, ends = f.next()
    assert pieces(ids) == {"a", "</s>"}
    assert ends == {PLAIN.eos_token_id}
    for letter in "alog":
        f.feed(LETTERS.index(letter))
    assert f.ended()
    assert f.sequence_str == "catalog"
    assert f.next() == ([PLAIN.eos_token_id], {PLAIN.eos_token_id})


def test_an_empty_option_is_complete_at_once():
    f = ExLlamaV2SelectFilter(None, PLAIN, [""])
    assert f.next() == ([PLAIN.eos_token_id], {PLAIN.eos_token_id})
    assert f.is_complete()


def test_a_mismatch_is_refused_and_changes_nothing():
    for f in (ExLlamaV2PrefixFilter(None, PLAIN, "abc"), ExLlamaV2SelectFilter(None, PLAIN, ["abc"])):
        with pytest.raises(FilterRejected):
            f.feed(LETTERS.index("x"))
        with pytest.raises(FilterRejected):
            f.feed(PLAIN.eos_token_id)
        assert pieces(f.next()[0]) == {"a"}


@pytest.mark.covers("filters: prefix-select")
def test_emoji_is_reached_over_split_tokens():
    tokens: list[str | bytes] = ["😀".encode()[:2], "😀".encode()[2:], "😀!", "!"]
    v = Vocabulary([*tokens, "</s>"], eos_token_id=4, special_ids=[4])
    s = FilterStack([ExLlamaV2SelectFilter(None, v, ["😀!"])], vocab_size=5, stop_ids=[4])
    assert mask_ids(s) == [0, 2]
    assert [s.feed(t) for t in (0, 1, 3)] == [False, False, True]


@pytest.mark.parametrize("bad", [[], "yes", [1], [None]])
def test_options_are_checked_by_the_constructor(bad):
    with pytest.raises(FilterCompileError):
        ExLlamaV2SelectFilter(None, PLAIN, bad)
    if bad != "yes":
        with pytest.raises(FilterCompileError):
            ExLlamaV2PrefixFilter(None, PLAIN, bad)


def test_without_a_tokenizer_the_error_says_what_is_missing():
    with pytest.raises(FilterUsageError, match="tokenizer"):
        ExLlamaV2SelectFilter(None, None, ["a"])


def test_prefix_and_select_together_end_in_a_named_dead_end_or_the_option():
    for options, ok in ((["yes"], True), (["Yes"], False)):
        s = FilterStack(
            [ExLlamaV2PrefixFilter(None, PLAIN, "y"), ExLlamaV2SelectFilter(None, PLAIN, options)],
            vocab_size=PLAIN.size,
            stop_ids=PLAIN.stop_ids,
        )
        assert s.allows(LETTERS.index("yes")) if ok else s.status.value == "dead"


@pytest.mark.covers("filters: rewind")
def test_rewind_at_random():
    f = ExLlamaV2SelectFilter(None, PLAIN, ["cat", "catalog", "yes"])
    trace = [f.next()]
    for token in ["c", "a", "t", "a", "log"[:1], "o", "g"]:
        f.feed(LETTERS.index(token))
        trace.append(f.next())
    f.feed(PLAIN.eos_token_id)
    f.feed(-1)
    fed = len(trace) + 1
    for n in itertools.chain([2], [1] * 7):
        f.rewind(n)
        fed -= n
        assert f.next() == trace[fed]
    with pytest.raises(FilterUsageError):
        f.rewind(1)


@pytest.mark.parametrize("strings", [None, [], [None], 5])
def test_prefixes_that_are_none_are_refused(strings):
    with pytest.raises(FilterCompileError, match="prefix_strings must be one string or some"):
        ExLlamaV2PrefixFilter(None, Vocabulary(["a"]), strings)


@given(st.data(), vocabularies(all_bytes=False), st.lists(TEXTS, min_size=1, max_size=4), st.booleans())
def test_select_refuses_exactly_the_options_that_no_tokens_spell(data, v, options, fold):
    tokens = {v.bytes_of(i) for i in range(v.size)} - {b"", None}

    def spelled(text):
        reached = {0}
        for at in range(len(text)):
            if at in reached:
                reached |= {at + len(token) for token in tokens if text.startswith(token, at)}
        return len(text) in reached

    def ways(text):
        """The text in every case that folds like it, as far as this alphabet goes."""
        spellings = {"a": "aA", "b": "bB", "c": "cC", "é": "éÉ"}
        cased = {"".join(way) for way in itertools.product(*(spellings.get(c, c) for c in text))}
        return {other.encode() for other in cased if other.casefold() == text.casefold()} | {text.encode()}

    assume(not fold or not any(c in "ßİ" for option in options for c in option))
    lost = [o for o in options if not any(map(spelled, ways(o) if fold else [o.encode()]))]
    if not lost:
        ExLlamaV2SelectFilter(None, v, options, fold)
        return
    with pytest.raises(FilterCompileError) as info:
        ExLlamaV2SelectFilter(None, v, options, fold)
    assert repr(lost[0]) in str(info.value)


def test_select_accepts_an_option_that_only_another_case_spells() -> None:
    v = Vocabulary(["Ye", "s", "</s>"], eos_token_id=2, special_ids=[2])
    assert allowed(ExLlamaV2SelectFilter(None, v, ["yes"], True), v)[0] == {0}
    with pytest.raises(FilterCompileError, match="'yes'"):
        ExLlamaV2SelectFilter(None, v, ["Yes", "yes"])
