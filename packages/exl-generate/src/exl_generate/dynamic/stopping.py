"""Stop strings and banned strings: an automaton that advances character by character and never looks back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import lru_cache

__all__ = ["Automaton", "automaton_of"]


class Automaton:
    """Aho-Corasick over characters. A state is an int, 0 at the start.

    `depth[state]` characters of the text so far may still become part of a match; no more than that has to be held
    back. The first completed pattern wins; among patterns completed by the same character, the longest. So the result
    depends on the text alone, not on its tokens. With `fold`, patterns and text are compared in lower case.
    """

    def __init__(self, patterns: Iterable[str], *, fold: bool = False) -> None:
        self._fold = fold
        self._goto: list[dict[str, int]] = [{}]
        self.depth = [0]
        #: length of the longest pattern that ends in this state, 0 for none
        self._match = [0]
        self._patterns: dict[int, str] = {}
        for pattern in patterns:
            self._insert(pattern)
        self._fail = self._link()
        #: characters with which a pattern can begin
        self._firsts = frozenset(self._goto[0])

    def sees(self, text: str) -> bool:
        """Return False if `text`, read at the start state, leaves the automaton there: it holds no pattern's first
        character.
        """
        if self._fold:
            if not text.isascii():
                return True
            text = text.lower()
        return not self._firsts.isdisjoint(text)

    def __bool__(self) -> bool:
        return len(self._goto) > 1

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        if self._fold:
            character = _lower(character)
        while (following := self._goto[state].get(character)) is None and state:
            state = self._fail[state]
        return following or 0

    def match_length(self, state: int) -> int:
        """Return the length of the pattern completed in this state, 0 if none."""
        return self._match[state]

    def matched(self, state: int) -> str:
        """Return the pattern completed in this state, as it was given."""
        while self.depth[state] != self._match[state]:
            state = self._fail[state]
        return self._patterns[state]

    def _insert(self, pattern: str) -> None:
        state = 0
        for character in pattern:
            if self._fold:
                character = _lower(character)
            following = self._goto[state].get(character)
            if following is None:
                following = len(self._goto)
                self._goto[state][character] = following
                self._goto.append({})
                self.depth.append(self.depth[state] + 1)
                self._match.append(0)
            state = following
        self._match[state] = self.depth[state]
        self._patterns.setdefault(state, pattern)

    def _link(self) -> list[int]:
        fail = [0] * len(self._goto)
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._goto[state].items():
                back = fail[state]
                while back and character not in self._goto[back]:
                    back = fail[back]
                fail[child] = self._goto[back].get(character, 0)
                queue.append(child)
            self._match[state] = self._match[state] or self._match[fail[state]]
        return fail


@lru_cache(maxsize=256)
def automaton_of(patterns: tuple[str, ...], fold: bool = False) -> Automaton:
    """Return the automaton of these patterns. Requests with equal patterns share it, since it never changes."""
    return Automaton(patterns, fold=fold)


def _lower(character: str) -> str:
    """Return lower case where that is one character, so that positions in text and pattern stay comparable."""
    lowered = character.lower()
    return lowered if len(lowered) == 1 else character
