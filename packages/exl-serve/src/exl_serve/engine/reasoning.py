"""Triggers that know of reasoning, as filters."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from exl_filters import ExLlamaV2Filter, TriggeredFilter, bits
from exl_filters.base import Allowed
from exl_filters.bits import Words
from exl_filters.context import FilterContext
from exl_filters.errors import FilterRejected
from exl_filters.tokens import as_token
from exl_filters.vocabulary import Vocabulary

__all__ = ["AwaitedFilter", "OutsideFilter"]

_defined: WeakKeyDictionary[Vocabulary, Words] = WeakKeyDictionary()
"""The defined ids of each vocabulary."""


class AwaitedFilter(TriggeredFilter):
    """Constrain the text after a trigger that must come: before it, the text may not end.

    Its arguments are those of `TriggeredFilter`.
    """

    capabilities: ClassVar[tuple[str, ...]] = ("token_level", "names_specials")
    spec = ExLlamaV2Filter.spec  # one of another kind would be made from the trigger's

    @property
    def _waits(self) -> bool:
        return not (self._active or self._released or self._done)

    @cached_property
    def _unended(self) -> Words:
        if self.vocabulary not in _defined:
            _defined[self.vocabulary] = bits.from_ids(self.vocabulary.defined.tolist(), self.vocabulary.size)
        size = self._driver.context.vocab_size
        words = bits.empty(size)
        bits.copy_into(_defined[self.vocabulary], words)
        words &= ~bits.from_ids(self._stops, size)
        return words

    def attach(self, context: FilterContext) -> None:
        """Receive the host's vocabulary size and stop ids, and begin."""
        self.__dict__.pop("_unended", None)
        super().attach(context)

    def fill_bitmask(self, words: Words) -> bool:
        """Write all ids but the stop ids while the trigger has not come, then as `TriggeredFilter` does."""
        if not self._waits:
            return super().fill_bitmask(words)
        bits.copy_into(self._unended, words)
        return True

    def next(self) -> Allowed:
        """Return the allowed ids, and the end tokens among them: none while the trigger has not come."""
        if not self._waits:
            return super().next()
        words = bits.empty(self._driver.context.vocab_size)
        self.fill_bitmask(words)
        return bits.to_ids(words), set()

    def feed(self, token: Any) -> None:
        """Look for the trigger in the token, or give it to the inner filter."""
        token = as_token(token)
        if self._waits and not (0 <= token < self._driver.context.vocab_size and bits.test(self._unended, token)):
            raise FilterRejected(f"token {token} is not allowed by {self.describe()}", token)
        super().feed(token)

    def is_complete(self) -> bool:
        """Whether the text may end here: not before the trigger."""
        return not self._waits and super().is_complete()


class OutsideFilter(TriggeredFilter):
    """Constrain the text after a trigger, which does not count in reasoning.

    Args:
        inner: As `TriggeredFilter` takes it.
        on: As `TriggeredFilter` takes it.
        after: As `TriggeredFilter` takes it.
        tokenizer: The model's tokenizer.
        opens: The special token that opens reasoning, if there is one.
        closes: The special token or the text that closes it.
        inside: Whether the text begins in reasoning.
    """

    spec = ExLlamaV2Filter.spec

    def __init__(
        self, inner: Any, on: int | str, after: Any, tokenizer: Any, opens: int | None, closes: int | str, inside: bool
    ) -> None:
        self._opens, self._closes, self._starts = opens, closes, inside
        super().__init__(inner, on, after, tokenizer=tokenizer)

    def begin(self, prefix_str: Any = "") -> None:
        """Wait for the trigger again, or for the end of the reasoning."""
        super().begin(prefix_str)
        self._inside, self._thought = self._starts, b""

    def _watch(self, token: int) -> None:
        """Look for the end of the reasoning, or outside of it for its begin and the trigger."""
        if not self._inside:
            self._inside = token == self._opens
            if not self._inside:
                super()._watch(token)
        elif isinstance(self._closes, int):
            self._inside = token != self._closes
        else:
            cue = self._closes.encode()
            raw = self.vocabulary.bytes_of(token)
            text = self._thought + raw[len(self._pending) :]
            self._pending = self._pending[len(raw) :]
            self._inside = cue not in text
            self._thought = text[max(0, len(text) - len(cue) + 1) :] if self._inside else b""
