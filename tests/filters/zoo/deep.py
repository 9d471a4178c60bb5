"""Filters that are correct for a dozen tokens, at the first host, or until they are rewound."""

from __future__ import annotations

from typing import Any

from exl_filters import bits
from exl_filters.base import Allowed
from exl_filters.bits import Words
from exl_filters.context import FilterContext
from zoo.plain import LONG, Plain, mutants

__all__: list[str] = []

DEEP = 14


@mutants(8, "knows the stop ids of its first host only")
class AttachedOnce(Plain):
    def attach(self, context: FilterContext) -> None:
        if self.context is None:
            super().attach(context)


@mutants(8, "the mask of the last generation, until the first token")
class MaskSurvivesBegin(Plain):
    kept: Words | None = None

    def feed(self, token: Any) -> None:
        super().feed(token)
        self.kept = None

    def rewind(self, n: int) -> None:
        super().rewind(n)
        self.kept = None

    def fill_bitmask(self, words: Words) -> bool:
        if self.kept is None or len(self.kept) != len(words):
            super().fill_bitmask(words)
            self.kept = words.copy()
        words[:] = self.kept
        return True


@mutants(31, "a rewind leaves the mask as it was")
class MaskSurvivesRewind(MaskSurvivesBegin):
    def begin(self, prefix_str: Any = "") -> None:
        super().begin(prefix_str)
        self.kept = None

    def rewind(self, n: int) -> None:
        Plain.rewind(self, n)


@mutants(16, "a rewind leaves the prepared mask as it was")
class PreparedSurvivesRewind(Plain):
    prepared: Allowed | None = None

    def begin(self, prefix_str: Any = "") -> None:
        super().begin(prefix_str)
        self.prepared = None

    def feed(self, token: Any) -> None:
        super().feed(token)
        self.prepared = None

    def prepare_logit_mask(self) -> bool:
        if self.prepared is None:
            self.prepared = self.next()
        return True

    def mask_logits(self, logits: Any) -> Any:
        self.prepare_logit_mask()
        assert self.prepared is not None
        return bits.apply(bits.from_ids(self.prepared[0] or (), len(logits)), logits.copy())


@mutants(12, "a clone keeps the last few tokens", LONG)
class ClonesTheTail(Plain):
    def clone(self, c: Any = None) -> Any:
        new = super().clone(c)
        if len(new.fed) > DEEP:
            new.fed = new.fed[:4] + new.fed[-4:]
        return new


@mutants(21, "loses the way after some tokens", LONG)
class DeadDeep(Plain):
    def fits(self, token: int) -> bool:
        return len(self.fed) < DEEP and super().fits(token)


@mutants(22, "lets everything through after some tokens", LONG)
class OpenDeep(Plain):
    def fits(self, token: int) -> bool:
        return super().fits(token) or (len(self.fed) >= DEEP and bool(self.tokenizer.bytes_of(token)))

    def reachable(self, text: bytes) -> bool:
        return super().reachable(text) or len(self.fed) >= DEEP


@mutants(25, "is_complete() after some tokens", LONG)
class CompleteDeep(Plain):
    def is_complete(self) -> bool:
        return super().is_complete() or len(self.fed) >= DEEP


@mutants(25, "stops shortly before the end of a long text", LONG)
class StopsNearTheEnd(Plain):
    def next(self) -> Allowed:
        allowed, ends = super().next()
        near = any(len(t) > 30 and t.startswith(self.text()) and 0 < len(t) - len(self.text()) < 3 for t in LONG_TEXTS)
        return (sorted({*(allowed or ()), *self.stops}), ends) if near and not self.done else (allowed, ends)


@mutants(31, "undoes no more than a dozen tokens", LONG)
class RewindsADozen(Plain):
    def rewind(self, n: int) -> None:
        super().rewind(min(n, DEEP - 2) if n <= len(self.fed) else n)


LONG_TEXTS = [option.encode() for option in LONG]
