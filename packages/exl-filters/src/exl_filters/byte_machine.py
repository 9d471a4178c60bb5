"""Deterministic byte automata for sets of strings, and their product with a vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np

from exl_filters import bits
from exl_filters.errors import FilterCompileError
from exl_filters.state_filter import Choice
from exl_filters.tokens import encoded
from exl_filters.vocabulary import Vocabulary

__all__ = ["DEAD", "ByteMachine", "Tokenized"]

DEAD = -1
# A hundred thousand states take a fraction of a second and tens of megabytes; a million is the limit.
MAX_STATES = 1_000_000
# Masks kept per machine. A mask of 128k tokens has 16 KB.
MAX_CACHED = 256


class ByteMachine:
    """A deterministic automaton over bytes, immutable once built. State 0 is the start.

    `edges[s]` maps a byte to the next state. `accepting[s]`: the bytes so far are a sentence. `free[s]`: anything may
    follow.
    """

    shared_between_clones = True

    def __init__(self) -> None:
        self.edges: list[dict[int, int]] = [{}]
        self.accepting: list[bool] = [False]
        self.free: list[bool] = [False]

    @classmethod
    def of_strings(cls, strings: Sequence[str | bytes], *, then_free: bool = False) -> ByteMachine:
        """Build the machine of exactly these strings; with `then_free`, anything may follow one of them."""
        machine = cls()
        for text in strings:
            state = 0
            for byte in encoded("a text", text) if isinstance(text, str) else text:
                state = machine._edge(state, byte)
            machine.accepting[state] = True
            machine.free[state] = then_free
        return machine

    @classmethod
    def of_strings_any_case(cls, strings: Sequence[str]) -> ByteMachine:
        """Build the machine of every text whose case folding equals that of one of the strings.

        Subset construction runs over pairs (option i, folded up to character j). So a letter whose folding is longer
        than itself (the sharp s, the dotted capital I) matches where its folding does.
        """
        for text in strings:
            encoded("a text", text)
        folded = [text.casefold() for text in strings]
        machine = cls()
        ids = {_key((i, 0) for i in range(len(folded))): 0}
        todo = list(ids.items())
        while todo:
            places, state = todo.pop()
            machine.accepting[state] = any(j == len(folded[i]) for i, j in places)
            for spelling, reached in _folded_steps(folded, places).items():
                inner = state
                for byte in spelling[:-1]:
                    inner = machine._edge(inner, byte)
                key = _key(reached)
                if key not in ids:
                    ids[key] = machine._state()
                    todo.append((key, ids[key]))
                machine.edges[inner][spelling[-1]] = ids[key]
        return machine

    def run(self, state: int, text: bytes) -> int:
        """Return the state after `text`, or `DEAD` when an edge is missing. Stops reading in a free state."""
        for byte in text:
            if state == DEAD or self.free[state]:
                return state
            state = self.edges[state].get(byte, DEAD)
        return state

    def final(self, state: int) -> bool:
        """Whether `state` is a sentence that cannot be continued."""
        return self.accepting[state] and not self.edges[state] and not self.free[state]

    def token_states(self, vocabulary: Vocabulary) -> set[int]:
        """Return the states that token sequences reach from the start: 0, and those at the end of a token."""
        trie = vocabulary.trie
        reached, todo = {0}, [0]
        while todo:
            inside = [(trie.find(b""), todo.pop())]
            while inside:
                node, at = inside.pop()
                for byte, state in self.edges[at].items():
                    child = trie.child(node, byte)
                    if child < 0:
                        continue
                    inside.append((child, state))
                    first, last = trie.exact_range(child)
                    if first < last and state not in reached:
                        reached.add(state)
                        todo.append(state)
        return reached

    def _state(self) -> int:
        if len(self.edges) >= MAX_STATES:
            raise FilterCompileError(f"the options need more than {MAX_STATES} states")
        self.edges.append({})
        self.accepting.append(False)
        self.free.append(False)
        return len(self.edges) - 1

    def _edge(self, state: int, byte: int) -> int:
        found = self.edges[state].get(byte)
        if found is None:
            found = self.edges[state][byte] = self._state()
        return found


class Tokenized:
    """The allowed ids of every state of a machine, over one vocabulary.

    All clones of a filter share one instance; it is safe across threads.
    """

    shared_between_clones = True

    def __init__(self, machine: ByteMachine, vocabulary: Vocabulary, *, overshoot: bool = True) -> None:
        self.machine, self.vocabulary, self._overshoot = machine, vocabulary, overshoot
        self._choices: dict[tuple[int, bytes], Choice] = {}
        self._lock = threading.Lock()

    def choice(self, state: int, pending: bytes = b"") -> Choice:
        """Return the ids allowed in `state`.

        Args:
            state: A state of the machine.
            pending: Text to write again (token healing). The ids then start with this text, and the machine takes their
                surplus. Where no single token starts with it, tokens that spell a part of it are allowed instead.
        """
        found = self._choices.get((state, pending))
        if found is None:
            found = self._walk(state, pending)
            with self._lock:
                if len(self._choices) >= MAX_CACHED:
                    self._choices.pop(next(iter(self._choices)))
                self._choices[state, pending] = found
        return found

    def _walk(self, state: int, pending: bytes) -> Choice:
        trie, machine = self.vocabulary.trie, self.machine
        node = trie.find(pending)
        ranges: list[tuple[int, int]] = []
        ends: set[int] = set()
        if node >= 0:
            if pending:
                ranges.append(trie.exact_range(node))
            todo = [(node, state)] if not machine.free[state] else []
            while todo:
                node, at = todo.pop()
                for byte, reached in machine.edges[at].items():
                    child = trie.child(node, byte)
                    if child < 0:
                        continue
                    if machine.free[reached]:
                        ranges.append(trie.range(child) if self._overshoot else trie.exact_range(child))
                        continue
                    exact = trie.exact_range(child)
                    if exact[0] < exact[1]:
                        ranges.append(exact)
                        if machine.final(reached):
                            ends.update(trie.exact(child))
                    todo.append((child, reached))
            if pending and machine.free[state]:
                ranges.append(trie.range(node))
        if pending and not any(lo < hi for lo, hi in ranges):
            ranges = self._pieces_of(pending)
        parts = [trie.order[lo:hi] for lo, hi in ranges if lo < hi]
        ids = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        return Choice(bits.from_ids(ids, self.vocabulary.size), frozenset(ends))

    def _pieces_of(self, pending: bytes) -> list[tuple[int, int]]:
        """Return the tokens that are proper prefixes of `pending`, as ranges of the trie's order."""
        trie, node, ranges = self.vocabulary.trie, 0, []
        for byte in pending:
            node = trie.child(node, byte)
            if node < 0:
                break
            ranges.append(trie.exact_range(node))
        return ranges

    def advance(self, state: int, pending: bytes, token: int) -> tuple[int, bytes]:
        """Return the state and the pending text after an allowed token."""
        raw = self.vocabulary.bytes_of(token)
        if len(raw) < len(pending):
            return state, pending[len(raw) :]
        return self.machine.run(state, raw[len(pending) :]), b""


