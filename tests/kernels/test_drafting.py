"""Guesses from text: the native search against its plain twin, estimates, memory and wrong arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from exl_kernels.drafting import DraftHistory, DraftRates, DraftText
from exl_kernels.errors import DTypeError, UnsupportedError
from exl_kernels.reference import drafting as reference

TOKENS = st.integers(1, 4).flatmap(
    lambda most: st.lists(st.one_of(st.integers(0, most), st.just(1_000_000_000)), max_size=60)
)


def array(ids: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(ids, dtype=np.int64)


@examples(150, 15)
@given(
    text=TOKENS,
    others=st.lists(TOKENS, max_size=3),
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    max_ngram=st.integers(2, 9),
    shortest=st.integers(1, 3),
    threshold=st.integers(1, 3),
    fallback=st.booleans(),
)
def test_guesses_are_those_of_the_twin(
    text: list[int],
    others: list[list[int]],
    cuts: list[int],
    max_ngram: int,
    shortest: int,
    threshold: int,
    fallback: bool,
) -> None:
    rates, native, shared = DraftRates(), DraftText(max_ngram, 1000), DraftHistory(max_ngram, 1000)
    rules: dict[str, Any] = {"shortest": shortest, "threshold": threshold, "fallback": fallback}
    end, known = 0, list[list[int]]()
    for at, more in enumerate(cuts):
        end = min(len(text), end + more)
        assert native.follow(array(text[:end]), rates)
        if at < len(others):
            shared.append(array(others[at]))
            shared.cut()
            known.append(others[at])
        tokens, chances = native.guess(5, rates, shared, **rules)
        assert tokens == reference.guesses(text[:end], 5, max_ngram, known, **rules)
        assert len(chances) == len(tokens)
        assert all(0 < later <= earlier <= 1 for earlier, later in zip([1.0, *chances], chances, strict=False))


@examples(100, 10)
@given(TOKENS, st.lists(st.tuples(st.integers(0, 8), TOKENS), max_size=4), st.integers(2, 9))
def test_a_text_whose_end_was_withdrawn_continues(
    text: list[int], changes: list[tuple[int, list[int]]], max_ngram: int
) -> None:
    """The guess continues an end that the withdrawn text or the present one had before."""
    rates, native, versions = DraftRates(), DraftText(max_ngram, 4000), [text]
    native.follow(array(text), rates)
    for gone, more in changes:
        text = [*text[: max(0, len(text) - gone)], *more]
        versions.append(text)
        assert native.follow(array(text), rates)
        assert native.read == len(text)
        for token in native.guess(1, rates)[0]:
            assert any(token in version for version in versions)
            assert any(
                version[at] == token and version[at - 1 : at] == text[-1:]
                for version in versions
                for at in range(1, len(version))
            )


def test_a_budget_spreads_the_reading_of_a_long_text() -> None:
    rates, native, text = DraftRates(), DraftText(4, 10_000), array([1, 2, 3, 4] * 500)
    parts = 0
    while not native.follow(text, rates, budget=300):
        parts += 1
        assert native.read == 300 * parts
    assert parts == 6
    assert native.guess(3, rates)[0] == [1, 2, 3]


def test_a_history_forgets_its_oldest_texts() -> None:
    rates, shared = DraftRates(), DraftHistory(4, 1000)
    most = 0
    for number in range(100):
        shared.append(array([10 * number, 10 * number + 1, 10 * number + 2, *range(50_000, 50_097)]))
        shared.cut()
        assert shared.tokens <= 1000
        most = max(most, shared.memory)
    assert most < 400_000, "two automata of 500 tokens with spare capacity"

    def after(number: int) -> list[int]:
        native = DraftText(4, 1000)
        native.follow(array([10 * number, 10 * number + 1]), rates)
        return native.guess(1, rates, shared)[0]

    assert after(99) == [992]
    assert after(95) == [952]
    assert after(80) == []
    assert after(0) == []


def test_estimates_follow_the_accepted_guesses() -> None:
    rates = DraftRates()
    text = array([x for number in range(300) for x in (1, 2, 3, 1000 + number)])
    native = DraftText(8, 10_000)
    for end in range(1, len(text)):
        native.follow(text[:end], rates)
        tokens, chances = native.guess(4, rates)
    assert tokens[0] == 1299 - 1
    assert chances[0] < 0.1, "after 1, 2, 3 nothing has ever come again"
    native.follow(text, rates)
    tokens, chances = native.guess(4, rates)
    assert tokens == []  # the last token is new
    native.follow(array([*text.tolist(), 1]), rates)
    tokens, chances = native.guess(2, rates)
    assert tokens == [2, 3]
    assert chances[1] > 0.8


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2],
        None,
        "ab",
        np.array([1, 2], dtype=np.int32),
        np.array([1.0]),
        np.arange(10)[::2],
    ],
)
def test_ids_of_another_kind_are_rejected(ids: Any) -> None:
    with pytest.raises(DTypeError, match="int64"):
        DraftText(4, 10).follow(ids, DraftRates())
    with pytest.raises(DTypeError, match="int64"):
        DraftHistory(4, 10).append(ids)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DraftText(1, 10), "max_ngram is 1; it must be from 2 to 1024"),
        (lambda: DraftHistory(1025, 10), "max_ngram is 1025"),
        (lambda: DraftHistory(4, 0), "capacity is 0"),
        (lambda: DraftText(4, 1 << 40), "capacity is"),
        (lambda: DraftRates(0), "memory is 0"),
    ],
)
def test_numbers_out_of_range_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        make()


def test_negative_ids_end_a_text() -> None:
    rates, native = DraftRates(), DraftText(4, 100)
    native.follow(array([1, 2, 3, -1, 1, 2]), rates)
    assert native.guess(1, rates)[0] == [3]
    native.follow(array([1, 2, 3, -1, 1, 2, 3]), rates)
    assert native.guess(1, rates)[0] == []
