"""Filters made of filters: all of, any of, and a filter that starts at a trigger."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal

from exl_filters import bits
from exl_filters.base import Allowed, ExLlamaV2Filter
from exl_filters.bits import Words
from exl_filters.context import FilterContext
from exl_filters.driver import FilterDriver
from exl_filters.errors import FilterCompileError, FilterRejected, FilterUsageError
from exl_filters.foreign import as_filter
from exl_filters.replayed import ReplayedFilter
from exl_filters.tokens import as_prefix, as_token, encoded
from exl_filters.vocabulary import Vocabulary, vocabulary_of

__all__ = ["AllOf", "AnyOf", "TriggeredFilter"]


class _Composite(ExLlamaV2Filter, ABC):
    """Drive private copies of other filters. Subclasses combine the masks and choose which filters receive a token.

    Raises FilterCompileError without a filter.
    """

    native: ClassVar[bool] = True

    def __init__(self, filters: Sequence[Any]) -> None:
        if not filters:
            raise FilterCompileError(f"{type(self).__name__} needs at least one filter")
        self._parts = [as_filter(f).clone() for f in filters]
        first = next((f for f in self._parts if f.tokenizer is not None), self._parts[0])
        super().__init__(first.model, first.tokenizer)
        self.vocabulary: Vocabulary = vocabulary_of(self.tokenizer)
        v = self.vocabulary
        self._use(FilterContext.make(v.size, v.stop_ids, v.special_ids))
        self.begin("")

    def _use(self, context: FilterContext) -> None:
        self.context = context
        self._drivers = [FilterDriver(f, context) for f in self._parts]
        # Journal length at which the composite ended. Later tokens are counted and ignored.
        self._length = 0
        self._done_at: int | None = None
        self._ended = False

    # Methods of the contract.

    def attach(self, context: FilterContext) -> None:
        """Receive the host's vocabulary size and stop ids, pass them on to every part, and begin."""
        self._use(context)
        self.begin("")

    def begin(self, prefix_str: Any = "") -> None:
        """Reset the composite and every part; the parts share the healing prefix."""
        self._length, self._done_at, self._ended = 0, None, False
        for driver in self._drivers:
            driver.begin(as_prefix(prefix_str))

    def fill_bitmask(self, words: Words) -> bool:
        """Write the combined mask, or the stop ids after the end. Returns False for no opinion."""
        if self._done_at is not None:
            bits.copy_into(bits.from_ids(self._stops, len(words) * 32), words)
            return True
        combined = self._combined()
        if combined is None:
            return False
        bits.copy_into(combined, words)
        return True

    def next(self) -> Allowed:
        """Return the combined ids, and those of them at which the composite may end."""
        words = bits.empty(self._context.vocab_size)
        if not self.fill_bitmask(words):
            return None, set()
        if self._done_at is not None:
            return bits.to_ids(words), set(self._stops)
        ids = bits.to_ids(words)
        return ids, {token for token in self._end_ids() if bits.test(words, token)}

    def feed(self, token: Any) -> None:
        """Pass a token on to the parts. Raises `FilterRejected` if the combined mask excludes it."""
        token = as_token(token)
        if self._done_at is None:
            combined = self._combined()
            if combined is not None and not bits.test(combined, token):
                raise FilterRejected(f"token {token} is not allowed by {self.describe()}", token)
            if token in self._stops:
                self._done_at, self._ended = self._length + 1, combined is not None
            elif self._pass_on(token):
                self._done_at, self._ended = self._length + 1, True
        self._length += 1

    def ended(self) -> bool:
        """Whether the last feed finished the composite."""
        return self._ended

    def is_complete(self) -> bool:
        """Whether the text so far is a complete sentence of the composite, or the composite has ended."""
        return self._done_at is not None or self._complete()

    def rewind(self, n: int) -> None:
        """Undo the last `n` feeds in every part. Raises `FilterUsageError` for more than were fed."""
        if not 0 <= n <= self._length:
            raise FilterUsageError(f"rewind({n}) after {self._length} tokens")
        before = self._reached()
        self._length -= n
        if self._done_at is not None and self._length < self._done_at:
            self._done_at, self._ended = None, False
        self._undo(before - self._reached())

    def clone(self, c: Any = None) -> Any:
        """Return a composite of copies of the parts, in the same state."""
        new = self._clone_sharing(c)
        new._drivers = [driver.copy() for driver in self._drivers]
        new._parts = [driver.filter for driver in new._drivers]
        return new

    def describe(self) -> str:
        """Name the composite and its parts."""
        return f"{type(self).__name__}({', '.join(f.describe() for f in self._parts)})"

    # Methods that subclasses implement.

    @abstractmethod
    def _combined(self) -> Words | None:
        """Return the combined mask, stop ids included, or None for no opinion."""

    @abstractmethod
    def _pass_on(self, token: int) -> bool:
        """Give an allowed token to the parts. Returns True when the composite has ended."""

    @abstractmethod
    def _undo(self, n: int) -> None:
        """Undo the last `n` tokens that reached the parts."""

    @abstractmethod
    def _complete(self) -> bool:
        """Whether the text so far is a complete sentence of the composite."""

    @abstractmethod
    def _end_ids(self) -> Collection[int]:
        """Return the ids that may end the composite, allowed or not."""

    # Internal methods.

    @property
    def _context(self) -> FilterContext:
        assert self.context is not None
        return self.context

    @property
    def _stops(self) -> frozenset[int]:
        return self._context.stop_ids

    def _reached(self) -> int:
        """Return how many of the fed tokens have reached the parts. A stop token and tokens after the end do not."""
        if self._done_at is None:
            return self._length
        return self._done_at if self._ended_by_part() else self._done_at - 1

    def _ended_by_part(self) -> bool:
        return any(driver.ended for driver in self._drivers)

    def _with_stops(self, words: Words, whole: bool) -> Words:
        for stop in self._stops:
            bits.put(words, stop, whole)
        return words


