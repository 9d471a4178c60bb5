"""LAW-05 to LAW-11, LAW-31, LAW-33, LAW-34: the state changes only in defined calls, and in the defined way."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from exl_filters import bits
from exl_filters.base import ExLlamaV2Filter
from exl_filters.context import FilterContext
from exl_filters.errors import FilterError, FilterRejected
from exl_filters.testing.case import Case, shown_context
from exl_filters.testing.child import answers_elsewhere, traveller
from exl_filters.testing.laws.law import law
from exl_filters.tokens import fed_token

__all__: list[str] = []

PREFIXES = st.sampled_from(["", "a", "th", " "])


class _OneElement(np.ndarray[Any, Any]):
    """An array of one element that converts to an int, as a tensor of one element does and numpy's arrays do not."""

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return int(self.item())


@law(5)
def idempotent(case: Case) -> None:
    """Asking twice gives the same answer."""
    f = case.make()
    case.walk(f)
    first = case.next(f)
    if case.can(f, "prepare_logit_mask"):
        case.note(f"{case.of(f)}.prepare_logit_mask()")
        f.prepare_logit_mask()
    case.equal(case.next(f), first, "the second answer differs")


@law(6, examples=0.5)
def deterministic(case: Case) -> None:
    """Equal paths give equal answers in any instance and process."""
    one, other = case.make(), case.make()
    path = case.walk(one)
    answers = []
    for token in path:
        answers.append(case.next(other))
        case.feed(other, token)
    answers.append(case.next(other))
    case.equal(case.next(one), answers[-1], "two instances disagree after the same tokens")
    if not isinstance(one, ExLlamaV2Filter):
        return
    packed = traveller(case.factory, case.vocabulary, case.make())
    elsewhere = answers_elsewhere(packed, case.context, path) if packed is not None else None
    if elsewhere is None:
        return
    case.note("# the same in another process, with another PYTHONHASHSEED")
    case.expect(not isinstance(elsewhere, str), f"in another process the filter raised {elsewhere}")
    for here, (allowed, ends) in zip(answers, elsewhere, strict=True):
        there = (None if allowed is None else frozenset(allowed), frozenset(ends))
        case.equal(there, here, "another process answers differently")


@law(7, level="should")
def observation_free(case: Case) -> None:
    """Feeding without asking leads to the same state."""
    asked, unasked = case.make(), case.make()
    for token in case.walk(asked):
        case.feed(unasked, token)
    case.equal(case.next(unasked), case.next(asked), "the state depends on whether next() was called")


@law(8)
def begin_resets(case: Case) -> None:
    """begin() gives the state of a fresh instance."""
    used = case.make()
    path = case.walk(used)
    if case.draw(st.booleans()) and path:
        _tolerant_feed(case, used, min(case.stops, default=0))
    _mask(used, case)
    context = None
    if callable(getattr(used, "attach", None)) and case.draw(st.booleans()):
        # As when another host uses the filter again and stops on other ids.
        v = case.vocabulary
        others = {frozenset({min(v.special_ids)}), frozenset({max(v.special_ids)}), v.special_ids} - {v.stop_ids}
        stops = case.draw(st.sampled_from(sorted(others, key=sorted)))
        context = FilterContext.make(v.size, stops, v.special_ids)
        case.note(f"{case.of(used)}.attach({shown_context(context)})")
        used.attach(context)
    prefix = case.draw(PREFIXES) if context is None else ""
    case.begin(used, prefix)
    fresh = case.make(prefix, context=context)
    after = f"begin({prefix!r}) after {len(path)} tokens"
    case.equal(_mask(used, case), _mask(fresh, case), f"the mask of {after} is not that of a fresh begin")
    case.equal(case.next(used), case.next(fresh), f"{after} is not a fresh begin")
    more = case.stride(used, to_the_end=True) if context is not None else case.walk(used, 5)
    for token in more:
        case.feed(fresh, token)
    case.equal(case.next(used), case.next(fresh), f"{len(more)} tokens after {after}")


