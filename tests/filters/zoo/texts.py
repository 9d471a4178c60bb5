"""Broken languages, rewinds, drafts and side effects: LAW-21 to LAW-37."""

from __future__ import annotations

import random
import threading
from typing import Any, ClassVar

from exl_filters.base import Allowed
from exl_filters.vocabulary import Vocabulary
from zoo.plain import Plain, mutants

__all__: list[str] = []


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


@mutants(31, "ended() stays true when rewound across the end")
class EndedSticks(Plain):
    was_over = False

    def begin(self, prefix_str: Any = "") -> None:
        super().begin(prefix_str)
        self.was_over = False

    def feed(self, token: Any) -> None:
        super().feed(token)
        self.was_over = self.was_over or self.done

    def ended(self) -> bool:
        return self.was_over


@mutants(25, "is_complete() is always true")
class AlwaysComplete(Plain):
    def is_complete(self) -> bool:
        return True


@mutants(26, "ended() is always false")
class NeverEnded(Plain):
    def ended(self) -> bool:
        return False


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
