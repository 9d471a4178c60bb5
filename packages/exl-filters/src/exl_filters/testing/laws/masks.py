"""LAW-16 to LAW-18, LAW-20: masks agree with next(), and combine."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from exl_filters import bits
from exl_filters.base import ExLlamaV2Filter, overrides
from exl_filters.combine import AllOf
from exl_filters.errors import FilterDeadEnd
from exl_filters.foreign import copy_of_foreign
from exl_filters.host import FilterStack
from exl_filters.testing.case import Case
from exl_filters.testing.laws.law import law

__all__: list[str] = []


def _width(case: Case) -> int:
    size = case.vocabulary.size
    return int(case.draw(st.sampled_from([size, size + 1, (size + 31) // 32 * 32, size + 64])))


def _logits(case: Case, width: int) -> Any:
    values = np.linspace(-3, 3, width)
    return values.astype(case.draw(st.sampled_from([np.float32, np.float16])))


@law(16, needs=["mask_logits"])
def mask_equal(case: Case) -> None:
    """mask_logits() leaves what next() allows, with its value."""
    f = case.make()
    case.walk(f, 5)
    f = _elsewhere(case, f)
    allowed, _ = case.next(f)
    if allowed is None:
        return
    logits = _logits(case, _width(case))
    before = logits.copy()
    case.note(f"{case.of(f)}.prepare_logit_mask(); mask_logits({logits.dtype}[{len(logits)}])")
    case.expect(f.prepare_logit_mask() is True, "prepare_logit_mask() did not return True")
    out = f.mask_logits(logits)
    case.equal(out.shape, before.shape, "shape")
    finite = frozenset(np.flatnonzero(np.isfinite(out)).tolist())
    case.equal(finite, allowed, "the mask leaves other ids than next() allows")
    kept = sorted(finite)
    case.expect(bool((out[kept] == before[kept]).all()), "the mask changed the value of an allowed entry")


def _elsewhere(case: Case, f: Any) -> Any:
    """Prepare a mask, then change the state: rewind, or continue with a clone."""
    f.prepare_logit_mask()
    how = case.draw(st.sampled_from(["stay", "rewind", "begin", "clone", "feed"]))
    if how == "clone":
        return case.clone(f)
    if how == "begin":
        case.begin(f, "")
    token = None if case.over or case.ended(f) else case.choose(f)
    if how in ("feed", "rewind") and token is not None:
        case.feed(f, token)
        if how == "rewind" and overrides(f, "rewind"):
            f.prepare_logit_mask()
            case.note(f"{case.of(f)}.prepare_logit_mask(); rewind(1)")
            f.rewind(1)
    return f


@law(17, needs=["mask_logits"])
def mask_pure(case: Case) -> None:
    """Masking changes no state, is idempotent, and revives nothing."""
    f = case.make()
    case.walk(f, 5)
    before = case.next(f)
    logits = _logits(case, _width(case))
    dead = list(range(0, len(logits), 3))
    logits[dead] = -np.inf
    f.prepare_logit_mask()
    once = np.array(f.mask_logits(logits.copy()))
    twice = np.array(f.mask_logits(once.copy()))
    case.expect(bool(np.array_equal(once, twice)), "masking twice is not masking once")
    case.expect(not np.isfinite(once[dead]).any(), "masking made an excluded entry finite")
    case.equal(case.next(f), before, "masking changed the state")


@law(18, needs=["fill_bitmask"])
def bitmask(case: Case) -> None:
    """fill_bitmask() writes exactly what next() allows."""
    f = case.make()
    width = bits.word_count(_width(case))
    if case.draw(st.booleans()):
        case.walk(f, 5)
        if case.over or case.ended(f):
            return
    for _ in range(4):
        allowed, ends = case.next(f)
        words = np.full(width, case.draw(st.sampled_from([0, -1, 0x5A5A5A5A])), dtype=np.int32)
        case.note(f"{case.of(f)}.fill_bitmask(int32[{len(words)}] of {int(words[0])})")
        spoke = f.fill_bitmask(words)
        case.equal(bool(spoke), allowed is not None, "fill_bitmask() returned")
        if allowed is not None:
            case.equal(frozenset(bits.to_ids(words)), allowed, "the bits are not what next() allows")
        token = case.choose(f)
        if token is None:
            return
        case.feed(f, token)
        if token in ends:
            return


@law(20)
def intersection(case: Case) -> None:
    """Filters combine in any order, with themselves, and with one that has no opinion."""
    f = case.make()
    path = case.walk(f, 4)
    token = case.choose(f)
    if token is not None and case.is_terminal(f, token):
        token = None
    one, two = _template(f), _template(case.make())
    other = _Only(case.draw(st.frozensets(st.integers(0, case.vocabulary.size - 1), min_size=1)) | {*path, token or 0})
    plain = _allowed(case, [one], path)
    case.equal(_allowed(case, [one, two], path), plain, "f AND f is not f")
    case.equal(_allowed(case, [_Silent(), one], path), plain, "no opinion AND f is not f")
    both = _allowed(case, [one, other], path)
    case.equal(_allowed(case, [other, one], path), both, "f AND g is not g AND f")
    if isinstance(plain, frozenset):
        kept = frozenset(plain & other.ids)
        case.equal(both, kept or "dead end", "f AND g is not the intersection")
    third = _Only(case.draw(st.frozensets(st.integers(0, case.vocabulary.size - 1), min_size=1)) | {*path, token or 0})
    three = _allowed(case, [one, other, third], path)
    case.equal(_allowed(case, [third, one, other], path), three, "f AND g AND h depends on the order")
    # An ended filter ends the AllOf that it is part of, while the other filters of a stack keep their opinion.
    if plain is not None and isinstance(one, ExLlamaV2Filter) and one.native and one.tokenizer is not None:
        other.tokenizer = third.tokenizer = one.tokenizer
        left, right = AllOf([AllOf([one, other]), third]), AllOf([one, AllOf([other, third])])
        case.equal(_allowed(case, [left], path), three, "(f AND g) AND h is not f AND g AND h")
        case.equal(_allowed(case, [right], path), three, "f AND (g AND h) is not f AND g AND h")


class _Silent(ExLlamaV2Filter):
    native = True

    def begin(self, prefix_str: Any = "") -> None: ...

    def feed(self, token: Any) -> None: ...

    def next(self) -> Any:
        return None, set()


class _Only(_Silent):
    """Always allows the same ids."""

    def __init__(self, ids: frozenset[int]) -> None:
        super().__init__()
        self.ids = ids

    def next(self) -> Any:
        return sorted(self.ids), set()


def _template(f: Any) -> Any:
    """Return the filter as a host would take it: the object, or a copy where the object is in use."""
    if isinstance(f, ExLlamaV2Filter) and not f.native:
        try:
            return copy_of_foreign(f)
        except ValueError:
            return f
    return f


def _allowed(case: Case, filters: list[Any], path: list[int]) -> Any:
    case.note(f"FilterStack of {[type(f).__name__ for f in filters]} fed {path}")
    with FilterStack(filters, vocab_size=case.vocabulary.size, stop_ids=case.stops) as stack:
        stack.begin("")
        try:
            for token in path:
                stack.feed(token)
            mask = stack.next_mask()
        except FilterDeadEnd:
            return "dead end"
        return None if mask is None else frozenset(bits.to_ids(mask))
