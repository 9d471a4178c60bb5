"""Calls without a marker in front of them, as a filter."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from exl_filters import TriggeredFilter, bits
from exl_filters.base import Allowed
from exl_filters.bits import Words
from exl_filters.context import FilterContext
from exl_filters.driver import FilterDriver
from exl_filters.errors import FilterRejected
from exl_filters.replayed import ReplayedFilter
from exl_filters.tokens import as_prefix, as_token
from exl_filters.vocabulary import Vocabulary, vocabulary_of

__all__ = ["LeadingFilter"]

_SPACE = b" \t\r\n"
_others: WeakKeyDictionary[Vocabulary, dict[str, Words]] = WeakKeyDictionary()
"""By vocabulary and sign: the tokens whose text begins with something else."""


class LeadingFilter(ReplayedFilter):
    """Constrain a text whose first character, after spaces, is `sign`. Any other text is left to `marked`.

    Args:
        calls: The grammar of a text that begins with the sign, spaces included; it is cloned.
        marked: The filter for calls after a marker; it is cloned.
        sign: The character that opens a call.
        tokenizer: The model's tokenizer.
    """

    native: ClassVar[bool] = True
    # A special token before the text is no part of it, and is allowed there.
    capabilities: ClassVar[tuple[str, ...]] = ("token_level", "names_specials")

    def __init__(self, calls: Any, marked: TriggeredFilter, sign: str, tokenizer: Any) -> None:
        super().__init__(None, tokenizer)
        self.vocabulary = vocabulary_of(tokenizer)
        v = self.vocabulary
        self._sign = sign.encode()
        known = _others.setdefault(v, {})
        if sign not in known:
            known[sign] = self._beginning_otherwise(b"")
        self._words = known[sign]
        self._on = marked.on
        self._make(calls.clone(), marked.clone(), FilterContext.make(v.size, v.stop_ids, v.special_ids))
        self.begin("")

    def _make(self, calls: Any, marked: Any, context: FilterContext) -> None:
        self._calls, self._marked = FilterDriver(calls, context), FilterDriver(marked, context)

    def _beginning_otherwise(self, prefix: bytes) -> Words:
        """Return the tokens that do not begin with the sign, after `prefix` and spaces."""
        v, sign = self.vocabulary, self._sign
        found = (i for i in v.defined.tolist() if not v.bytes_of(i)[len(prefix) :].lstrip(_SPACE).startswith(sign))
        return bits.from_ids(found, v.size)

    def attach(self, context: FilterContext) -> None:
        """Receive the host's vocabulary size and stop ids, pass them on, and begin."""
        super().attach(context)
        self._make(self._calls.filter, self._marked.filter, context)
        self.begin("")

    def begin(self, prefix_str: Any = "") -> None:
        """Wait for the first character. The healing prefix is not part of the text."""
        self._prefix = as_prefix(prefix_str)
        self._pending = self._prefix
        self._fed = []
        #: the filter that the text belongs to, once its first character is known
        self._chosen: FilterDriver | None = None
        #: whether the grammar of calls takes the spaces so far
        self._alive = True
        self._ended = False
        self._calls.begin(self._prefix)
        self._marked.begin(self._prefix)

    def fill_bitmask(self, words: Words) -> bool:
        """Write the mask of the filter that the text belongs to; at the beginning, what either of them allows."""
        if self._chosen is not None:
            mask = self._chosen.mask()
            if mask is None:
                return False
            bits.copy_into(mask, words)
            return True
        bits.copy_into(self._beginning_otherwise(self._pending) if self._pending else self._words, words)
        mask = self._calls.mask() if self._alive else None
        if mask is not None:
            width = min(len(mask), len(words))
            words[:width] |= mask[:width]
        return True

    def next(self) -> Allowed:
        """Return the allowed ids and the end tokens among them; `(None, set())` for no opinion."""
        words = bits.empty(self._calls.context.vocab_size)
        if not self.fill_bitmask(words):
            return None, set()
        ends = self._chosen.ends() if self._chosen is not None else self._calls.context.stop_ids
        return bits.to_ids(words), set(ends)

    def feed(self, token: Any) -> None:
        """Give the token to the filter that the text belongs to; the first character decides which one it is."""
        token = as_token(token)
        if self._chosen is None:
            self._choose(token)
        else:
            self._ended = self._chosen.feed(token)
        self._fed.append(token)

    def _choose(self, token: int) -> None:
        words = bits.empty(self._calls.context.vocab_size)
        self.fill_bitmask(words)
        if not bits.test(words, token):
            raise FilterRejected(f"token {token} is not allowed by {self.describe()}", token)
        raw = self.vocabulary.bytes_of(token)
        first = raw[len(self._pending) :].lstrip(_SPACE)
        if first.startswith(self._sign):
            self._ended = self._calls.feed(token)
            self._chosen = self._calls
            return
        self._ended = self._marked.feed(token)
        if first or token == self._on or token in self._marked.context.stop_ids:
            self._chosen = self._marked
        self._pending = self._pending[len(raw) :]
        if self._chosen is None and raw and self._alive:
            mask = self._calls.mask()
            self._alive = mask is None or bits.test(mask, token)
            if self._alive:
                self._calls.feed(token)

    def is_complete(self) -> bool:
        """Whether the text may end here: always at the beginning."""
        return self._chosen is None or self._chosen.complete

    def ended(self) -> bool:
        """Whether the last feed finished the constraint."""
        return self._ended

    def clone(self, c: Any = None) -> Any:
        """Return a filter with copies of both filters, in the same state."""
        new = self._clone_sharing(c)
        new._calls, new._marked, new._fed = self._calls.copy(), self._marked.copy(), list(self._fed)
        if self._chosen is not None:
            new._chosen = new._calls if self._chosen is self._calls else new._marked
        return new

    def describe(self) -> str:
        """Name the sign and both filters."""
        calls, marked = self._calls.filter.describe(), self._marked.filter.describe()
        return f"Leading(sign={self._sign.decode()!r}, {calls}, {marked})"