@law(9)
def feed_total(case: Case) -> None:
    """An allowed token is never refused, as int or as tensor."""
    f = case.make()
    path = case.walk(f)
    allowed, _ = case.next(f)
    if _over(case, f, path):
        return
    tokens = case.ordinary() if allowed is None else sorted(allowed)
    if not tokens:
        return
    longest = max(tokens, key=lambda i: len(case.vocabulary.bytes_of(i)))
    for token in {longest, case.draw(st.sampled_from(tokens)), tokens[-1]}:
        g = case.make()
        for earlier in path:
            case.next(g)
            case.feed(g, earlier)
        case.next(g)
        form = case.draw(st.sampled_from(["int", "wrapped", "array"]))
        case.note(f"{case.of(g)}.feed({token} as {form})")
        given: Any = {"int": token, "wrapped": fed_token(token), "array": np.array([[token]]).view(_OneElement)}[form]
        try:
            g.feed(given)
        except Exception as error:
            what = f"feeding the allowed {case.show_id(token)} as {form} raised {type(error).__name__}: {error}"
            case.expect(False, what)


@law(10, level="should")
def feed_rejects(case: Case) -> None:
    """A token that is not allowed is refused and changes nothing."""
    f = case.make()
    path = case.walk(f)
    before = case.next(f)
    if before[0] is None or _over(case, f, path):
        return
    others = [i for i in range(case.vocabulary.size) if i not in before[0]]
    if not others:
        return
    token = case.draw(st.sampled_from(others))
    try:
        case.feed(f, token)
    except FilterRejected:
        pass
    except Exception as error:
        case.expect(False, f"refusing {case.show_id(token)} raised {type(error).__name__}, not FilterRejected")
    else:
        # For masks narrowed to the canonical tokens, the filter documents that it takes another spelling.
        tolerated = "canonical_only" in case.capabilities
        case.expect(tolerated, f"{case.show_id(token)} is not allowed and was accepted")
        return
    case.equal(case.next(f), before, "a refused token changed the state")


@law(11)
def terminal_feeds(case: Case) -> None:
    """After the end, stop and pad tokens are taken without complaint."""
    f = case.make()
    path = case.walk(f, 12)
    allowed, _ = case.next(f)
    if not _over(case, f, path):
        stops = sorted(case.stops & allowed) if allowed is not None else sorted(case.stops)
        if not stops:
            return
        case.feed(f, case.draw(st.sampled_from(stops)))
    for token in [*sorted(case.stops), case.vocabulary.pad_token_id, -1]:
        if token is None:
            continue
        try:
            case.feed(f, token)
        except Exception as error:
            case.expect(False, f"after the end, feeding {token} raised {type(error).__name__}: {error}")


@law(31, needs=["rewind"])
def rewind(case: Case) -> None:
    """rewind(n) undoes n feeds, also across the end."""
    f = case.make()
    path = case.walk(f, 6, deep=2)
    again = case.make()
    trace, claims = [case.next(again)], [_claims(again)]
    for token in path:
        case.feed(again, token)
        trace.append(case.next(again))
        claims.append(_claims(again))
    extra = case.draw(st.integers(0, 2)) if _over(case, f, path) else 0
    for _ in range(extra):
        case.feed(f, min(case.stops, default=-1))
    n = case.draw(st.integers(0, len(path)))
    if len(path) > 8 and case.draw(st.integers(0, 3)):
        n = len(path) - n
    _mask(f, case)
    _rewind(case, f, n + extra)
    if case.draw(st.booleans()):
        # Compared first, so that the mask is not brought up to date by next().
        case.equal(_mask(f, case), _mask(_at(case, path[: len(path) - n]), case), f"the mask after rewind({n + extra})")
    case.equal(case.next(f), trace[len(path) - n], f"after rewind({n + extra})")
    case.equal(_claims(f), claims[len(path) - n], f"ended() and is_complete() after rewind({n + extra})")
    for token in path[len(path) - n :]:
        case.feed(f, token)
    case.equal(case.next(f), trace[-1], "after feeding the rewound tokens again")
    try:
        f.rewind(len(path) + 1)
    except FilterError:
        case.equal(case.next(f), trace[-1], "a refused rewind changed the state")
    else:
        case.expect(False, f"rewind({len(path) + 1}) after {len(path)} tokens was accepted")


