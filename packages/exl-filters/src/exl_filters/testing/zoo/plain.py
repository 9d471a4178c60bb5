"""`Plain`, a correct filter written the simplest way, and the register of its broken relatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from exl_filters import bits
from exl_filters.base import Allowed, ExLlamaV2Filter
from exl_filters.bits import Words
from exl_filters.context import FilterContext
from exl_filters.errors import FilterRejected, FilterUsageError
from exl_filters.registry import register
from exl_filters.tokens import as_prefix, as_token
from exl_filters.vocabulary import Vocabulary

__all__ = ["LONG", "OPTIONS", "ZOO", "Mutant", "Plain", "mutants"]

OPTIONS = ["yes", "no", "no way", "é😀x"]
LONG = ["the quick brown fox jumps over the lazy dog", "the cat", "the quick brown cat sleeps all day in the sun"]


class Plain(ExLlamaV2Filter):
    """One of some texts: right in every respect, quick in none."""

    native: ClassVar[bool] = True
    # What was computed last, with what it was computed from.
    _text: tuple[list[int], bytes] = ([], b"")
    _targets: tuple[tuple[Any, ...], list[bytes]] = ((), [])

    def __init__(self, model: Any, tokenizer: Vocabulary, options: list[str] | None = None) -> None:
        super().__init__(model, tokenizer)
        self.options = list(OPTIONS if options is None else options)
        self.stops = tokenizer.stop_ids
        self.begin("")

    def attach(self, context: FilterContext) -> None:
        super().attach(context)
        self.stops = context.stop_ids

    def begin(self, prefix_str: Any = "") -> None:
        self.head = as_prefix(prefix_str)
        self.fed: list[int] = []
        self.done_at: int | None = None

    @property
    def done(self) -> bool:
        return self.done_at is not None

    def text(self) -> bytes:
        fed = self.fed if self.done_at is None else self.fed[: self.done_at]
        if self._text[0] != fed:
            self._text = (list(fed), b"".join(self.tokenizer.bytes_of(t) for t in fed))
        return self._text[1]

    def targets(self) -> list[bytes]:
        key = (self.head, *self.options)
        if self._targets[0] != key:
            self._targets = (key, [self.head + option.encode() for option in self.options])
        return self._targets[1]

    def reachable(self, text: bytes) -> bool:
        return any(target.startswith(text) for target in self.targets())

    def fits(self, token: int) -> bool:
        raw = self.tokenizer.bytes_of(token)
        if not raw or not self.reachable(self.text() + raw):
            return False
        # The healing rule: where a token spells all of the head, the first one must.
        return bool(self.fed) or len(raw) >= len(self.head) or not self.spelled_at_once()

    def spelled_at_once(self) -> bool:
        return any(
            self.tokenizer.bytes_of(i).startswith(self.head) and self.reachable(self.tokenizer.bytes_of(i))
            for i in range(self.tokenizer.size)
        )

    def whole(self, text: bytes) -> bool:
        return text in self.targets()

    def final(self, text: bytes) -> bool:
        return self.whole(text) and not any(t != text and t.startswith(text) for t in self.targets())

    def next(self) -> Allowed:
        if self.done:
            return sorted(self.stops), set(self.stops)
        allowed = {t for t in range(self.tokenizer.size) if t not in self.stops and self.fits(t)}
        ends = {t for t in allowed if self.final(self.text() + self.tokenizer.bytes_of(t))}
        if self.whole(self.text()):
            allowed |= self.stops
            ends |= self.stops
        return sorted(allowed), ends

    def feed(self, token: Any) -> None:
        token = as_token(token)
        if not self.done:
            allowed, ends = self.next()
            if token not in (allowed or ()):
                raise FilterRejected(f"token {token}", token)
            if token in ends:
                self.done_at = len(self.fed) + 1
        self.fed.append(token)

    def is_complete(self) -> bool:
        return self.done or self.whole(self.text())

    def ended(self) -> bool:
        return self.done

    def rewind(self, n: int) -> None:
        if not 0 <= n <= len(self.fed):
            raise FilterUsageError(f"rewind({n}) after {len(self.fed)}")
        del self.fed[len(self.fed) - n :]
        if self.done_at is not None and len(self.fed) < self.done_at:
            self.done_at = None

    def validate(self, tokens: Any) -> int:
        trial = self.clone()
        for count, token in enumerate(tokens):
            if token not in (trial.next()[0] or ()):
                return count
            trial.feed(token)
            if trial.done:
                return count + 1
        return len(tokens)

    def forced(self) -> bytes:
        if self.done or self.whole(self.text()) or self.head:
            return b""
        rest = [t[len(self.text()) :] for t in self.targets() if t.startswith(self.text())]
        common = min(rest)
        while not all(r.startswith(common) for r in rest):
            common = common[:-1]
        return common

    def fill_bitmask(self, words: Words) -> bool:
        allowed, _ = self.next()
        bits.copy_into(bits.from_ids(allowed or (), self.tokenizer.size), words)
        return True

    def prepare_logit_mask(self) -> bool:
        return True

    def mask_logits(self, logits: Any) -> Any:
        words = bits.empty(len(logits))
        self.fill_bitmask(words)
        return bits.apply(words, logits.copy())

    def clone(self, c: Any = None) -> Any:
        self._settle()
        new = type(self).__new__(type(self))
        new.__dict__.update(vars(self))
        new.fed, new.background_result = list(self.fed), None
        return new

    def spec(self) -> dict[str, Any]:
        return {"type": type(self).__name__, "options": list(self.options)}


@dataclass(frozen=True)
class Mutant:
    """A broken filter, the law that must catch it, and what it does wrong."""

    law: str
    kind: type[Plain]
    fault: str
    options: tuple[str, ...] = tuple(OPTIONS)

    def __call__(self, vocabulary: Vocabulary) -> Plain:
        return self.kind(None, vocabulary, list(self.options))

    @property
    def name(self) -> str:
        return self.kind.__name__


ZOO: list[Mutant] = []
_K = type[Plain]


def mutants(number: int, fault: str, options: Sequence[str] = OPTIONS) -> Callable[[_K], _K]:
    """Enter a broken filter under the law that catches it; registered by name, so that `spec` works."""

    def add(kind: _K) -> _K:
        ZOO.append(Mutant(f"LAW-{number:02d}", kind, fault, tuple(options)))
        register(kind.__name__, kind, replace=True)
        return kind

    return add


register("Plain", Plain, replace=True)
