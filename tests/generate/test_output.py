"""Detokenizer, stop strings and banned strings against brute force on the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl_generate.dynamic.detokenize import PieceTable, decode_incremental
from exl_generate.dynamic.output import Match, Record, TextStream
from exl_generate.dynamic.stopping import Automaton

ALPHABET = "abAé😀"
texts = st.text(ALPHABET, max_size=30)
patterns = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4)


@st.composite
def cut_bytes(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """Tokens that spell `data`, cut anywhere, also inside characters; some are empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@given(st.data(), st.binary(max_size=30))
def test_any_split_decodes_like_the_whole(data: st.DataObject, raw: bytes) -> None:
    text, pending = "", b""
    for piece in data.draw(cut_bytes(raw)):
        new, pending = decode_incremental(pending, piece)
        assert len(pending) <= 3
        text += new
    text += decode_incremental(pending, b"", final=True)[0]
    assert text == raw.decode(errors="replace")


def first_completed(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The stop string that is completed first, the longest of several: by looking at every prefix of the text."""
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            longest = max(done, key=len)
            return end - len(longest), longest
    return None


@given(texts, patterns)
@pytest.mark.covers("generators: stop-strings")
def test_automaton_finds_the_first_completed_pattern(text: str, stops: list[str]) -> None:
    automaton, state = Automaton(stops), 0
    want = first_completed(text, stops)
    for end, character in enumerate(text, 1):
        state = automaton.step(state, character)
        if size := automaton.match_length(state):
            assert want == (end - size, automaton.matched(state))
            return
        longest_prefix = max((n for s in stops for n in range(len(s)) if text[:end].endswith(s[:n])), default=0)
        assert automaton.depth[state] == longest_prefix
    assert want is None


@given(st.data(), texts, patterns)
@pytest.mark.covers("generators: stop-strings")
def test_stream_never_shows_part_of_a_stop_string(data: st.DataObject, text: str, stops: list[str]) -> None:
    pieces = data.draw(cut_bytes(text.encode()))
    stream = TextStream(PieceTable(pieces), Automaton(stops), Automaton([]))
    want = first_completed(text, stops)
    shown, tokens = "", 0
    for token in range(len(pieces)):
        match = stream.push(Record(token))
        if match is not None:
            assert want is not None
            released, held = stream.stop_at(match)
            assert shown + released.text == text[: want[0]] == stream.full_text
            assert held.startswith(match.string)
            assert match == Match("stop", want[1], want[0])
            assert tokens + len(released.records) == token + 1
            return
        released = stream.release()
        shown += released.text
        tokens += len(released.records)
        assert text.startswith(shown)
    released = stream.flush()
    assert want is None
    assert shown + released.text == text
    assert tokens + len(released.records) == len(pieces)


@given(st.data(), texts, patterns.filter(bool))
@pytest.mark.covers("generators: banned-strings")
def test_a_withdrawn_token_leaves_the_stream_as_if_it_had_never_come(
    data: st.DataObject, text: str, bans: list[str]
) -> None:
    pieces = data.draw(cut_bytes(text.encode()))
    stream = TextStream(PieceTable(pieces), Automaton([]), Automaton(bans, fold=True))
    kept: list[int] = []
    shown = ""
    for token in range(len(pieces)):
        match = stream.push(Record(token))
        kept.append(token)
        if match is not None:
            gone, suppressed = stream.withdraw(match)
            assert match.string in bans
            assert match.string.lower() in suppressed.lower()
            assert [r.token for r in gone] == kept[len(kept) - len(gone) :]
            del kept[len(kept) - len(gone) :]
        shown += stream.release().text
        assert not any(b.lower() in shown.lower() for b in bans)
    fresh = TextStream(PieceTable(pieces), Automaton([]), Automaton(bans, fold=True))
    for token in kept:
        assert fresh.push(Record(token)) is None
    assert shown + stream.flush().text == fresh.flush().text


def test_bans_fold_case_and_keep_positions() -> None:
    automaton, state = Automaton(["İx", "STOP"], fold=True), 0
    for character in "a sToP":
        state = automaton.step(state, character)
    assert automaton.matched(state) == "STOP"
    assert automaton.match_length(state) == 4
