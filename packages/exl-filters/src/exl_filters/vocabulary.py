"""`Vocabulary`: the bytes of each token id and the control ids, independent of the tokenizer's library.

Built once per tokenizer and shared by all filters (`vocabulary_of`). The byte trie, which takes time, is built on first
use.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from exl_filters import bits
from exl_filters.bits import Words
from exl_filters.errors import FilterUsageError
from exl_filters.trie import ByteTrie

__all__ = ["Vocabulary", "vocabulary_of"]


class Vocabulary:
    """Bytes and roles of the ids [0, size). It also serves as a filter's `tokenizer`, with exllamav2's names.

    Args:
        tokens: The bytes of each id; None for an id without text (undefined, or control). str entries become UTF-8.
        eos_token_id: The EOS id; None for a tokenizer without one.
        stop_ids: Ids that end a text. The attribute `stop_ids` includes the EOS.
        special_ids: Control ids, never matched by their spelling.
        special_texts: Spelling of control ids, for people.
        pad_token_id: Padding id, or None.
        bos_token_id: BOS id, or None.
        unk_token_id: Id for unknown text, or None.
        canonical_json: Returns the tokenizer.json text of these tokens. Grammars use it for canonical tokenization.

    Raises:
        FilterUsageError: `tokens` is empty, an entry has no bytes, or an id is outside the vocabulary.
    """

    shared_between_clones = True

    def __init__(
        self,
        tokens: Sequence[bytes | str | None],
        *,
        eos_token_id: int | None = None,
        stop_ids: Iterable[int] = (),
        special_ids: Iterable[int] = (),
        special_texts: dict[int, str] | None = None,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        unk_token_id: int | None = None,
        canonical_json: Callable[[], str] | None = None,
    ) -> None:
        self.size = len(tokens)
        # Returns the tokenizer.json text of these tokens, where there is one: grammars use its canonical tokenization.
        self.canonical_json = canonical_json
        if self.size == 0:
            raise FilterUsageError("a vocabulary needs at least one token")
        self.eos_token_id = eos_token_id
        self.pad_token_id, self.bos_token_id, self.unk_token_id = pad_token_id, bos_token_id, unk_token_id
        special = set(special_ids)
        stops = set(stop_ids)
        if eos_token_id is not None:
            stops.add(eos_token_id)
        given: set[Any] = special | stops
        for i in given:
            if isinstance(i, bool) or not isinstance(i, int | np.integer):
                raise FilterUsageError(f"the special and stop ids hold {i!r:.80}; they must be token ids")
        outside = [i for i in special | stops if not 0 <= i < self.size]
        if outside:
            raise FilterUsageError(f"ids {outside[:5]} are outside the vocabulary of {self.size} tokens")
        self.stop_ids = frozenset(stops)
        self.special_ids = frozenset(special)
        texts: dict[int, str] = dict(special_texts or {})
        self._bytes: list[bytes | None] = []
        for token, text in enumerate(tokens):
            raw = _raw(token, text)
            if token in special:
                if raw is not None:
                    texts.setdefault(token, raw.decode("utf-8", "replace"))
                raw = None
            self._bytes.append(raw)
        self.special_texts = texts

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the tables, which are rebuilt on use, and the tokenizer of `canonical_json`."""
        kept = ("trie", "defined", "text_words", "_llg", "_lmfe", "_xgrammar")
        return {k: v for k, v in vars(self).items() if k not in kept} | {"canonical_json": None}

    # Questions about ids.

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of the id `token`; b"" for control and undefined ids and outside the vocabulary."""
        return (self._bytes[token] or b"") if 0 <= token < self.size else b""

    def is_defined(self, token: int) -> bool:
        """Whether the id `token` is text or control."""
        return 0 <= token < self.size and (self._bytes[token] is not None or self.is_control(token))

    def is_control(self, token: int) -> bool:
        """Whether the id `token` is a control or stop id."""
        return token in self.special_ids or token in self.stop_ids

    def piece(self, token: int) -> str:
        """Return the id `token` as text for people: control ids by their spelling, incomplete characters as U+FFFD."""
        if token in self.special_texts:
            return self.special_texts[token]
        return self.bytes_of(token).decode("utf-8", "replace") if self.is_defined(token) else f"<{token}>"

    @cached_property
    def defined(self) -> npt.NDArray[np.int64]:
        """All defined ids, ascending: int64 [n]."""
        return np.array([i for i in range(self.size) if self.is_defined(i)], dtype=np.int64)

    @cached_property
    def text_words(self) -> Words:
        """Packed mask of the ids that are ordinary, non-empty text."""
        return bits.from_ids((i for i, raw in enumerate(self._bytes) if raw), self.size)

    @cached_property
    def longest(self) -> int:
        """Number of bytes of the longest token."""
        return max(len(raw or b"") for raw in self._bytes)

    @cached_property
    def trie(self) -> ByteTrie:
        """All ordinary tokens by their bytes. Building it takes about a second for 128k tokens."""
        return ByteTrie([raw or b"" for raw in self._bytes])

    def ids_of(self, text: bytes) -> tuple[int, ...]:
        """Return every ordinary id whose bytes are exactly `text`."""
        node = self.trie.find(text)
        return () if node < 0 or not text else self.trie.exact(node)

    def tokens_starting_with(self, prefix: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield `(id, surplus)` of every ordinary token whose bytes start with `prefix`."""
        node = self.trie.find(prefix)
        if node < 0:
            return
        for token in self.trie.under(node).tolist():
            raw = self._bytes[token]
            if raw:
                yield token, raw[len(prefix) :]

    # Methods of exllamav2's tokenizer.

    def vocab_size(self) -> int:
        """Return the number of ids."""
        return self.size

    def __len__(self) -> int:
        return self.size

    def get_id_to_bytes_list(self) -> list[bytes | None]:
        """Return the bytes of each id; None for ids without text."""
        return list(self._bytes)

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        """Return the text of each id; control ids are "" unless `include_special_tokens`."""
        return [self.piece(i) if include_special_tokens or i not in self.special_ids else "" for i in range(self.size)]

    def encode(self, text: str | bytes, add_bos: bool = False, **_: Any) -> npt.NDArray[np.int64]:
        """Return greedy longest-match token ids, int64 (1, n). Not the model's canonical tokenization.

        With `add_bos` they begin with `bos_token_id`, if there is one. Raises `FilterUsageError` where no token begins
        the rest of the text.
        """
        raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        ids = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
        position = 0
        while position < len(raw):
            length, token = self.trie.longest(raw, position)
            if length == 0:
                raise FilterUsageError(f"no token begins {raw[position : position + 10]!r}")
            ids.append(token)
            position += length
        return np.array([ids], dtype=np.int64)

    def decode(self, ids: Any) -> str:
        """Return the text of ids (any nesting); control ids contribute nothing."""
        flat = np.asarray(ids).reshape(-1).tolist()
        return b"".join(self.bytes_of(i) for i in flat).decode("utf-8", "replace")

    def describe(self) -> str:
        """Return one line for logs."""
        return f"Vocabulary of {self.size} tokens"


