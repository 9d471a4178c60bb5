"""States of a regular expression, by which the masks of jobs with one pattern are shared.

llguidance computes a mask by a walk over the vocabulary, and the copies of one matcher take turns at it. This module
follows the text of each job with Brzozowski's derivatives ("Derivatives of Regular Expressions", 1964): two texts with
the same derivative may go on in the same ways, so they have the same mask. Counters that no single token can exhaust
are treated as equal, which leaves few states for a pattern such as `([a-z]{1,12} ){500}`.

Only patterns whose meaning is certain are followed, and only over ASCII text. Everything else has no state, and its
masks are computed as before.
"""

from __future__ import annotations

import re
import threading
from typing import Any

from exl_filters.bits import Words

__all__ = ["PatternStates", "State", "states_of"]

# A term is None (no text), (), or one of these tuples:
#   (CLASS, ASCII characters as a bit set, the source of the class)
#   (JOIN, term, term)          one after the other; never begins with a JOIN
#   (EITHER, frozenset of terms)
#   (REPEAT, term, least, most)  most may be None: without end
Term = tuple[Any, ...]
CLASS, JOIN, EITHER, REPEAT = "class", "join", "either", "repeat"
EMPTY_TEXT: Term = ()

MAX_PATTERN = 400
"""Longest pattern, in characters, that is followed: a derivative takes time in proportion to it."""
MAX_TERM = 200
"""Most nodes of a derivative."""
MAX_WORK = 500_000
"""Most nodes of all derivatives of a pattern, whose time is taken from every job."""
MAX_STATES = 10_000
"""States kept for a pattern; beyond them the table starts anew."""
MAX_MASKS = 256
"""Masks kept for a pattern. A mask of 128k tokens has 16 KB."""

_ALL = (1 << 128) - 1


def _set(characters: str) -> int:
    """Return a bit set of ASCII characters."""
    found = 0
    for character in characters:
        found |= 1 << ord(character)
    return found


_DIGITS = _set("0123456789")
_WORD = _DIGITS | _set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_SPACE = _set("\t\n\x0b\x0c\r ")
_NAMED = {
    "d": _DIGITS,
    "w": _WORD,
    "s": _SPACE,
    "D": _ALL & ~_DIGITS,
    "W": _ALL & ~_WORD,
    "S": _ALL & ~_SPACE,
}
_CONTROL = {"n": "\n", "t": "\t", "r": "\r"}
_PUNCTUATION = frozenset("\\.+*?()|[]{}^$#&-~/\"'!%,:;=@_` ")
_COUNT = re.compile(r"\{(\d{1,4})(,(\d{1,4})?)?\}")


class _UnsupportedError(Exception):
    """The pattern has a part whose meaning is not certain here."""


# ---- terms


def _join(first: Term | None, then: Term | None) -> Term | None:
    if first is None or then is None:
        return None
    if not first:
        return then
    if not then:
        return first
    if first[0] == JOIN:
        return (JOIN, first[1], _join(first[2], then))
    return (JOIN, first, then)


def _either(*terms: Term | None) -> Term | None:
    found: set[Term] = set()
    for term in terms:
        if term is not None:
            found |= term[1] if term and term[0] == EITHER else {term}
    if len(found) < 2:
        return found.pop() if found else None
    return (EITHER, frozenset(found))


def _repeat(term: Term, least: int, most: int | None) -> Term:
    if not term or most == 0:
        return EMPTY_TEXT
    if (least, most) == (1, 1):
        return term
    return (REPEAT, term, 0 if _may_be_empty(term) else least, most)


def _may_be_empty(term: Term) -> bool:
    if not term:
        return True
    if term[0] == JOIN:
        return _may_be_empty(term[1]) and _may_be_empty(term[2])
    if term[0] == EITHER:
        return any(_may_be_empty(option) for option in term[1])
    return term[0] == REPEAT and bool(term[2] == 0 or _may_be_empty(term[1]))


def _after(term: Term, character: int) -> Term | None:
    """Return what may follow an ASCII character; None where the character cannot begin the term."""
    if not term:
        return None
    kind = term[0]
    if kind == CLASS:
        return EMPTY_TEXT if term[1] >> character & 1 else None
    if kind == JOIN:
        first = _join(_after(term[1], character), term[2])
        return _either(first, _after(term[2], character)) if _may_be_empty(term[1]) else first
    if kind == EITHER:
        return _either(*(_after(option, character) for option in term[1]))
    _, inner, least, most = term
    rest = _repeat(inner, max(0, least - 1), None if most is None else most - 1)
    return _join(_after(inner, character), rest)


def _begins(term: Term) -> int:
    """Return the set of ASCII characters that may begin the term."""
    if not term:
        return 0
    kind = term[0]
    if kind == CLASS:
        return int(term[1])
    if kind == JOIN:
        return _begins(term[1]) | (_begins(term[2]) if _may_be_empty(term[1]) else 0)
    if kind == EITHER:
        found = 0
        for option in term[1]:
            found |= _begins(option)
        return found
    return _begins(term[1])