def _mask(f: Any, case: Case) -> tuple[bool, frozenset[int]] | None:
    """Return the mask of fill_bitmask(), or None where the filter does not override it."""
    if not case.can(f, "fill_bitmask"):
        return None
    words = np.full(bits.word_count(case.vocabulary.size), -1, dtype=np.int32)
    case.note(f"{case.of(f)}.fill_bitmask(int32[{len(words)}])")
    spoke = bool(f.fill_bitmask(words))
    return spoke, frozenset(bits.to_ids(words)) if spoke else frozenset()


def _at(case: Case, path: list[int]) -> Any:
    """Return a new filter that was fed these tokens."""
    f = case.make()
    for token in path:
        case.next(f)
        case.feed(f, token)
    return f


def _claims(f: Any) -> list[bool | None]:
    """Return the answers of ended() and is_complete(); None where the filter has no such method."""
    asked = (getattr(f, name, None) for name in ("ended", "is_complete"))
    return [bool(ask()) if callable(ask) else None for ask in asked]


def _rewind(case: Case, f: Any, n: int) -> None:
    case.note(f"{case.of(f)}.rewind({n})")
    f.rewind(n)


@law(33, needs=["validate"])
def validate(case: Case) -> None:
    """validate() counts what may follow and changes nothing."""
    f, judge = case.make(), case.make()
    path = case.walk(f, 4)
    for token in path:
        case.feed(judge, token)
    if _over(case, f, path):
        return
    allowed, _ = case.next(f)
    likely = sorted(allowed) if allowed else case.ordinary()
    if not likely:
        return
    any_id = st.one_of(st.sampled_from(likely), st.integers(0, case.vocabulary.size - 1))
    draft = [case.draw(st.sampled_from(likely)), *case.draw(st.lists(any_id, max_size=2))]
    expected = 0
    for token in draft:
        allowed, ends = case.next(judge)
        if allowed is not None and token not in allowed:
            break
        if allowed is None and not case.vocabulary.is_defined(token):
            return
        expected += 1
        if token in ends or token in case.stops:
            break
        case.feed(judge, token)
        if callable(getattr(judge, "ended", None)) and judge.ended():
            break
    before = case.next(f)
    case.note(f"{case.of(f)}.validate({draft})")
    case.equal(f.validate(draft), expected, f"validate({draft})")
    case.equal(case.next(f), before, "validate() changed the state")


@law(34, needs=["forced"])
def forced(case: Case) -> None:
    """forced() is how every continuation begins."""
    f = case.make()
    path = case.walk(f, 4)
    if _over(case, f, path):
        return
    case.note(f"{case.of(f)}.forced()")
    must = f.forced()
    before = case.next(f)
    text = case.text(case.walk(f, 6))
    length = min(len(text), len(must))
    case.equal(text[:length], must[:length], "a permitted continuation does not begin with forced()")
    if must and not text and before[0] is not None:
        case.expect(not before[0] & case.stops, f"{must!r} is forced, and a stop token is allowed")


def _over(case: Case, f: Any, path: list[int]) -> bool:
    """Whether the constraint has ended on this path."""
    ended = getattr(f, "ended", None)
    if callable(ended) and ended():
        return True
    if not path:
        return False
    if path[-1] in case.stops:
        return True
    # For filters that only list their ends: replay the last step.
    judge = case.make()
    for token in path[:-1]:
        case.next(judge)
        case.feed(judge, token)
    return path[-1] in case.next(judge)[1]


def _tolerant_feed(case: Case, f: Any, token: int) -> None:
    """Feed a token and ignore a rejection."""
    try:
        case.feed(f, token)
    except Exception:
        case.note("# refused")
