"""Decide which byte strings begin a match of a Python pattern: its parse tree as an automaton over characters."""

from __future__ import annotations

import re
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

__all__ = ["PartialRegex"]

# Repeats are unrolled; the answer for a pattern that would need more states is "unknown".
MAX_STATES = 5000


class _Unsupported(Exception):  # noqa: N818 - ends a construction; not an error
    """A construct whose prefixes this automaton cannot decide."""


class PartialRegex:
    """Thompson automaton of a pattern, without look-around and references."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._empty: list[list[int]] = []
        self._on: list[list[tuple[Any, int]]] = []
        self._supported = True
        try:
            start = self._state()
            self._end = self._sequence(parser.parse(pattern.pattern, pattern.flags), start)
            self._initial = self._closure({start})
        except _Unsupported:
            self._supported = False

    def prefix(self, text: bytes) -> bool | None:
        """Whether `text` begins a match; None where the pattern has constructs that automata cannot express."""
        if not self._supported:
            return None
        whole, cut = _split(text)
        if whole is None:
            return False
        states = self._initial
        for character in whole:
            states = self._step(states, character)
        if not cut:
            return bool(states)
        return any(self._step(states, c) for c in _characters_beginning(cut, self._interesting()))

    def samples(self) -> list[bytes]:
        """Return literal characters of the pattern, from which tokens are cut."""
        return ["".join(sorted(self._interesting())).encode()] if self._supported else []

    def _interesting(self) -> set[str]:
        found: set[str] = set()
        for edges in self._on:
            for test, _ in edges:
                found |= test.characters
        return found

    def _state(self) -> int:
        if len(self._on) >= MAX_STATES:
            raise _Unsupported
        self._empty.append([])
        self._on.append([])
        return len(self._on) - 1

    def _closure(self, states: set[int]) -> frozenset[int]:
        todo, seen = list(states), set(states)
        while todo:
            for reached in self._empty[todo.pop()]:
                if reached not in seen:
                    seen.add(reached)
                    todo.append(reached)
        return frozenset(seen)

    def _step(self, states: frozenset[int], character: str) -> frozenset[int]:
        return self._closure({to for s in states for test, to in self._on[s] if test(character)})

    def _sequence(self, nodes: Any, state: int) -> int:
        for node in nodes:
            state = self._node(node, state)
        return state

    def _node(self, node: Any, state: int) -> int:
        op, value = node
        if op in (codes.LITERAL, codes.NOT_LITERAL, codes.IN, codes.ANY):
            reached = self._state()
            self._on[state].append((_Test(op, value, self._pattern.flags), reached))
            return reached
        if op is codes.SUBPATTERN:
            return self._sequence(value[-1], state)
        if op is codes.BRANCH:
            reached = self._state()
            for branch in value[1]:
                self._empty[self._sequence(branch, state)].append(reached)
            return reached
        if op in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            return self._repeat(value[0], value[1], value[2], state)
        raise _Unsupported

    def _repeat(self, least: int, most: int, body: Any, state: int) -> int:
        for _ in range(least):
            state = self._sequence(body, state)
        if most is codes.MAXREPEAT:
            loop = self._state()
            self._empty[state].append(loop)
            self._empty[self._sequence(body, loop)].append(loop)
            return loop
        end = self._state()
        for _ in range(most - least):
            self._empty[state].append(end)
            state = self._sequence(body, state)
        self._empty[state].append(end)
        return end


class _Test:
    """One character against one node of the parse tree."""

    def __init__(self, op: Any, value: Any, flags: int) -> None:
        single = parser.SubPattern(parser.State(), [(op, value)])
        single.state.flags = flags
        self._match = re._compiler.compile(single, flags).fullmatch  # type: ignore[attr-defined]
        self.characters: set[str] = set()
        members = value if op is codes.IN else [(op, value)]
        for kind, what in members:
            if kind is codes.LITERAL:
                self.characters.add(chr(what))
            elif kind is codes.RANGE:
                self.characters.update(chr(c) for c in {what[0], what[1], (what[0] + what[1]) // 2})

    def __call__(self, character: str) -> bool:
        return self._match(character) is not None


def _split(text: bytes) -> tuple[str | None, bytes]:
    """Split into complete characters and the bytes of a cut-off last one; None for text that is not UTF-8."""
    for cut in range(min(4, len(text) + 1)):
        head, tail = text[: len(text) - cut], text[len(text) - cut :]
        try:
            whole = head.decode("utf-8")
        except UnicodeDecodeError:
            continue
        return (whole, tail) if _may_begin(tail) else (None, b"")
    return None, b""


def _may_begin(tail: bytes) -> bool:
    """Whether bytes may be the beginning of one UTF-8 character."""
    return not tail or any(True for _ in _characters_beginning(tail, set()))


def _characters_beginning(cut: bytes, interesting: set[str]) -> Any:
    """Yield characters whose UTF-8 starts with `cut`: the interesting ones, then one of each block of continuations."""
    for character in sorted(interesting):
        raw = character.encode("utf-8", "surrogatepass")
        if len(raw) > len(cut) and raw.startswith(cut):
            yield character
    lead = cut[0]
    length = 2 if 0xC2 <= lead < 0xE0 else 3 if 0xE0 <= lead < 0xF0 else 4 if 0xF0 <= lead < 0xF5 else 0
    if len(cut) >= length:
        return
    for low in (0x80, 0x90, 0x9F, 0xA0, 0xBF):
        try:
            yield (cut + bytes([low]) + bytes([0x80] * (length - len(cut) - 1))).decode("utf-8")
        except UnicodeDecodeError:
            continue
