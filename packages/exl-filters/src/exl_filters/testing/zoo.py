"""Broken filters, each breaking one law: the proof that the kit bites.

`Plain` is a correct filter written the simplest way (every token tried against every option). Every mutant changes one
thing of it that some real filter got wrong.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from exl_filters import bits
from exl_filters.base import Allowed, ExLlamaV2Filter
from exl_filters.bits import Words
from exl_filters.context import FilterContext
from exl_filters.errors import FilterRejected, FilterUsageError
from exl_filters.registry import register
from exl_filters.tokens import as_prefix, as_token
from exl_filters.vocabulary import Vocabulary

__all__ = ["OPTIONS", "ZOO", "Mutant", "Plain", "mutants"]

OPTIONS = ["yes", "no", "no way", "é😀x"]


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

    def __call__(self, vocabulary: Vocabulary) -> Plain:
        return self.kind(None, vocabulary)

    @property
    def name(self) -> str:
        return self.kind.__name__


ZOO: list[Mutant] = []
_K = type[Plain]


def mutants(number: int, fault: str) -> Callable[[_K], _K]:
    """Enter a broken filter under the law that catches it; registered by name, so that `spec` works."""

    def add(kind: _K) -> _K:
        ZOO.append(Mutant(f"LAW-{number:02d}", kind, fault))
        register(kind.__name__, kind, replace=True)
        return kind

    return add


register("Plain", Plain, replace=True)


@mutants(1, "a tuple for the allowed ids")
class TupleAllowed(Plain):
    def next(self) -> Allowed:
        allowed, ends = super().next()
        return tuple(allowed or ()), ends


@mutants(1, "None for no end tokens")
class NoneEnds(Plain):
    def next(self) -> Any:
        allowed, ends = super().next()
        return allowed, ends or None


@mutants(1, "numpy integers")
class NumpyIds(Plain):
    def next(self) -> Allowed:
        allowed, ends = super().next()
        return list(np.array(allowed)), ends


@mutants(2, "a hole in the vocabulary is matched by its empty text")
class AllowsHoles(Plain):
    def next(self) -> Allowed:
        allowed, ends = super().next()
        v = self.tokenizer
        return sorted({*(allowed or ()), *(i for i in range(v.size) if not v.is_defined(i))}), ends


@mutants(2, "an id behind the vocabulary")
class AllowsPadding(Plain):
    def next(self) -> Allowed:
        allowed, ends = super().next()
        return [*(allowed or ()), self.tokenizer.size], ends


@mutants(3, "an unsorted list")
class Unsorted(Plain):
    def next(self) -> Allowed:
        allowed, ends = super().next()
        return list(allowed or ())[::-1], ends


@mutants(4, "the end tokens are those of any state")
class EndsNotAllowed(Plain):
    def next(self) -> Allowed:
        allowed, ends = super().next()
        return allowed, set(ends) | set(self.tokenizer.ids_of(b"s"))


@mutants(5, "asking uses up an option")
class NextMoves(Plain):
    def next(self) -> Allowed:
        answer = super().next()
        self.options = self.options[1:] or self.options
        return answer


@mutants(6, "instances differ")
class ByInstance(Plain):
    made = 0

    def __init__(self, model: Any, tokenizer: Vocabulary, options: list[str] | None = None) -> None:
        type(self).made += 1
        super().__init__(model, tokenizer, ["yes"] if type(self).made % 2 else ["no"])


@mutants(7, "restarts when fed twice without next()")
class NeedsNext(Plain):
    asked = False

    def next(self) -> Allowed:
        self.asked = True
        return super().next()

    def feed(self, token: Any) -> None:
        if self.fed and not self.asked:
            self.begin("")
        super().feed(token)
        self.asked = False


@mutants(8, "begin() keeps what was fed")
class BeginKeeps(Plain):
    def begin(self, prefix_str: Any = "") -> None:
        before = getattr(self, "fed", [])
        super().begin(prefix_str)
        self.fed = before[:1]


@mutants(8, "begin() does not leave the end")
class BeginStaysDone(Plain):
    def begin(self, prefix_str: Any = "") -> None:
        over = getattr(self, "done_at", None)
        super().begin(prefix_str)
        self.done_at = 0 if over is not None else None


@mutants(9, "feed() wants a tensor")
class WantsTensor(Plain):
    def feed(self, token: Any) -> None:
        super().feed(int(token[0][0]))


@mutants(9, "feed() does not take a tensor")
class WantsInt(Plain):
    def feed(self, token: Any) -> None:
        if not isinstance(token, int):
            raise TypeError("an int, please")
        super().feed(token)


@mutants(9, "allows a token and refuses it")
class AllowsAndRefuses(Plain):
    def feed(self, token: Any) -> None:
        if len(self.tokenizer.bytes_of(as_token(token))) > 2:
            raise FilterRejected("too long", as_token(token))
        super().feed(token)


@mutants(10, "turns itself off at a token it does not know")
class FailsOpen(Plain):
    off = False

    def begin(self, prefix_str: Any = "") -> None:
        super().begin(prefix_str)
        self.off = False

    def feed(self, token: Any) -> None:
        try:
            super().feed(token)
        except FilterRejected:
            self.off = True

    def next(self) -> Allowed:
        return (None, set()) if self.off else super().next()


@mutants(10, "refuses with an exception of its own")
class RefusesWithValueError(Plain):
    def feed(self, token: Any) -> None:
        try:
            super().feed(token)
        except FilterRejected:
            raise ValueError("not accepted") from None


@mutants(10, "remembers what it refused")
class RefusesAndMoves(Plain):
    def feed(self, token: Any) -> None:
        try:
            super().feed(token)
        except FilterRejected:
            self.options = self.options[:1]
            raise


@mutants(11, "complains about the EOS it offered")
class RefusesEos(Plain):
    def feed(self, token: Any) -> None:
        if self.done:
            raise ValueError("already over")
        super().feed(token)


@mutants(12, "clone() returns itself")
class ClonesItself(Plain):
    def clone(self, c: Any = None) -> Any:
        return self


@mutants(12, "clone() forgets the state")
class ClonesFresh(Plain):
    def clone(self, c: Any = None) -> Any:
        return type(self)(self.model, self.tokenizer)


@mutants(13, "clones share their list")
class SharesList(Plain):
    def clone(self, c: Any = None) -> Any:
        new = super().clone()
        new.fed = self.fed
        return new


@mutants(13, "a clone does not know of background work")
class CloneLacksBackground(Plain):
    def clone(self, c: Any = None) -> Any:
        new = super().clone()
        new.get_next = None
        return new


@mutants(14, "keeps a background result for ever")
class StaleResult(Plain):
    def get_next(self, mask: bool = False) -> Any:
        if self.background_result is not None:
            self.kept = self.background_result.result()
            self.background_result = None
        return getattr(self, "kept", None) or super().get_next(mask)

    def background_drop(self) -> None:
        if self.background_result is not None:
            self.kept = self.background_result.result()
            self.background_result = None


@mutants(15, "a failed computation poisons the filter")
class Poisoned(Plain):
    def background_drop(self) -> None:
        if self.background_result is not None:
            self.background_result.result()
            self.background_result = None


@mutants(15, "a failure in the background is swallowed")
class Swallows(Plain):
    def get_next(self, mask: bool = False) -> Any:
        try:
            return super().get_next(mask)
        except ZeroDivisionError:
            return [], set()


@mutants(16, "leaves the padding of wide logits open")
class MaskLeavesPadding(Plain):
    def mask_logits(self, logits: Any) -> Any:
        out = super().mask_logits(logits)
        out[self.tokenizer.size :] = logits[self.tokenizer.size :]
        return out


@mutants(16, "sets allowed entries to zero")
class MaskFlattens(Plain):
    def mask_logits(self, logits: Any) -> Any:
        out = super().mask_logits(logits)
        return np.where(np.isfinite(out), out.dtype.type(0), out)


@mutants(17, "returns a row of its own, whatever came before")
class MaskRevives(Plain):
    def mask_logits(self, logits: Any) -> Any:
        out = super().mask_logits(np.zeros_like(logits))
        return np.where(np.isfinite(out), np.where(np.isfinite(logits), logits, 0), out).astype(logits.dtype)


@mutants(17, "masking is a step")
class MaskMoves(Plain):
    def mask_logits(self, logits: Any) -> Any:
        out = super().mask_logits(logits)
        if not self.done:
            self.options = self.options[1:] or self.options
        return out


@mutants(18, "loses bit 31 of a word")
class LosesSignBit(Plain):
    def fill_bitmask(self, words: Words) -> bool:
        super().fill_bitmask(words)
        words &= 0x7FFFFFFF
        return True


@mutants(18, "adds to what the buffer held")
class AddsToBuffer(Plain):
    def fill_bitmask(self, words: Words) -> bool:
        before = words.copy()
        super().fill_bitmask(words)
        words |= before
        return True


@mutants(18, "sets the bits behind the vocabulary")
class SetsTail(Plain):
    def fill_bitmask(self, words: Words) -> bool:
        super().fill_bitmask(words)
        for bit in range(self.tokenizer.size, len(words) * 32):
            bits.put(words, bit, True)
        return True


@mutants(19, "matches control tokens by their spelling")
class SpellsSpecials(Plain):
    def next(self) -> Allowed:
        allowed, ends = super().next()
        texts = self.tokenizer.special_texts
        spelled = {
            i for i, text in texts.items() if i not in self.stops and self.reachable(self.text() + text.encode())
        }
        return (allowed, ends) if self.done else (sorted({*(allowed or ()), *spelled}), ends)


@mutants(20, "instances share their state through the class")
class SharesThroughClass(Plain):
    feeds: ClassVar[dict[int, int]] = {}

    def fill_bitmask(self, words: Words) -> bool:
        # Two in one stack: the second sees the first's buffer.
        type(self).feeds[0] = type(self).feeds.get(0, 0) + 1
        super().fill_bitmask(words)
        if type(self).feeds[0] % 2 == 0:
            words[:] = 0
        return True


@mutants(21, "works on characters: what tokens split is out of reach")
class Characters(Plain):
    def fits(self, token: int) -> bool:
        try:
            self.tokenizer.bytes_of(token).decode()
        except UnicodeDecodeError:
            return False
        return super().fits(token) and len(self.tokenizer.bytes_of(token).decode()) > (0 if self.fed else 1)


@mutants(22, "allows a token that goes beyond the option")
class Overshoots(Plain):
    def reachable(self, text: bytes) -> bool:
        return super().reachable(text) or any(text.startswith(target) for target in self.targets())

    def whole(self, text: bytes) -> bool:
        return any(text.startswith(target) for target in self.targets())

    def final(self, text: bytes) -> bool:
        return self.whole(text)


@mutants(23, "keeps one id of each text")
class OneIdPerText(Plain):
    def fits(self, token: int) -> bool:
        return super().fits(token) and self.tokenizer.ids_of(self.tokenizer.bytes_of(token))[0] == token


@mutants(24, "only single bytes")
class BytesOnly(Plain):
    def fits(self, token: int) -> bool:
        return super().fits(token) and len(self.tokenizer.bytes_of(token)) == 1


@mutants(25, "stops when it likes")
class StopsEarly(Plain):
    def next(self) -> Allowed:
        allowed, ends = super().next()
        return sorted({*(allowed or ()), *self.stops}), ends


@mutants(25, "ends in the middle of an option")
class EndsEarly(Plain):
    def final(self, text: bytes) -> bool:
        return len(text) >= 2


@mutants(26, "an option that begins another cannot stop")
class NestedCannotStop(Plain):
    def next(self) -> Allowed:
        allowed, ends = super().next()
        if not self.done and not self.final(self.text()):
            return sorted(set(allowed or ()) - self.stops), set(ends) - self.stops
        return allowed, ends


@mutants(27, "whitespace for ever")
class EndlessSpace(Plain):
    def reachable(self, text: bytes) -> bool:
        return not text.strip(b" ")

    def whole(self, text: bytes) -> bool:
        return False


@mutants(28, "counts tokens where it should count bytes")
class CountsTokens(Plain):
    def next(self) -> Allowed:
        allowed, ends = super().next()
        if len(self.fed) == 2 and not self.done:
            return (list(allowed or ())[:1] or allowed), set(ends) & set(list(allowed or ())[:1])
        return allowed, ends


@mutants(29, "spec() forgets a parameter")
class SpecForgets(Plain):
    def __init__(self, model: Any, tokenizer: Vocabulary, options: list[str] | None = None) -> None:
        super().__init__(model, tokenizer, options if options is not None else ["maybe"])

    def spec(self) -> dict[str, Any]:
        return {"type": "SpecForgets", "options": ["yes"]}


@mutants(30, "keeps its state in the thread")
class ThreadLocal(Plain):
    here = threading.local()

    def next(self) -> Allowed:
        if not hasattr(self.here, "first"):
            self.here.first = threading.get_ident()
        if threading.current_thread() is threading.main_thread():
            return super().next()
        allowed, ends = super().next()
        return list(allowed or ())[:1], set(ends) & set(list(allowed or ())[:1])


@mutants(31, "rewinds one too few")
class RewindsLess(Plain):
    def rewind(self, n: int) -> None:
        super().rewind(n)
        if n > 1:
            self.fed.append(self.fed[0] if self.fed else 0)


@mutants(31, "stays over when rewound across the end")
class RewindsNotEnd(Plain):
    def rewind(self, n: int) -> None:
        over = self.done_at
        super().rewind(n)
        self.done_at = over


@mutants(32, "ignores the text to be regenerated")
class IgnoresPrefix(Plain):
    def begin(self, prefix_str: Any = "") -> None:
        super().begin("")


@mutants(33, "validate() feeds")
class ValidateFeeds(Plain):
    def validate(self, tokens: Any) -> int:
        count = super().validate(tokens)
        for token in list(tokens)[:count]:
            self.feed(token)
        return count


@mutants(33, "validate() counts what is permitted anywhere")
class ValidateUnordered(Plain):
    def validate(self, tokens: Any) -> int:
        allowed = self.next()[0] or ()
        return sum(token in allowed for token in tokens)


@mutants(34, "forces its favourite option")
class ForcesFirst(Plain):
    def forced(self) -> bytes:
        return self.options[0].encode() if not self.fed and not self.done else b""


@mutants(35, "allows odd ids only")
class OddIds(Plain):
    def fits(self, token: int) -> bool:
        return super().fits(token) and bool(token % 2)


@mutants(36, "remembers every text it ever saw")
class Remembers(Plain):
    def __init__(self, model: Any, tokenizer: Vocabulary, options: list[str] | None = None) -> None:
        self.history: list[Any] = []
        super().__init__(model, tokenizer, options)

    def begin(self, prefix_str: Any = "") -> None:
        super().begin(prefix_str)
        self.history.append(bytearray(1000))


@mutants(37, "seeds everybody's random numbers")
class Seeds(Plain):
    def next(self) -> Allowed:
        random.seed(1)
        return super().next()


@mutants(37, "sorts its caller's list")
class ChangesCallersOptions(Plain):
    given: ClassVar[list[str]] = []

    def __init__(self, model: Any, tokenizer: Vocabulary, options: list[str] | None = None) -> None:
        if options is not None:
            options.append("changed")
        super().__init__(model, tokenizer, options)
