"""`Case`: one run of one law. It records the calls, from which it prints a reproduction."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any

from hypothesis import strategies as st

from exl_filters.base import ExLlamaV2Filter, overrides
from exl_filters.context import FilterContext
from exl_filters.testing.languages import Language
from exl_filters.tokens import fed_token
from exl_filters.vocabulary import Vocabulary

__all__ = ["Broken", "Case", "Observed", "shown_context"]

# One walk in DEEP is longer, up to MOST_DEEP tokens.
DEEP = 6
MOST_DEEP = 48

Factory = Callable[[Vocabulary], Any]
Observed = tuple[frozenset[int] | None, frozenset[int]]


class Broken(AssertionError):  # noqa: N818 - named as the statement about a law
    """A law does not hold.

    Args:
        message: what was expected and what was found.
        case: the law's case, with the recorded calls.
    """

    def __init__(self, message: str, case: Case | None = None) -> None:
        super().__init__(message)
        self.case = case


class Case:
    """One run of one law: a vocabulary, the factory under test, and hypothesis' choices.

    Filters are attached (if they can be) and begun. Every call through this object is recorded. The parameter `f` of
    its methods is a filter that `make` or `clone` has returned.

    Args:
        data: hypothesis' source of choices.
        factory: Builds the filter under test from a vocabulary.
        vocabulary: The vocabulary, which also serves as the filter's tokenizer.
        language: Oracle of the filter's texts, or None.
        capabilities: Claims of the filter, see `Subject`.
        deep: Whether walks may be long.
    """

    def __init__(
        self,
        data: st.DataObject,
        factory: Factory,
        vocabulary: Vocabulary,
        language: Language | None,
        capabilities: Collection[str] = (),
        *,
        deep: bool = True,
    ) -> None:
        self.deep = deep
        self.data, self.factory, self.vocabulary, self.language = data, factory, vocabulary, language
        self.capabilities = frozenset(capabilities)
        self.stops = vocabulary.stop_ids
        self.context = FilterContext.make(vocabulary.size, self.stops, vocabulary.special_ids)
        self.record: list[str] = []
        self._names: dict[int, str] = {}
        self._kept: list[Any] = []
        # Whether the last walk came to an end.
        self.over = False

    # Calls on the filter.

    def make(
        self,
        prefix: str | bytes | None = "",
        *,
        vocabulary: Vocabulary | None = None,
        context: FilterContext | None = None,
    ) -> Any:
        """Return a new filter over `vocabulary`, attached with `context` and begun with `prefix`.

        The case's own vocabulary and context are the defaults.
        """
        vocabulary = vocabulary or self.vocabulary
        f = self.factory(vocabulary)
        self.name(f, f"make({'vocab' if vocabulary is self.vocabulary else 'other_vocab'})")
        if callable(getattr(f, "attach", None)):
            if context is not None:
                self.note(f"{self.of(f)}.attach({shown_context(context)})")
            elif vocabulary is self.vocabulary:
                context = self.context
            else:
                context = FilterContext.make(vocabulary.size, vocabulary.stop_ids, vocabulary.special_ids)
            f.attach(context)
        self.begin(f, prefix)
        return f

    def begin(self, f: Any, prefix: Any = "") -> None:
        """Call `begin` with `prefix`."""
        self.note(f"{self.of(f)}.begin({prefix!r})")
        f.begin(prefix)

    def next(self, f: Any) -> Observed:
        """Return the allowed ids and the end ids of `next()` as sets."""
        self.note(f"{self.of(f)}.next()")
        answer = f.next()
        allowed, ends = answer
        return (None if allowed is None else frozenset(allowed)), frozenset(ends)

    def feed(self, f: Any, token: int, *, wrapped: bool | None = None) -> None:
        """Feed a token.

        `wrapped` feeds the stand-in of a (1, 1) tensor; None: an int for `ExLlamaV2Filter`s, the stand-in for others.
        """
        self.note(f"{self.of(f)}.feed({token})  # {self.vocabulary.bytes_of(token)!r}")
        if wrapped is None:
            wrapped = not isinstance(f, ExLlamaV2Filter)
        f.feed(fed_token(token) if wrapped else token)

    def clone(self, f: Any) -> Any:
        """Return a clone, named in the record."""
        copy = f.clone()
        self.name(copy, f"{self.of(f)}.clone()")
        return copy

    def walk(self, f: Any, most: int = 8, *, least: int = 0, deep: int = DEEP) -> list[int]:
        """Feed `least` to `most` permitted tokens; returns them. Ends early where the filter or the text ends.

        One walk in `deep` is longer and follows a sentence of the language: it finds faults deep in texts, or near
        their end.
        """
        path: list[int] = []
        if self.deep and self.draw(st.integers(1, deep)) == deep:
            return self.stride(f)
        self.over = False
        length = self.draw(st.integers(least, most))
        while len(path) < length:
            token = self.choose(f)
            if token is None:
                break
            self.over = self.is_terminal(f, token)
            self.feed(f, token)
            path.append(token)
            if self.over:
                break
        return path

    def stride(
        self, f: Any, *, to_the_end: bool = False, seen: Callable[[bytes, Observed], None] | None = None
    ) -> list[int]:
        """Feed up to MOST_DEEP permitted tokens: some spelling of a sentence, then others; returns them.

        Two walks in three stop at most a few bytes before the end of the sentence; all stop at its end with
        `to_the_end`. `seen` is called with every text on the way and the answer there.
        """
        path: list[int] = []
        self.over = False
        rng = random.Random(self.draw(st.integers(0, 255)))
        sentence: bytes = self.draw(self.language.sentences) if self.language is not None else b""
        length, done = rng.randint(1, MOST_DEEP), 0
        # Every other walk takes the shortest tokens, and as many of them.
        short = rng.random() < 0.5
        until = -1
        if sentence and (to_the_end or rng.random() < 2 / 3):
            until = len(sentence) - (0 if to_the_end else rng.choice([0, 1, 1, 2, 2, 3]))
        while len(path) < (length if until < 0 else MOST_DEEP) and done != until:
            allowed, ends = answer = self.next(f)
            if seen is not None:
                seen(self.text(path), answer)
            spelled = self.spellings(sentence[:until] if done < until else sentence, done) - self.stops
            tokens = sorted(spelled if allowed is None else spelled & allowed)
            if not tokens:
                if not path:
                    break
                done = len(sentence)
                tokens = self.ordinary() if allowed is None else sorted(allowed - self.stops)
            if not tokens:
                break
            if short:
                tokens = [min(tokens, key=lambda token: len(self.vocabulary.bytes_of(token)))]
            token = rng.choice(tokens)
            self.feed(f, token)
            path.append(token)
            done += len(self.vocabulary.bytes_of(token))
            self.over = token in ends
            if self.over:
                break
        return path

    def spellings(self, text: bytes, position: int) -> frozenset[int]:
        """Return the ids whose bytes `text` continues with at `position`."""
        found: list[int] = []
        trie, node = self.vocabulary.trie, 0
        for byte in text[position : position + 400]:
            node = trie.child(node, byte)
            if node < 0:
                break
            found.extend(trie.exact(node))
        return frozenset(found)

    def choose(self, f: Any, *, stops: bool = False) -> int | None:
        """Return a permitted token, ordinary unless `stops`; None when there is none."""
        allowed, _ = self.next(f)
        tokens = self.ordinary() if allowed is None else sorted(allowed)
        tokens = [t for t in tokens if stops or t not in self.stops]
        return self.draw(st.sampled_from(tokens)) if tokens else None

    def is_terminal(self, f: Any, token: int) -> bool:
        """Whether feeding `token` now ends the constraint or the text."""
        return token in self.stops or token in self.next(f)[1]

    def ordinary(self) -> list[int]:
        """Return the ids with text."""
        return [i for i in range(self.vocabulary.size) if self.vocabulary.bytes_of(i)]

    def text(self, path: Collection[int]) -> bytes:
        """Return the bytes of a path of ids."""
        return b"".join(self.vocabulary.bytes_of(t) for t in path)

    def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        """Draw a value from a strategy."""
        return self.data.draw(strategy)

    # Questions and expectations.

    def ended(self, f: Any) -> bool:
        """Whether the filter says that it has ended."""
        ended = getattr(f, "ended", None)
        return bool(callable(ended) and ended())

    def can(self, f: Any, capability: str) -> bool:
        """Whether the filter claims a capability, or overrides the method of that name."""
        return capability in self.capabilities or overrides(f, capability)

    def expect(self, holds: bool, message: str) -> None:
        """Raise `Broken` with `message` unless `holds`."""
        if not holds:
            raise Broken(message, self)

    def equal(self, one: Any, other: Any, message: str) -> None:
        """Raise `Broken` with `message` and both values unless `one` and `other` are equal."""
        if one != other:
            raise Broken(f"{message}: {self.show(one)} against {self.show(other)}", self)

    # The record.

    def note(self, line: str) -> None:
        """Add a line to the record."""
        self.record.append(line)

    def name(self, f: Any, how: str) -> None:
        """Name a filter in the record; `how` is the expression that made it."""
        self._kept.append(f)
        self._names[id(f)] = f"f{len(self._names) or ''}"
        self.note(f"{self._names[id(f)]} = {how}")

    def keep(self, f: Any) -> None:
        """Keep a filter alive as long as the case, so that its `id` is not reused."""
        self._kept.append(f)

    def of(self, f: Any) -> str:
        """Return the name of a filter in the record."""
        return self._names.get(id(f), "f")

    def show(self, value: Any) -> str:
        """Format a value: sets of ids with their bytes, anything else by `repr`."""
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], frozenset):
            return f"(allowed {self.show(value[0])}, ends {self.show(value[1])})"
        if isinstance(value, frozenset | set):
            ids = sorted(value, key=repr)
            shown = ", ".join(self.show_id(i) for i in ids[:6])
            return f"{{{shown}{', ...' if len(ids) > 6 else ''}}} ({len(ids)})"
        return repr(value)

    def show_id(self, token: Any) -> str:
        """Format the id `token` with its role or bytes."""
        if not isinstance(token, int):
            return repr(token)
        role = "stop" if token in self.stops else "special" if token in self.vocabulary.special_ids else ""
        return f"{token}:{role or self.vocabulary.bytes_of(token)!r}"

    def reproduction(self) -> str:
        """Return Python source that repeats the recorded calls, without hypothesis."""
        v = self.vocabulary
        tokens = [None if i in v.special_ids or not v.is_defined(i) else v.bytes_of(i) for i in range(v.size)]
        lines = [
            "from exl_filters import FilterContext, Vocabulary",
            f"tokens = {_tokens_source(tokens)}",
            f"vocab = Vocabulary(tokens, eos_token_id={v.eos_token_id}, stop_ids={sorted(v.stop_ids)}, "
            f"special_ids={sorted(v.special_ids)})",
            "# make: the factory under test; attach each filter: "
            f"f.attach(FilterContext.make({v.size}, {sorted(v.stop_ids)}))",
        ]
        return "\n".join([*lines, *_without_repeats(self.record)])


def shown_context(context: FilterContext) -> str:
    """Return the source of a `FilterContext`."""
    stops, specials = sorted(context.stop_ids), sorted(context.special_ids)
    return f"FilterContext.make({context.vocab_size}, {stops}, {specials})"


def _tokens_source(tokens: list[bytes | None]) -> str:
    every = [bytes([i]) for i in range(256)]
    for at in range(max(0, len(tokens) - 255)):
        for order, source in (
            (every, "[bytes([i]) for i in range(256)]"),
            (every[::-1], "[bytes([255 - i]) for i in range(256)]"),
        ):
            if tokens[at : at + 256] == order:
                head = f"{tokens[:at]!r} + " if at else ""
                return f"{head}{source} + {tokens[at + 256 :]!r}"
    return repr(tokens)


def _without_repeats(lines: list[str]) -> list[str]:
    kept: list[str] = []
    for line in lines:
        if not kept or kept[-1] != line or ".next()" not in line:
            kept.append(line)
    return kept