def _shortest(term: Term) -> int:
    """Return the least number of characters of the term's texts."""
    if not term:
        return 0
    kind = term[0]
    if kind == CLASS:
        return 1
    if kind == JOIN:
        return _shortest(term[1]) + _shortest(term[2])
    if kind == EITHER:
        return min(_shortest(option) for option in term[1])
    return int(term[2]) * _shortest(term[1])


def _within(term: Term, reach: int) -> Term:
    """Return a term with the same texts, and the same beginnings of texts, of up to `reach` characters."""
    if not term or term[0] == CLASS:
        return term
    kind = term[0]
    if kind == JOIN:
        first, length = _within(term[1], reach), _shortest(term[1])
        return first if length > reach else _join(first, _within(term[2], reach - length)) or EMPTY_TEXT
    if kind == EITHER:
        return _either(*(_within(option, reach) for option in term[1])) or EMPTY_TEXT
    _, inner, least, most = term
    if _shortest(inner):  # each repetition takes a character: a text has no more of them than characters
        least, most = min(least, reach + 1), reach + 1 if most is None else min(most, reach + 1)
    return _repeat(_within(inner, reach), least, most)


def _size(term: Term) -> int:
    if not term or term[0] == CLASS:
        return 1
    if term[0] == EITHER:
        return 1 + sum(_size(option) for option in term[1])
    return 1 + _size(term[1]) + (_size(term[2]) if term[0] == JOIN else 0)


def _kinds_of(term: Term) -> bytes:
    """Return 256 bytes that map the ASCII characters that no class tells apart to one of them, other bytes to 255."""
    classes: set[int] = set()
    todo = [term]
    while todo:
        part = todo.pop()
        if part and part[0] == CLASS:
            classes.add(part[1])
        elif part:
            todo += part[1] if part[0] == EITHER else [part[1], part[2]] if part[0] == JOIN else [part[1]]
    first: dict[tuple[int, ...], int] = {}
    ascii_kinds = [first.setdefault(tuple(c >> byte & 1 for c in classes), byte) for byte in range(128)]
    return bytes(ascii_kinds + [255] * 128)


# ---- patterns


class _Parser:
    """Read the part of Rust's regex syntax whose meaning is certain."""

    def __init__(self, pattern: str) -> None:
        self._text, self._at = pattern, 0

    def term(self) -> Term:
        found = self._options()
        if self._at < len(self._text):
            raise _UnsupportedError
        return found

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        if not (character := self._peek()):
            raise _UnsupportedError
        self._at += 1
        return character

    def _options(self) -> Term:
        options = [self._chain()]
        while self._peek() == "|":
            self._take()
            options.append(self._chain())
        found = _either(*options)
        return EMPTY_TEXT if found is None else found

    def _chain(self) -> Term:
        parts = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._counted(self._atom()))
        found: Term | None = EMPTY_TEXT
        for part in reversed(parts):
            found = _join(part, found)
        return found or EMPTY_TEXT

    def _counted(self, term: Term) -> Term:
        sign = self._peek()
        if sign not in ("*", "+", "?", "{") or not sign:
            return term
        if sign == "{":
            count = _COUNT.match(self._text, self._at)
            if count is None:
                raise _UnsupportedError
            self._at = count.end()
            least = int(count[1])
            most = least if count[2] is None else None if count[3] is None else int(count[3])
            if most is not None and most < least:
                raise _UnsupportedError
        else:
            self._take()
            least, most = int(sign == "+"), 1 if sign == "?" else None
        if self._peek() in ("*", "+", "?", "{") and self._peek():
            raise _UnsupportedError  # lazy, or counted twice
        return _repeat(term, least, most)

    def _atom(self) -> Term:
        sign = self._take()
        if sign == "(":
            if self._peek() == "?":
                self._take()
                if self._take() != ":":
                    raise _UnsupportedError
            found = self._options()
            if self._take() != ")":
                raise _UnsupportedError
            return found
        if sign == "[":
            return self._class()
        if sign == ".":
            return (CLASS, _ALL & ~_set("\n"), ".")
        if sign == "\\":
            named, character = self._escape()
            return (CLASS, named, f"\\{character}") if named is not None else self._one(character)
        if sign in "*+?{}]^$":
            raise _UnsupportedError
        return self._one(sign)

    def _one(self, character: str) -> Term:
        return (CLASS, _set(character) if character.isascii() else 0, character)

    def _escape(self) -> tuple[int | None, str]:
        """Return the set of a named class and its name, or None and a character."""
        sign = self._take()
        if sign in _NAMED:
            return _NAMED[sign], sign
        if sign in _CONTROL:
            return None, _CONTROL[sign]
        if sign not in _PUNCTUATION:
            raise _UnsupportedError
        return None, sign

    def _class(self) -> Term:
        begin = self._at
        inverted = self._peek() == "^"
        if inverted:
            self._take()
        found, empty = 0, True
        while self._peek() != "]" or empty:
            found |= self._member(last_but_one=self._text[self._at + 1 : self._at + 2] == "]")
            empty = False
        self._take()
        found = _ALL & ~found if inverted else found
        if inverted and not found:
            raise _UnsupportedError  # it may have no character at all
        return (CLASS, found, self._text[begin : self._at])

    def _member(self, *, last_but_one: bool) -> int:
        """Return the set of one character, class or range within brackets."""
        named, low = self._bracketed(alone=last_but_one)
        if self._peek() != "-" or self._text[self._at + 1 : self._at + 2] == "]":
            return named if named is not None else _set(low) if low.isascii() else 0
        self._take()
        other, high = self._bracketed(alone=False)
        if named is not None or other is not None or low > high:
            raise _UnsupportedError
        return sum(1 << code for code in range(ord(low), min(ord(high), 127) + 1))

    def _bracketed(self, *, alone: bool) -> tuple[int | None, str]:
        sign = self._take()
        if sign == "\\":
            return self._escape()
        # Rust has nested classes and operations on sets (&&, --, ~~) here.
        if sign in "[]^&~" or (sign == "-" and not alone):
            raise _UnsupportedError
        return None, sign


