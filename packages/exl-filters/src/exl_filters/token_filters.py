"""Filters over ids and amounts instead of languages: token slots, banned ids and texts, length limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from exl_filters import bits
from exl_filters.errors import FilterCompileError
from exl_filters.state_filter import Choice, StateFilter
from exl_filters.tokens import encoded
from exl_filters.vocabulary import Vocabulary

__all__ = ["BanFilter", "LengthFilter", "TokenSetFilter"]


class TokenSetFilter(StateFilter[int]):
    """Allow at each position the ids of its own slot, for audio codecs that rotate through id ranges, for example.

    Args:
        model: Kept for exllamav2's API; may be None.
        tokenizer: A `Vocabulary` or any tokenizer that `vocabulary_of` takes.
        slots: One collection of ids, or a sequence of collections, one for each position. Control ids are permitted.
        cycle: Start again after the last slot; the text is complete between cycles. False: the last slot's token ends
            the
            job.

    Raises:
        FilterCompileError: a slot is empty or holds an id outside the vocabulary.
    """

    capabilities: ClassVar[tuple[str, ...]] = ("token_level", "names_specials")

    def __init__(
        self, model: Any, tokenizer: Any, slots: Iterable[int] | Sequence[Iterable[int]], *, cycle: bool = True
    ) -> None:
        super().__init__(model, tokenizer)
        given: list[Any] = list(slots)
        nested = [given] if all(isinstance(i, int) for i in given) else [list(slot) for slot in given]
        self.slots: list[list[int]] = [sorted({int(i) for i in slot}) for slot in nested]
        size = self.vocabulary.size
        wrong = [i for slot in self.slots for i in slot if not 0 <= i < size]
        if not self.slots or not all(self.slots) or wrong:
            raise FilterCompileError(f"slots need ids in [0, {size}) each; got {wrong[:3] or 'an empty slot'}")
        self.cycle = cycle
        self._choices = tuple(
            Choice(
                bits.from_ids(slot, size), frozenset(slot) if not cycle and i == len(self.slots) - 1 else frozenset()
            )
            for i, slot in enumerate(self.slots)
        )
        self._none = Choice(bits.empty(size))
        self.begin("")

    def spec(self) -> dict[str, Any]:
        """Return `{"type": "token-set", "slots": [...], "cycle": ...}`."""
        return {"type": "token-set", "slots": [list(slot) for slot in self.slots], "cycle": self.cycle}

    def _start(self, prefix: bytes) -> int:
        return 0

    def _choice(self, state: int) -> Choice:
        if state >= len(self.slots) and not self.cycle:
            return self._none
        return self._choices[state % len(self.slots)]

    def _advance(self, state: int, token: int) -> int:
        return state + 1

    def _whole(self, state: int) -> bool:
        return state >= len(self.slots) and (not self.cycle or state % len(self.slots) == 0)


# (the last bytes of the text, text still to be regenerated)
_Tail = tuple[bytes, bytes]


class BanFilter(StateFilter[_Tail]):
    """Ban ids and texts. A text is also banned where several tokens spell it. The text may stop anywhere.

    Args:
        model: Kept for exllamav2's API; may be None.
        tokenizer: A `Vocabulary` or any tokenizer that `vocabulary_of` takes.
        ids: Banned token ids. Stop ids are not accepted.
        texts: Banned texts, or their bytes.

    Raises:
        FilterCompileError: there is nothing to ban, or an id is a stop id.
    """

    def __init__(self, model: Any, tokenizer: Any, ids: Iterable[int] = (), texts: Iterable[str | bytes] = ()) -> None:
        super().__init__(model, tokenizer)
        self.ids = sorted({int(i) for i in ids})
        given = [texts] if isinstance(texts, str | bytes) else list(texts)
        self.texts = [encoded("texts", t) if isinstance(t, str) else bytes(t) for t in given]
        if not all(self.texts) or (not self.ids and not self.texts):
            raise FilterCompileError("give ids or non-empty texts to ban")
        v = self.vocabulary
        stops = sorted(set(self.ids) & set(v.stop_ids))
        if stops:
            raise FilterCompileError(
                f"ids {stops[:3]} are stop ids, which are offered wherever a text may end; to keep a text from ending "
                "use LengthFilter's min_tokens or min_chars"
            )
        self._keep = max((len(t) - 1 for t in self.texts), default=0)
        banned = {i for i in range(v.size) if any(t in v.bytes_of(i) for t in self.texts)} | set(self.ids)
        self._base = bits.from_ids((i for i in range(v.size) if v.bytes_of(i) and i not in banned), v.size)
        self.begin("")

    def spec(self) -> dict[str, Any]:
        """Return `{"type": "ban", "ids": [...], "texts": [...]}`."""
        return {
            "type": "ban",
            "ids": list(self.ids),
            "texts": [t.decode("utf-8", "surrogateescape") for t in self.texts],
        }

    def _start(self, prefix: bytes) -> _Tail:
        return b"", prefix

    def _choice(self, state: _Tail) -> Choice:
        tail, pending = state
        if pending:
            return self._healing(pending)
        words = self._base.copy()
        trie = self.vocabulary.trie
        for text in self.texts:
            for done in range(1, min(len(tail), len(text) - 1) + 1):
                node = trie.find(text[done:]) if tail.endswith(text[:done]) else -1
                for token in trie.under(node).tolist() if node >= 0 else ():
                    bits.put(words, token, False)
        return Choice(words)

    def _healing(self, pending: bytes) -> Choice:
        """Return the tokens that start with the pending text and whose surplus holds nothing banned."""
        v = self.vocabulary
        found = [i for i, surplus in v.tokens_starting_with(pending) if not any(t in surplus for t in self.texts)]
        if not found:
            found = [i for n in range(1, len(pending)) for i in v.ids_of(pending[:n])]
        banned = set(self.ids)
        return Choice(bits.from_ids((i for i in found if i not in banned), v.size))

    def _advance(self, state: _Tail, token: int) -> _Tail:
        tail, pending = state
        raw = self.vocabulary.bytes_of(token)
        if len(raw) < len(pending):
            return tail, pending[len(raw) :]
        text = tail + raw[len(pending) :]
        return text[max(0, len(text) - self._keep) :], b""

    def _whole(self, state: _Tail) -> bool:
        return not state[1]


# (tokens, characters begun, continuation bytes that the last character still lacks, text still to be regenerated)
_Amount = tuple[int, int, int, bytes]


class LengthFilter(StateFilter[_Amount]):
    """Require at least `min_tokens` and `min_chars`, at most `max_tokens` and `max_chars` before the stop token.

    There is no opinion where no limit is near. A healing prefix does not count, nor do tokens that end inside it.
    Characters are code points of the UTF-8 text; a stray continuation byte does not count. With a grammar that is not
    complete at the limit, the result is a dead end, reported as such: the text is cut, not changed.

    Args:
        model: Kept for exllamav2's API; may be None.
        tokenizer: A `Vocabulary` or any tokenizer that `vocabulary_of` takes.
        min_tokens: Least number of tokens.
        max_tokens: Largest number of tokens, at least 1; None: no limit.
        min_chars: Least number of characters.
        max_chars: Largest number of characters, at least 1; None: no limit.

    Raises:
        FilterCompileError: a limit is below its minimum.
    """

    capabilities: ClassVar[tuple[str, ...]] = ("token_level", "names_specials")

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        min_tokens: int = 0,
        max_tokens: int | None = None,
        min_chars: int = 0,
        max_chars: int | None = None,
    ) -> None:
        super().__init__(model, tokenizer)
        for unit, least, most in (("tokens", min_tokens, max_tokens), ("chars", min_chars, max_chars)):
            if least < 0 or (most is not None and most < max(1, least)):
                raise FilterCompileError(f"needs 0 <= min_{unit} <= max_{unit}, 1 <= max_{unit}; got {least}, {most}")
        self.min_tokens, self.max_tokens = min_tokens, max_tokens
        self.min_chars, self.max_chars = min_chars, max_chars
        size = self.vocabulary.size
        self._any = Choice(bits.from_ids(self.vocabulary.defined, size))
        self._none = Choice(bits.empty(size))
        self._fitting = _Fitting(self.vocabulary)
        self.begin("")

    def spec(self) -> dict[str, Any]:
        """Return `{"type": "length", ...}` with the limits."""
        return {
            "type": "length",
            "min_tokens": self.min_tokens,
            "max_tokens": self.max_tokens,
            "min_chars": self.min_chars,
            "max_chars": self.max_chars,
        }

    def _start(self, prefix: bytes) -> _Amount:
        return 0, 0, 0, prefix

    def _choice(self, state: _Amount) -> Choice | None:
        tokens, chars, lacking, pending = state
        if self.max_tokens is not None and tokens >= self.max_tokens:
            return self._none
        if self.max_chars is not None and self.max_chars - chars < self._fitting.longest:
            left = self.max_chars - chars
            return self._fitting.healing(pending, left) if pending else self._fitting.choice(left, lacking)
        return None if self._whole(state) else self._any

    def _advance(self, state: _Amount, token: int) -> _Amount:
        tokens, chars, lacking, pending = state
        raw = self.vocabulary.bytes_of(token)
        if pending and len(raw) <= len(pending):
            return tokens, chars, lacking, pending[len(raw) :]
        for byte in raw[len(pending) :]:
            if byte & 0xC0 == 0x80:
                lacking = max(0, lacking - 1)
            else:
                chars, lacking = chars + 1, (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0) if byte < 0xF5 else 0
        return tokens + 1, chars, lacking, b""

    def _whole(self, state: _Amount) -> bool:
        return not state[3] and state[0] >= self.min_tokens and state[1] >= self.min_chars


class _Fitting:
    """The ids that hold at most a number of characters; tables are built on first use and shared by clones."""

    shared_between_clones = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    @cached_property
    def _counts(self) -> npt.NDArray[np.int64]:
        """Characters that begin in each id's bytes, int64 [vocab_size]."""
        v = self._vocabulary
        return np.array([sum(b & 0xC0 != 0x80 for b in v.bytes_of(i)) for i in range(v.size)], dtype=np.int64)

    @cached_property
    def longest(self) -> int:
        """Largest number of characters that begin in one token."""
        return int(self._counts.max(initial=0))

    def healing(self, pending: bytes, left: int) -> Choice:
        """Return ids that write the pending text again, all or part of it, with at most `left` characters after it."""
        v = self._vocabulary
        ids = [i for i, surplus in v.tokens_starting_with(pending) if sum(b & 0xC0 != 0x80 for b in surplus) <= left]
        parts = [i for n in range(1, len(pending)) for i in v.ids_of(pending[:n])]
        return Choice(bits.from_ids([*ids, *parts], v.size))

    def choice(self, left: int, lacking: int) -> Choice:
        """Return text ids that fit into `left` characters. Continuation bytes fit as far as the last character lacks
        bytes.
        """
        v = self._vocabulary
        ids = np.flatnonzero((self._counts > 0) & (self._counts <= left)) if left > 0 else np.empty(0, dtype=np.int64)
        rest = [i for i in np.flatnonzero(self._counts == 0).tolist() if 0 < len(v.bytes_of(i)) <= lacking]
        return Choice(bits.from_ids([*ids.tolist(), *rest], v.size))
