"""Broken answers and broken state: LAW-01 to LAW-11."""

from __future__ import annotations

from typing import Any

import numpy as np

from exl_filters.base import Allowed
from exl_filters.errors import FilterRejected
from exl_filters.tokens import as_token
from exl_filters.vocabulary import Vocabulary
from zoo.plain import Plain, mutants

__all__: list[str] = []


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


@mutants(2, "an id past the vocabulary")
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


@mutants(6, "goes by the order of a set, which another process has otherwise")
class ByHashSeed(Plain):
    def fits(self, token: int) -> bool:
        return super().fits(token) and hash(self.tokenizer.piece(token)) % 2 == 0


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