def _key(places: Iterable[tuple[int, int]]) -> frozenset[tuple[int, int]]:
    return frozenset(places)


def _folded_steps(folded: Sequence[str], places: Iterable[tuple[int, int]]) -> dict[bytes, set[tuple[int, int]]]:
    """Map the UTF-8 of every character that may follow the given places to the places that it leads to."""
    steps: dict[bytes, set[tuple[int, int]]] = {}
    for option, at in places:
        text = folded[option]
        for length in range(1, min(_longest_folding(), len(text) - at) + 1):
            for char in _unfolded(text[at : at + length]):
                spelling = char.encode("utf-8", "surrogateescape")
                steps.setdefault(spelling, set()).add((option, at + length))
    return steps


@cache
def _foldings() -> dict[str, list[str]]:
    """Map folded text to the characters that fold to it and differ from it. All cased letters lie below U+1F000."""
    table: dict[str, list[str]] = {}
    for code in range(0x41, 0x1F000):
        if 0xD800 <= code < 0xE000:
            continue
        char = chr(code)
        text = char.casefold()
        if text != char:
            table.setdefault(text, []).append(char)
    return table


@cache
def _longest_folding() -> int:
    return max(len(text) for text in _foldings())


def _unfolded(text: str) -> list[str]:
    """Return the characters whose case folding is `text`."""
    found = list(_foldings().get(text, ()))
    if len(text) == 1:
        found.append(text)
    return found
