"""LAW-22 to LAW-28, LAW-32, LAW-35: the filter against an oracle, and against itself with other tokens."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from typing import Any

from hypothesis import strategies as st

from exl_filters.base import overrides
from exl_filters.testing.case import Case, Observed
from exl_filters.testing.languages import Language
from exl_filters.testing.laws.law import law
from exl_filters.vocabulary import Vocabulary

__all__: list[str] = []

# Limits of LAW-27's search for an end; beyond them the law is undecided.
MAX_EXPANDED = 90
MAX_CHAIN = 60
MAX_DIVE = 1000
# First bytes of tokens that are likely to lead to an end.
CLOSERS = b'"}])0a'


def _language(case: Case) -> Language:
    assert case.language is not None, "the law applies only with a language"
    return case.language


@law(22, oracle=True)
def sound(case: Case) -> None:
    """Only what keeps the text in the language is allowed."""
    language = _language(case)
    f = case.make()
    text = case.text(case.walk(f, 6, deep=2))
    allowed, _ = case.next(f)
    for token in sorted((allowed or frozenset()) - case.stops):
        raw = case.vocabulary.bytes_of(token)
        if raw:
            case.expect(
                language.prefix(text + raw) is not False, f"{case.show_id(token)} after {text!r} leaves {language.name}"
            )


@law(23, level="should", oracle=True, unless="canonical_only")
def complete(case: Case) -> None:
    """All that keeps the text in the language is allowed."""
    language = _language(case)
    f = case.make()
    path = case.walk(f, 6)
    allowed, _ = case.next(f)
    if allowed is None or case.ended(f):
        return
    text = case.text(path)
    for token in case.ordinary():
        if token not in allowed and token not in case.stops:
            raw = case.vocabulary.bytes_of(token)
            case.expect(
                language.prefix(text + raw) is not True,
                f"{case.show_id(token)} after {text!r} is of {language.name}, not allowed",
            )


@law(24, oracle=True, unless="canonical_only")
def reach(case: Case) -> None:
    """Every whole text can be reached by every tokenization."""
    language = _language(case)
    f = case.make()
    sentence: bytes = case.draw(language.sentences)
    done = 0
    ended_by_token = False
    while done < len(sentence):
        options = case.spellings(sentence, done) - case.stops
        if not options:
            return  # a vocabulary without all bytes
        token = case.draw(st.sampled_from(sorted(options)))
        allowed, ends = case.next(f)
        if allowed is None and language.opinion_ends:
            return
        case.expect(
            allowed is None or token in allowed,
            f"{case.show_id(token)} at {done} of the sentence {sentence!r} is not allowed",
        )
        ended_by_token = token in ends
        case.feed(f, token)
        done += len(case.vocabulary.bytes_of(token))
        if (ended_by_token or case.ended(f)) and done < len(sentence):
            case.expect(False, f"the constraint ended at {sentence[:done]!r}, before {sentence!r}")
    allowed, _ = case.next(f)
    case.expect(
        ended_by_token or case.ended(f) or allowed is None or bool(allowed & case.stops),
        f"after the whole sentence {sentence!r} the filter is neither at its end nor offers a stop token",
    )


@law(25, oracle=True)
def stop_only_when_whole(case: Case) -> None:
    """Stop and end tokens only where the text is whole."""
    language = _language(case)
    f = case.make()

    def check(text: bytes, answer: Observed) -> None:
        allowed, ends = answer
        if allowed is None:
            return
        whole = language.whole(text)
        complete = getattr(f, "is_complete", None)
        if callable(complete) and whole is False:
            case.expect(not complete(), f"is_complete() is true after {text!r}, not whole in {language.name}")
        if allowed & case.stops:
            case.expect(whole is not False, f"a stop token is allowed after {text!r}, not whole in {language.name}")
        for token in ends - case.stops:
            end = text + case.vocabulary.bytes_of(token)
            case.expect(
                language.whole(end) is not False, f"{case.show_id(token)} ends at {end!r}, not whole in {language.name}"
            )

    # Along the whole sentence, or at one place.
    along = case.deep and case.draw(st.integers(0, 4)) == 4
    path = case.stride(f, to_the_end=True, seen=check) if along else case.walk(f, 8)
    check(case.text(path), case.next(f))


@law(26, oracle=True)
def whole_may_stop(case: Case) -> None:
    """Where the text is whole, it may stop."""
    language = _language(case)
    f = case.make()
    path = case.walk(f, 5)
    if case.over or case.ended(f):
        return
    for _ in range(case.draw(st.integers(1, 4))):
        allowed, ends = case.next(f)
        if allowed is None:
            return
        if language.whole(case.text(path)) is True:
            case.expect(bool(allowed & case.stops), f"{case.text(path)!r} is whole and no stop token is allowed")
        token = case.choose(f)
        if token is None:
            return
        case.feed(f, token)
        path.append(token)
        if token in ends and overrides(f, "ended"):
            case.expect(case.ended(f), f"the end token {case.show_id(token)} was fed and ended() is false")
        if token in ends or case.ended(f):
            return


@law(27, level="should", examples=0.3)
def termination(case: Case) -> None:
    """From everywhere an end can be reached."""
    f = case.make()
    case.walk(f, 5)
    if case.ended(f):
        return
    # Expand the shallowest state and the narrowest one in turn: the first finds an end nearby, the second the end of a
    # long forced text. A closed set of states without an end is a trap. So is a chain of MAX_CHAIN tokens from which
    # none of several long dives reaches an end.
    queue: deque[tuple[int, Any]] = deque([(0, f)])
    heap: list[tuple[int, int, int, Any]] = [(0, 0, 0, f)]
    seen: set[int] = set()
    deep: Any = None
    ties = itertools.count(1)
    for turn in range(2 * MAX_EXPANDED):
        if turn % 2 and heap:
            _, height, _, at = heapq.heappop(heap)
            depth = -height
        elif queue:
            depth, at = queue.popleft()
        else:
            continue
        if id(at) in seen:
            continue
        seen.add(id(at))
        allowed, ends = _sets(at.next())
        if allowed is None or allowed & case.stops or ends:
            return
        deep = at if depth >= MAX_CHAIN else deep
        for token in _different(case, allowed):
            copy = at.clone()
            copy.feed(token)
            case.keep(copy)
            queue.append((depth + 1, copy))
            heapq.heappush(heap, (len(allowed), -depth - 1, next(ties), copy))
        heap = heapq.nsmallest(MAX_EXPANDED, heap)
    case.expect(bool(queue or heap), "no continuation leads to an end")
    if deep is not None:
        ends_somewhere = any(_dive(case, f if turn else deep, turn) for turn in range(4))
        case.expect(ends_somewhere, f"after {MAX_CHAIN} tokens and {MAX_DIVE} more there is still no end in reach")


def _dive(case: Case, start: Any, turn: int) -> bool:
    """Follow one path from `start`; returns whether it reaches an end, or a state where the outcome is unknown.

    The first turn prefers the longest tokens and likely closers; the others choose at random.
    """
    at = start.clone()
    rng = random.Random(turn)
    for _ in range(MAX_DIVE if turn == 0 else MAX_DIVE // 10):
        allowed, ends = _sets(at.next())
        tokens = _different(case, allowed) if allowed is not None else []
        if allowed is None or not tokens or allowed & case.stops or ends:
            return True
        if turn:
            at.feed(rng.choice(tokens))
        elif case.vocabulary.bytes_of(tokens[0])[:1] in CLOSERS:
            at.feed(tokens[0])
        else:
            at.feed(max(tokens, key=lambda token: len(case.vocabulary.bytes_of(token))))
    return False


@law(28, level="should", unless="canonical_only")
def tokenization_invariance(case: Case) -> None:
    """Equal bytes in other tokens lead to the same state."""
    if "token_level" in case.capabilities:
        return
    one, other = case.make(), case.make()
    path = case.walk(one, 6, least=2)
    if case.ended(one):
        return
    text, done = case.text(path), 0
    while done < len(text):
        options = case.spellings(text, done) - case.stops
        if not options:
            return
        token = max(options, key=lambda i: len(case.vocabulary.bytes_of(i)))
        if case.draw(st.booleans()):
            token = case.draw(st.sampled_from(sorted(options)))
        allowed, ends = case.next(other)
        case.expect(allowed is None or token in allowed, f"{case.show_id(token)} at {done} of {text!r} is not allowed")
        case.feed(other, token)
        done += len(case.vocabulary.bytes_of(token))
        if token in ends:
            return
    case.equal(case.next(other), case.next(one), f"{text!r} in other tokens")


@law(
    32,
    level="should",
    unless="token_level",
)
def healing(case: Case) -> None:
    """Under begin(h) the first token starts with h and its surplus is constrained."""
    heads = [case.vocabulary.bytes_of(i) for i in case.ordinary()]
    head = case.draw(st.sampled_from([h for h in heads if len(h) < 8]))
    head = head[: case.draw(st.integers(1, len(head)))]
    healed, plain = case.make(), case.make()
    case.begin(healed, head)
    got, _ = case.next(healed)
    case.begin(plain, None)
    start = case.next(plain)
    case.begin(plain, "")
    case.equal(case.next(plain), start, "begin(None) is not begin('')")
    if start[0] is None:
        return
    case.expect(got is not None, f"under begin({head!r}) the filter has no opinion, under begin('') it has")
    assert got is not None
    wrong = {i for i in got if not case.vocabulary.bytes_of(i).startswith(head)}
    longer = {i for i in case.ordinary() if case.vocabulary.bytes_of(i).startswith(head)}
    strict = False
    for token in sorted(longer):
        surplus = case.vocabulary.bytes_of(token)[len(head) :]
        permitted = _permitted(case, surplus)
        if permitted is None:
            return
        strict = strict or permitted
        case.expect(
            (token in got) == permitted,
            f"under begin({head!r}) {case.show_id(token)} is {'not ' * permitted}allowed; its surplus {surplus!r} is"
            f"{' not' * (not permitted)} allowed under begin('')",
        )
    # Where no permitted token spells all of the head, tokens may spell it in parts.
    case.expect(not wrong or not strict, f"under begin({head!r}) {case.show(wrong)} do not start with it")


@law(35, level="should")
def equivariance(case: Case) -> None:
    """Ids are only names: renumbered or doubled tokens are treated alike."""
    v = case.vocabulary
    twin_of = case.draw(st.sampled_from(case.ordinary()))
    order = list(range(v.size))
    shift = case.draw(st.integers(0, v.size - 1))
    order = order[shift:] + order[:shift]
    name = {old: new for new, old in enumerate(order)}
    other = Vocabulary(
        [None if i in v.special_ids or not v.is_defined(i) else v.bytes_of(i) for i in order] + [v.bytes_of(twin_of)],
        eos_token_id=None if v.eos_token_id is None else name[v.eos_token_id],
        stop_ids=[name[i] for i in v.stop_ids],
        special_ids=[name[i] for i in v.special_ids],
        special_texts={name[i]: text for i, text in v.special_texts.items()},
    )
    if "token_level" in case.capabilities:
        return
    here, there = case.make(), case.make(vocabulary=other)
    for token in case.walk(here, 5):
        there.next()
        there.feed(name[token])
    allowed, ends = case.next(here)
    got, got_ends = _sets(there.next())
    twin = v.size

    def renamed(ids: frozenset[int]) -> frozenset[int]:
        return frozenset(name[i] for i in ids) | ({twin} if twin_of in ids else frozenset())

    if allowed is None or "canonical_only" in case.capabilities:
        case.equal(got is None, allowed is None, "an opinion in one numbering only")
        return
    case.equal(got, renamed(allowed), f"renumbered by {shift}, {case.show_id(twin_of)} doubled as {twin}: allowed")
    case.equal(got_ends, renamed(ends), f"renumbered by {shift}, {case.show_id(twin_of)} doubled as {twin}: ends")


def _permitted(case: Case, text: bytes) -> bool | None:
    """Whether some tokenization of `text` is a permitted path from the start; None when the search grows too large."""
    if not text:
        return True
    todo: list[tuple[int, Any]] = [(0, case.make())]
    for _ in range(60):
        if not todo:
            return False
        done, f = todo.pop()
        allowed, ends = _sets(f.next())
        if allowed is None:
            return True
        for token in sorted(case.spellings(text, done) & (allowed - case.stops)):
            reached = done + len(case.vocabulary.bytes_of(token))
            if reached == len(text):
                return True
            if token not in ends:
                copy = f.clone()
                copy.feed(token)
                todo.append((reached, copy))
    return None


def _different(case: Case, allowed: frozenset[int]) -> list[int]:
    """Return up to 24 allowed tokens: for each first byte the shortest and the longest, likely closers first."""
    found: dict[int, tuple[int, int]] = {}
    for token in sorted(allowed - case.stops):
        raw = case.vocabulary.bytes_of(token)
        if raw:
            short, long = found.get(raw[0], (token, token))
            short = min(short, token, key=lambda i: len(case.vocabulary.bytes_of(i)))
            found[raw[0]] = (short, max(long, token, key=lambda i: len(case.vocabulary.bytes_of(i))))
    closing = [found[b][0] for b in CLOSERS if b in found]
    ways = [*closing, *(short for short, _ in found.values()), *(long for _, long in found.values())]
    return list(dict.fromkeys(ways))[:24] or sorted(allowed - case.stops)[:24]


def _sets(answer: Any) -> tuple[frozenset[int] | None, frozenset[int]]:
    allowed, ends = answer
    return (None if allowed is None else frozenset(allowed)), frozenset(ends)
