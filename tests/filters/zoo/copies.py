"""Broken copies, background work, masks and combination: LAW-12 to LAW-20."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from exl_filters import bits
from exl_filters.base import Allowed
from exl_filters.bits import Words
from zoo.plain import Plain, mutants

__all__: list[str] = []


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


@mutants(18, "sets the bits past the vocabulary")
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
