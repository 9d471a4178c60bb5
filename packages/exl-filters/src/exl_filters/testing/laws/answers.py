"""LAW-01 to LAW-04, LAW-19, LAW-21: the form of an answer of next()."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import strategies as st

from exl_filters.testing.case import Case
from exl_filters.testing.laws.law import law

__all__: list[str] = []


def _raw(case: Case) -> tuple[Any, Any, Any]:
    """Return a filter somewhere on a permitted path, and its raw answer."""
    f = case.make()
    case.walk(f)
    answer = f.next()
    case.expect(isinstance(answer, tuple) and len(answer) == 2, f"next() returned {answer!r:.80}, not a pair")
    return f, answer[0], answer[1]


@law(1)
def typing(case: Case) -> None:
    """next() is (None, set or list of ints; container of ints)."""
    _, allowed, ends = _raw(case)
    case.expect(
        allowed is None or isinstance(allowed, set | list),
        f"allowed is a {type(allowed).__name__}, not None, set or list",
    )
    case.expect(ends is not None, "end_tokens is None")
    case.expect(hasattr(ends, "__contains__"), f"end_tokens is a {type(ends).__name__}, which has no `in`")
    for what, ids in (("allowed", allowed or ()), ("end_tokens", ends)):
        wrong = [i for i in ids if type(i) is not int]
        case.expect(not wrong, f"{what} holds {wrong[:3]!r}, not ints")


@law(2)
def vocabulary(case: Case) -> None:
    """Allowed and end ids are defined ids of the vocabulary."""
    _, allowed, ends = _raw(case)
    for what, ids in (("allowed", allowed or ()), ("end_tokens", ends)):
        wrong = {i for i in ids if not case.vocabulary.is_defined(i)}
        case.expect(
            not wrong, f"{what} holds undefined ids {case.show(wrong)}; the vocabulary has {case.vocabulary.size}"
        )


@law(3)
def lists(case: Case) -> None:
    """A list is strictly ascending."""
    _, allowed, _ = _raw(case)
    if isinstance(allowed, list):
        bad = [pair for pair in itertools.pairwise(allowed) if pair[0] >= pair[1]]
        case.expect(not bad, f"the allowed list has {bad[:1]}, which is not ascending")


@law(4)
def ends_allowed(case: Case) -> None:
    """End ids are allowed ids."""
    _, allowed, ends = _raw(case)
    if allowed is None:
        case.expect(not ends, f"end_tokens {case.show(set(ends))} without an opinion")
    else:
        extra = set(ends) - set(allowed)
        case.expect(not extra, f"end_tokens {case.show(extra)} are not allowed")


@law(19)
def specials(case: Case) -> None:
    """Control tokens are not matched by their spelling."""
    _, allowed, _ = _raw(case)
    named = "names_specials" in case.capabilities
    matched = set(allowed or ()) & case.vocabulary.special_ids - case.stops
    case.expect(named or not matched, f"control ids {case.show(matched)} are allowed")


@law(21)
def no_dead_end(case: Case) -> None:
    """Something is allowed until the text is whole."""
    f = case.make()
    case.walk(f, 4, deep=2)
    if case.over or case.ended(f):
        return
    for _ in range(case.draw(st.integers(1, 6))):
        allowed, ends = case.next(f)
        case.expect(allowed is None or len(allowed) > 0, "nothing is allowed and nothing has ended")
        token = case.choose(f)
        if token is None:
            return
        terminal = token in ends or token in case.stops
        case.feed(f, token)
        if terminal:
            return
        if case.ended(f):
            return