class State:
    """Texts of the pattern that may go on in the same ways."""

    __slots__ = ("key", "next", "term")

    def __init__(self, term: Term) -> None:
        self.term = term
        #: the state after each kind of character seen so far; None where the text is not followed
        self.next: dict[int, State | None] = {}
        #: the number of its mask, 0 where masks are not shared; None before it is known
        self.key: int | None = None


class PatternStates:
    """The states of one pattern and the masks of some of them. Threads may share it."""

    def __init__(self, term: Term, reach: int) -> None:
        self._reach = reach
        self._lock = threading.Lock()
        self._states: dict[Term, State] = {}
        self._keys: dict[Term, int] = {}
        self._count = 0
        self._masks: dict[int, Words] = {}
        self._kinds = _kinds_of(term)
        self._work = 0
        self.start: State | None = self._state(term)

    def feed(self, state: State | None, text: bytes) -> State | None:
        """Return the state after the bytes of a token; None where the text is not followed any further."""
        if not text:
            return None
        for kind in text.translate(self._kinds):
            if state is None:
                return None
            state = state.next[kind] if kind in state.next else self._step(state, kind)
        return state

    def mask(self, state: State | None) -> Words | None:
        """Return the mask of a state, which must not be changed, or None if it is not known."""
        return None if state is None else self._masks.get(self.key(state))

    def keep(self, state: State | None, mask: Words) -> None:
        """Remember a copy of the mask of a state, in place of the oldest one if there are many."""
        if state is None or not (key := self.key(state)):
            return
        with self._lock:
            if len(self._masks) >= MAX_MASKS:
                self._masks.pop(next(iter(self._masks)))
            self._masks[key] = mask.copy()

    def key(self, state: State) -> int:
        """Return the number of the state's mask, which equal masks may share; 0 where masks are not shared.

        Where one character alone may come, llguidance may force the spelling of the text that follows, which depends on
        the tokens before.
        """
        if state.key is None:
            state.key = self._number(state.term) if _begins(state.term).bit_count() > 1 else 0
        return state.key

    def _number(self, term: Term) -> int:
        try:
            short = _within(term, self._reach)
        except RecursionError:
            return 0
        with self._lock:
            if short not in self._keys:
                self._count += 1
                self._keys[short] = self._count
            return self._keys[short]

    def _step(self, state: State, kind: int) -> State | None:
        try:
            term = _after(state.term, kind) if kind < 128 else None
        except RecursionError:
            term = None
        state.next[kind] = found = None if term is None else self._state(term)
        return found

    def _state(self, term: Term) -> State | None:
        found = self._states.get(term)
        if found is not None:
            return found
        self._work += (size := _size(term))
        if size > MAX_TERM or self._work > MAX_WORK:
            return None
        with self._lock:
            if len(self._states) >= MAX_STATES:
                # Numbers are never given twice: states that jobs still hold keep theirs.
                self._states.clear()
                self._keys.clear()
                self._masks.clear()
            return self._states.setdefault(term, State(term))


def states_of(pattern: str, longest: int) -> PatternStates | None:
    """Return the states of a pattern, or None for one that is not followed.

    Args:
        pattern: In the syntax of Rust's regex crate, for the whole text.
        longest: Bytes of the vocabulary's longest token.
    """
    if len(pattern) > MAX_PATTERN:
        return None
    try:
        found = PatternStates(_Parser(pattern).term(), longest)
    except (_UnsupportedError, RecursionError):
        return None
    return None if found.start is None else found