class AllOf(_Composite):
    """Allow the tokens that every one of `filters` allows. A host's list of filters is combined in the same way.

    The text is complete where it is complete for all filters with an opinion. The composite ends when the first of its
    filters ends.

    Args:
        filters: At least one filter; each is cloned.

    Raises:
        FilterCompileError: `filters` is empty.
    """

    def spec(self) -> dict[str, Any]:
        """Return `{"type": "all-of", "filters": [...]}`."""
        return {"type": "all-of", "filters": [f.spec() for f in self._parts]}

    def _combined(self) -> Words | None:
        masks = [words for words in (driver.mask() for driver in self._drivers) if words is not None]
        if not masks:
            return None
        combined = masks[0].copy()
        for words in masks[1:]:
            combined &= words
        return combined

    def _pass_on(self, token: int) -> bool:
        ended = [driver.feed(token) for driver in self._drivers]
        return any(ended)

    def _undo(self, n: int) -> None:
        for driver in self._drivers:
            driver.rewind(n)

    def _complete(self) -> bool:
        return all(driver.complete for driver in self._drivers if driver.mask() is not None)

    def _end_ids(self) -> Collection[int]:
        return {token for driver in self._drivers for token in driver.ends()}


class AnyOf(_Composite):
    """Allow the tokens that at least one of `filters` allows. A filter is left behind when it rejects a token.

    The text is complete where it is complete for one of the remaining filters. The composite ends when every remaining
    filter has ended. A filter without an opinion allows everything.

    Args:
        filters: At least one filter; each is cloned.

    Raises:
        FilterCompileError: `filters` is empty.
    """

    def begin(self, prefix_str: Any = "") -> None:
        """Reset the composite; every part takes part again."""
        super().begin(prefix_str)
        # For each part, the journal length at which it was left behind, or None while it takes part.
        self._left: list[int | None] = [None] * len(self._drivers)

    def clone(self, c: Any = None) -> Any:
        """Return a composite of copies of the parts, in the same state."""
        new = super().clone(c)
        new._left = list(self._left)
        return new

    def spec(self) -> dict[str, Any]:
        """Return `{"type": "any-of", "filters": [...]}`."""
        return {"type": "any-of", "filters": [f.spec() for f in self._parts]}

    def _running(self) -> list[int]:
        return [i for i, left in enumerate(self._left) if left is None]

    def _combined(self) -> Words | None:
        combined = bits.empty(self._context.vocab_size)
        for index in self._running():
            driver = self._drivers[index]
            if driver.done:
                combined |= bits.from_ids(self._stops, self._context.vocab_size)
                continue
            words = driver.mask()
            if words is None:
                return None
            combined |= words
        return combined

    def _pass_on(self, token: int) -> bool:
        for index in self._running():
            driver = self._drivers[index]
            words = None if driver.done else driver.mask()
            if driver.done or (words is not None and not bits.test(words, token)):
                self._left[index] = self._length
            else:
                driver.feed(token)
        running = [self._drivers[i] for i in self._running()]
        return bool(running) and all(driver.ended for driver in running)

    def _undo(self, n: int) -> None:
        reached = self._reached()
        for index, driver in enumerate(self._drivers):
            left = self._left[index]
            if left is not None and left >= reached:
                self._left[index] = None
            if self._left[index] is None:
                driver.rewind(driver.length - reached)

    def _ended_by_part(self) -> bool:
        return all(self._drivers[i].ended for i in self._running())

    def _complete(self) -> bool:
        return any(self._drivers[i].complete for i in self._running())

    def _end_ids(self) -> Collection[int]:
        """Return the ids at which every remaining part that takes them ends."""
        running = [self._drivers[i] for i in self._running() if not self._drivers[i].done]
        ids = {token for driver in running for token in driver.ends()}
        masks = [(driver.mask(), driver.ends()) for driver in running]
        return {
            t for t in ids if all(words is not None and (t in ends or not bits.test(words, t)) for words, ends in masks)
        }