_cache: dict[int, tuple[Callable[[], Any], Vocabulary]] = {}
_strong: deque[int] = deque()
# Number of tokenizers kept that support no weak reference (those of the tokenizers library).
MAX_STRONG = 4
_lock = threading.Lock()


def _renew_lock() -> None:
    """Make the lock new in a forked child: the thread that holds it exists only in the parent."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _raw(token: int, text: object) -> bytes | None:
    """Return a token's bytes. Raises `FilterUsageError` for an entry without bytes."""
    if text is None or isinstance(text, bytes):
        return text
    if isinstance(text, bytearray | memoryview):
        return bytes(text)
    if not isinstance(text, str):
        raise FilterUsageError(f"token {token} is {text!r:.80}; tokens are bytes, text, or None for an id without text")
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise FilterUsageError(f"token {token} is {text!r:.80}, an unpaired surrogate: give its bytes") from error


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Return the `Vocabulary` of a tokenizer, built once and kept as long as the tokenizer lives.

    Args:
        tokenizer: A `Vocabulary`, exllamav2's tokenizer or any object with its `get_id_to_piece_list`, a tokenizer of
            transformers or of the tokenizers library, or a plain list of pieces.

    Raises:
        FilterUsageError: `tokenizer` is none of these.
    """
    if isinstance(tokenizer, Vocabulary):
        return tokenizer
    if tokenizer is None:
        raise FilterUsageError("this filter needs a tokenizer, or an exl_filters.Vocabulary in its place")
    key = id(tokenizer)
    with _lock:
        held = _cache.get(key)
        if held is not None and held[0]() is tokenizer:
            return held[1]
    from exl_filters.readers import read_tokenizer

    vocabulary = read_tokenizer(tokenizer)
    try:
        reference: Callable[[], Any] = weakref.ref(tokenizer, functools.partial(_forget, key, _cache))
    except TypeError:
        return _keep_strongly(key, tokenizer, vocabulary)
    with _lock:
        held = _cache.get(key)
        if held is not None and held[0]() is tokenizer:
            return held[1]
        _cache[key] = (reference, vocabulary)
    return vocabulary


def _forget(key: int, cache: dict[int, Any], _: object) -> None:
    """Remove an entry. The cache is passed in, because this may run after the module's globals are gone."""
    cache.pop(key, None)


def _keep_strongly(key: int, tokenizer: Any, vocabulary: Vocabulary) -> Vocabulary:
    with _lock:
        held = _cache.get(key)
        if held is not None and held[0]() is tokenizer:
            return held[1]
        while len(_strong) >= MAX_STRONG:
            _cache.pop(_strong.popleft(), None)
        _strong.append(key)
        _cache[key] = (lambda: tokenizer, vocabulary)
    return vocabulary
