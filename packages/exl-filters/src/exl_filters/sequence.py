"""`SequenceFilter`: a sentence of one filter, then a sentence of the next."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from exl_filters import bits
from exl_filters.base import Allowed
from exl_filters.bits import Words
from exl_filters.context import FilterContext
from exl_filters.driver import FilterDriver
from exl_filters.errors import FilterCompileError, FilterFailed, FilterRejected
from exl_filters.foreign import as_filter
from exl_filters.replayed import ReplayedFilter
from exl_filters.tokens import as_prefix, as_token
from exl_filters.vocabulary import Vocabulary, vocabulary_of

__all__ = ["SequenceFilter"]

# A part that allows more ids is inside free text; a search for its end after each id would dominate a step.
MAX_PROBED = 64
# Limit of places in the parts that a text may be at. Each is a separate state; overlapping parts add more with the
# text.
MAX_PLACES = 256

# (which part, its driver)
_Place = tuple[int, FilterDriver]


class SequenceFilter(ReplayedFilter):
    """Constrain the text to a sentence of each of `filters`, one after another: `SequenceFilter([select, grammar])`.

    Where a part is complete and could also continue, both ways stay open. Parts meet between two tokens, or inside a
    token whose beginning is a token that completes the part (searched where the part allows at most 64 ids). Other
    tokens across a border are not allowed: the text is in the language, but not in every tokenization. Ends when the
    last part ends.

    Args:
        filters: At least one filter; each is cloned.

    Raises:
        FilterCompileError: `filters` is empty.
    """

    native: ClassVar[bool] = True
    capabilities: ClassVar[tuple[str, ...]] = ("canonical_only",)

    def __init__(self, filters: Sequence[Any]) -> None:
        if not filters:
            raise FilterCompileError("SequenceFilter needs at least one filter")
        self._parts = [as_filter(f) for f in filters]
        first = next((f for f in self._parts if f.tokenizer is not None), self._parts[0])
        super().__init__(first.model, first.tokenizer)
        self.vocabulary: Vocabulary = vocabulary_of(self.tokenizer)
        v = self.vocabulary
        self.attach(FilterContext.make(v.size, v.stop_ids, v.special_ids))

    # Methods of the contract.

    def attach(self, context: FilterContext) -> None:
        """Receive the host's stop ids for the last part, and begin. The other parts get none."""
        super().attach(context)
        # Only the last part may stop: the others have no stop ids, and offer none.
        inner = FilterContext.make(context.vocab_size, (), context.special_ids, context.logits_width)
        last = len(self._parts) - 1
        # Drivers at the start of each part, copied wherever a part begins and shared by all clones. With one copy for
        # each clone, every level of nested sequences would double the cost.
        self._parts = [f.clone() for f in self._parts]
        self._starting = threading.Lock()
        self._starts = [FilterDriver(f, context if i == last else inner) for i, f in enumerate(self._parts)]
        self._stop_words = bits.from_ids(context.stop_ids, context.vocab_size)
        self.begin("")

    def begin(self, prefix_str: Any = "") -> None:
        """Start at the first part."""
        self._prefix = as_prefix(prefix_str)
        self._fed = []
        self._done = self._ended = False
        self._settle_places([(0, self._started(0, self._prefix))])

    def fill_bitmask(self, words: Words) -> bool:
        """Write the union of what the open places allow, or the stop ids after the end. False: no opinion."""
        if self._done:
            bits.copy_into(self._stop_words, words)
            return True
        combined = self._combined()
        if combined is None:
            return False
        bits.copy_into(combined, words)
        return True

    def next(self) -> Allowed:
        """Return the union of what the open places allow, and the ids that end the last part."""
        words = bits.empty(self._context.vocab_size)
        if not self.fill_bitmask(words):
            return None, set()
        ids = bits.to_ids(words)
        stops = self._context.stop_ids
        return ids, {i for i in ids if i in stops} | (set() if self._done else self._last_ends(words))

    def feed(self, token: Any) -> None:
        """Advance every open place that allows the token. Raises `FilterRejected` if none does."""
        token = as_token(token)
        if not self._done:
            combined = self._combined()
            if combined is not None and not bits.test(combined, token):
                raise FilterRejected(f"token {token} is not allowed by {self.describe()}", token)
            if token in self._context.stop_ids:
                self._done, self._ended = True, combined is not None
            else:
                self._settle_places(list(self._after(token)))
        self._fed.append(token)

    def is_complete(self) -> bool:
        """Whether the last part is complete at an open place."""
        return self._done or any(self._is_last(i) and driver.complete for i, driver in self._places)

    def ended(self) -> bool:
        """Whether the last feed finished the sequence."""
        return self._ended

    def clone(self, c: Any = None) -> Any:
        """Return a sequence with copies of the open places, in the same state."""
        new = self._clone_sharing(c)
        new._fed = list(self._fed)
        new._places = [(i, driver.copy()) for i, driver in self._places]
        new._spanning = None
        return new

    def describe(self) -> str:
        """Name the parts."""
        return f"Sequence({', '.join(f.describe() for f in self._parts)})"

    def spec(self) -> dict[str, Any]:
        """Return `{"type": "sequence", "filters": [...]}`."""
        return {"type": "sequence", "filters": [f.spec() for f in self._parts]}

    # Internal methods.

    @property
    def _context(self) -> FilterContext:
        assert self.context is not None
        return self.context

    def _is_last(self, index: int) -> bool:
        return index == len(self._parts) - 1

    def _started(self, index: int, prefix: bytes = b"") -> FilterDriver:
        with self._starting:  # llguidance rejects a matcher that two threads use
            driver = self._starts[index].copy()
        driver.begin(prefix)
        return driver

    def _settle_places(self, places: list[_Place]) -> None:
        """Open the next part after every complete part; drop the places of parts that have ended."""
        kept: list[_Place] = []
        while places:
            index, driver = places.pop(0)
            if not self._is_last(index) and driver.complete:
                places.append((index + 1, self._started(index + 1)))
            if self._is_last(index) or not driver.done:
                kept.append((index, driver))
        if kept and all(driver.done for _, driver in kept):
            self._done = self._ended = True
        self._places = [(index, driver) for index, driver in kept if not driver.done]
        if len(self._places) > MAX_PLACES:
            raise FilterFailed(
                f"{self.describe():.200} could be at {len(self._places)} places of its parts at once; the limit is "
                f"{MAX_PLACES}: make clear where a part ends, or write it as one grammar"
            )
        self._spanning: list[tuple[bytes, _Place]] | None = None

    def _open(self, index: int, driver: FilterDriver) -> Words | None:
        """Return the mask of a part, without stop ids unless it is the last."""
        words = driver.mask()
        return words if words is None or self._is_last(index) else words & ~self._stop_words

    def _combined(self) -> Words | None:
        combined = bits.empty(self._context.vocab_size)
        for index, driver in self._places:
            words = self._open(index, driver)
            if words is None:
                return None
            combined |= words
        for _, (_, driver) in self._spans():
            words = driver.mask()
            if words is not None:
                combined |= words & ~self._stop_words
        return combined

    def _spans(self) -> list[tuple[bytes, _Place]]:
        """Return starts of the next part for tokens across the border: begun with the text of a token that completes a
        part.
        """
        if self._spanning is None:
            self._spanning = []
            for index, driver in self._places:
                if not self._is_last(index):
                    for text in self._finishing(index, driver):
                        self._spanning.append((text, (index + 1, self._started(index + 1, text))))
        return self._spanning

    def _finishing(self, index: int, driver: FilterDriver) -> set[bytes]:
        """Return the texts of the tokens after which the part is complete."""
        words = self._open(index, driver)
        if words is None or bits.count(words) > MAX_PROBED:
            return set()
        found: set[bytes] = set()
        for token in bits.to_ids(words):
            text = self.vocabulary.bytes_of(token)
            if text and text not in found:
                trial = driver.copy()
                trial.feed(token)
                if trial.complete:
                    found.add(text)
        return found

    def _after(self, token: int) -> Iterator[_Place]:
        """Yield the places that an allowed token leads to."""
        spans = self._spans()
        for index, driver in self._places:
            words = self._open(index, driver)
            if words is None or bits.test(words, token):
                driver.feed(token)
                yield index, driver
        raw = self.vocabulary.bytes_of(token)
        for text, (index, driver) in spans:
            words = driver.mask()
            if len(raw) > len(text) and raw.startswith(text) and words is not None and bits.test(words, token):
                driver.feed(token)
                yield index, driver

    def _last_ends(self, words: Words) -> set[int]:
        """Return the ids after which only the end is left."""
        if not any(self._is_last(index) for index, _ in self._places) or bits.count(words) > MAX_PROBED:
            return set()
        ends: set[int] = set()
        for token in bits.to_ids(words):
            if token not in self._context.stop_ids:
                trial = self.clone()
                trial.feed(token)
                if trial.ended():
                    ends.add(token)
        return ends