class TriggeredFilter(ReplayedFilter):
    """Constrain the text by `inner` once `on` has appeared; no opinion before. Use it for a schema after thinking.

    Args:
        inner: The filter that constrains the text after the trigger; it is cloned.
        on: The trigger: a token id, or a non-empty text. The constraint begins with the token after the one that
            completes it. Further text in that token (line breaks, for example) comes before the constraint.
        after: What happens when the inner filter has ended: "stop" ends the job, "release" allows everything, "rearm"
            waits
            for the next trigger.
        tokenizer: Tokenizer for a text trigger. Default: the inner filter's.

    Raises:
        FilterCompileError: `on` or `after` is not one of these values.
    """

    native: ClassVar[bool] = True
    # The place where the constraint begins depends on the token that holds the trigger.
    capabilities: ClassVar[tuple[str, ...]] = ("token_level",)

    def __init__(
        self, inner: Any, on: int | str, after: Literal["stop", "release", "rearm"] = "stop", *, tokenizer: Any = None
    ) -> None:
        if after not in ("stop", "release", "rearm"):
            raise FilterCompileError(f'after is "stop", "release" or "rearm"; got {after!r}')
        if not isinstance(on, int | str) or on == "":
            raise FilterCompileError(f"on is a token id or a non-empty text; got {on!r}")
        self._cue = encoded("on", on) if isinstance(on, str) else b""
        self.inner = as_filter(inner).clone()
        super().__init__(self.inner.model, tokenizer if tokenizer is not None else self.inner.tokenizer)
        self.on, self.after = on, after
        self.vocabulary: Vocabulary = vocabulary_of(self.tokenizer)
        v = self.vocabulary
        self._driver = FilterDriver(self.inner, FilterContext.make(v.size, v.stop_ids, v.special_ids))
        self.context = self._driver.context
        self.begin("")

    def attach(self, context: FilterContext) -> None:
        """Receive the host's vocabulary size and stop ids, pass them on to the inner filter, and begin."""
        super().attach(context)
        self._driver = FilterDriver(self.inner, context)
        self.begin("")

    def begin(self, prefix_str: Any = "") -> None:
        """Wait for the trigger again. A trigger inside the healing prefix does not count."""
        self._prefix = as_prefix(prefix_str)
        self._fed = []
        self._active = self._released = self._done = self._ended = False
        self._tail = b""
        # Text before the constraint that is written again (token healing). A trigger in it does not count.
        self._pending = self._prefix
        self._driver.begin("")

    def fill_bitmask(self, words: Words) -> bool:
        """Write the inner filter's mask while it is active, or the stop ids after the end. False: no opinion."""
        if self._done:
            bits.copy_into(bits.from_ids(self._stops, len(words) * 32), words)
            return True
        mask = self._driver.mask() if self._active else None
        if mask is None:
            return False
        bits.copy_into(mask, words)
        return True

    def next(self) -> Allowed:
        """Return the inner filter's ids and end tokens while it is active; `(None, set())` otherwise."""
        words = bits.empty(self._driver.context.vocab_size)
        if not self.fill_bitmask(words):
            return None, set()
        if self._done:
            return sorted(self._stops), set(self._stops)
        ends = self._driver.ends() if self.after == "stop" else self._driver.ends() & self._stops
        return bits.to_ids(words), set(ends)

    def feed(self, token: Any) -> None:
        """Give the token to the inner filter while it is active; otherwise look for the trigger in it."""
        token = as_token(token)
        if not self._done:
            if self._active:
                self._feed_inner(token)
            elif token in self._stops:
                self._done = True
            elif not self._released:
                self._watch(token)
        self._fed.append(token)

    def is_complete(self) -> bool:
        """Whether the text may end here: always outside the constraint, else as the inner filter says."""
        return self._done or not self._active or self._driver.complete

    def ended(self) -> bool:
        """Whether the last feed finished the constraint."""
        return self._ended

    def clone(self, c: Any = None) -> Any:
        """Return a filter with a copy of the inner filter, in the same state."""
        new = self._clone_sharing(c)
        new._driver = self._driver.copy()
        new.inner = new._driver.filter
        new._fed = list(self._fed)
        return new

    def describe(self) -> str:
        """Name the trigger and the inner filter."""
        return f"Triggered(on={self.on!r}, {self.inner.describe()})"

    def spec(self) -> dict[str, Any]:
        """Return `{"type": "triggered", "inner": ..., "on": ..., "after": ...}`."""
        return {"type": "triggered", "inner": self.inner.spec(), "on": self.on, "after": self.after}

    @property
    def _stops(self) -> frozenset[int]:
        return self._driver.context.stop_ids

    def _feed_inner(self, token: int) -> None:
        stop = token in self._stops
        ended = self._driver.feed(token)
        if stop:
            self._done, self._ended = True, ended
        elif ended:
            self._active = False
            self._tail = b""
            self._done = self._ended = self.after == "stop"
            self._released = self.after == "release"

    def _watch(self, token: int) -> None:
        """Look for the trigger in the text that ends with `token`."""
        if isinstance(self.on, int):
            cue = token == self.on
        else:
            raw = self.vocabulary.bytes_of(token)
            text = self._tail + raw[len(self._pending) :]
            self._pending = self._pending[len(raw) :]
            cue = self._cue in text
            self._tail = b"" if cue else text[max(0, len(text) - len(self._cue) + 1) :]
        if cue:
            self._active = True
            self._driver.begin("")
