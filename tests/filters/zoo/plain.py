"""`Plain`, a correct filter written in the simplest way, and the list of its broken variants."""

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
    """Allow one of some texts: correct in every respect, and slow."""

    native: ClassVar[bool] = True
    # The last computed values, with their inputs.
    _text: tuple[list[int], bytes] = ([], b"")
    _targets: tuple[tuple[Any, ...], list[bytes]] = ((), [])

    def __init__(self, model: Any, tokenizer: Vocabulary, options: list[str] | None = None) -> None:
        super().__init__(model, tokenizer)
        self.options = list(OPTIONS if options is None else options)
        self.stops = tokenizer.stop_ids
        self.begin("")

    def attach(self, context: FilterContext) -> None:
        """Receive the host's stop ids."""
        super().attach(context)
        self.stops = context.stop_ids

    def begin(self, prefix_str: Any = "") -> None:
        """Reset the text; `prefix_str` is the text to write again."""
        self.head = as_prefix(prefix_str)
        self.fed: list[int] = []
        self.done_at: int | None = None

    @property
    def done(self) -> bool:
        """Whether the filter has ended."""
        return self.done_at is not None

    def text(self) -> bytes:
        """Return the bytes of the fed tokens up to the end."""
        fed = self.fed if self.done_at is None else self.fed[: self.done_at]
        if self._text[0] != fed:
            self._text = (list(fed), b"".join(self.tokenizer.bytes_of(t) for t in fed))
        return self._text[1]

    def targets(self) -> list[bytes]:
        """Return the options with the healing prefix in front."""
        key = (self.head, *self.options)
        if self._targets[0] != key:
            self._targets = (key, [self.head + option.encode() for option in self.options])
        return self._targets[1]

    def reachable(self, text: bytes) -> bool:
        """Whether `text` begins an option."""
        return any(target.startswith(text) for target in self.targets())

    def fits(self, token: int) -> bool:
        """Whether a token may follow the text."""
        raw = self.tokenizer.bytes_of(token)
        if not raw or not self.reachable(self.text() + raw):
            return False
        # Token healing: where one token spells all of the head, the first token must.
        return bool(self.fed) or len(raw) >= len(self.head) or not self.spelled_at_once()

    def spelled_at_once(self) -> bool:
        """Whether one token spells all of the head and begins an option."""
        return any(
            self.tokenizer.bytes_of(i).startswith(self.head) and self.reachable(self.tokenizer.bytes_of(i))
            for i in range(self.tokenizer.size)
        )

    def whole(self, text: bytes) -> bool:
        """Whether `text` is an option."""
        return text in self.targets()

    def final(self, text: bytes) -> bool:
        """Whether `text` is an option that begins no other one."""
        return self.whole(text) and not any(t != text and t.startswith(text) for t in self.targets())

    def next(self) -> Allowed:
        """Try every token. Returns the allowed ids and the ids that end the text."""
        if self.done:
            return sorted(self.stops), set(self.stops)
        allowed = {t for t in range(self.tokenizer.size) if t not in self.stops and self.fits(t)}
        ends = {t for t in allowed if self.final(self.text() + self.tokenizer.bytes_of(t))}
        if self.whole(self.text()):
            allowed |= self.stops
            ends |= self.stops
        return sorted(allowed), ends

    def feed(self, token: Any) -> None:
        """Accept an allowed token; later tokens are recorded and ignored."""
        token = as_token(token)
        if not self.done:
            allowed, ends = self.next()
            if token not in (allowed or ()):
                raise FilterRejected(f"token {token}", token)
            if token in ends:
                self.done_at = len(self.fed) + 1
        self.fed.append(token)

    def is_complete(self) -> bool:
        """Whether the text is an option."""
        return self.done or self.whole(self.text())

    def ended(self) -> bool:
        """Whether the filter has ended."""
        return self.done

    def rewind(self, n: int) -> None:
        """Undo the last `n` feeds, also across the end."""
        if not 0 <= n <= len(self.fed):
            raise FilterUsageError(f"rewind({n}) after {len(self.fed)}")
        del self.fed[len(self.fed) - n :]
        if self.done_at is not None and len(self.fed) < self.done_at:
            self.done_at = None

    def validate(self, tokens: Any) -> int:
        """Feed a clone; returns how many of `tokens` may follow."""
        trial = self.clone()
        for count, token in enumerate(tokens):
            if token not in (trial.next()[0] or ()):
                return count
            trial.feed(token)
            if trial.done:
                return count + 1
        return len(tokens)

    def forced(self) -> bytes:
        """Return the longest common beginning of what may follow."""
        if self.done or self.whole(self.text()) or self.head:
            return b""
        rest = [t[len(self.text()) :] for t in self.targets() if t.startswith(self.text())]
        common = min(rest)
        while not all(r.startswith(common) for r in rest):
            common = common[:-1]
        return common

    def fill_bitmask(self, words: Words) -> bool:
        """Write the answer of `next` as a mask."""
        allowed, _ = self.next()
        bits.copy_into(bits.from_ids(allowed or (), self.tokenizer.size), words)
        return True

    def prepare_logit_mask(self) -> bool:
        """Return True: nothing is prepared."""
        return True

    def mask_logits(self, logits: Any) -> Any:
        """Return a copy of `logits` with the excluded entries at -inf."""
        words = bits.empty(len(logits))
        self.fill_bitmask(words)
        return bits.apply(words, logits.copy())

    def clone(self, c: Any = None) -> Any:
        """Return an independent copy."""
        self._wait_pending()
        new = type(self).__new__(type(self))
        new.__dict__.update(vars(self))
        new.fed, new.background_result = list(self.fed), None
        return new

    def spec(self) -> dict[str, Any]:
        """Return `{"type": class name, "options": [...]}`."""
        return {"type": type(self).__name__, "options": list(self.options)}


@dataclass(frozen=True)
class Mutant:
    """A broken filter, the law that must detect it, and its fault in one sentence."""

    law: str
    kind: type[Plain]
    fault: str
    options: tuple[str, ...] = tuple(OPTIONS)

    def __call__(self, vocabulary: Vocabulary) -> Plain:
        """Build the filter over a vocabulary."""
        return self.kind(None, vocabulary, list(self.options))

    @property
    def name(self) -> str:
        """Name of the class."""
        return self.kind.__name__


ZOO: list[Mutant] = []
_K = type[Plain]


def mutants(number: int, fault: str, options: Sequence[str] = OPTIONS) -> Callable[[_K], _K]:
    """Register a broken filter under the law that detects it, also by name, so that `spec` works."""

    def add(kind: _K) -> _K:
        ZOO.append(Mutant(f"LAW-{number:02d}", kind, fault, tuple(options)))
        register(kind.__name__, kind, replace=True)
        return kind

    return add


register("Plain", Plain, replace=True)
