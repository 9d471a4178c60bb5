"""`Vocabulary`: what a filter needs to know of a tokenizer, whoever made it: the bytes each id stands for, and which
ids are control.

Built once per tokenizer and shared by all filters (`vocabulary_of`); the table that costs time, the byte trie, on first
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
    """Bytes and roles of the ids [0, size).

    tokens: the bytes of each id; None for an id that is no text (undefined, or control). str entries are encoded as
    UTF-8. eos_token_id, stop_ids: ids that end a text (`stop_ids` includes the EOS). special_ids: control ids, never
    matched by spelling; their spelling may be given in `special_texts`. pad_token_id: may be None.

    It also answers as the `tokenizer` of a filter, with the names exllamav2's tokenizer has.
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
        # The tokenizer.json text behind these tokens, where there is one: grammars want its canonical tokenization.
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
                raise FilterUsageError(f"{i!r:.80} is among the special and stop ids; these are numbers of tokens")
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
        """Tables are built again where they are wanted; the tokenizer behind the tokens does not travel."""
        kept = ("trie", "defined", "text_words", "_llg", "_lmfe", "_xgrammar")
        return {k: v for k, v in vars(self).items() if k not in kept} | {"canonical_json": None}

    # Questions about ids.

    def bytes_of(self, token: int) -> bytes:
        """The bytes an id stands for; b"" for control and undefined ids and outside the vocabulary."""
        return (self._bytes[token] or b"") if 0 <= token < self.size else b""

    def is_defined(self, token: int) -> bool:
        """Whether the id stands for something: text or control."""
        return 0 <= token < self.size and (self._bytes[token] is not None or self.is_control(token))

    def is_control(self, token: int) -> bool:
        return token in self.special_ids or token in self.stop_ids

    def piece(self, token: int) -> str:
        """The id as text, for people: control ids by their spelling, bytes that are no whole character as U+FFFD."""
        if token in self.special_texts:
            return self.special_texts[token]
        return self.bytes_of(token).decode("utf-8", "replace") if self.is_defined(token) else f"<{token}>"

    @cached_property
    def defined(self) -> npt.NDArray[np.int64]:
        """All defined ids, ascending."""
        return np.array([i for i in range(self.size) if self.is_defined(i)], dtype=np.int64)

    @cached_property
    def text_words(self) -> Words:
        """Packed mask of the ids that are ordinary, non-empty text."""
        return bits.from_ids((i for i, raw in enumerate(self._bytes) if raw), self.size)

    @cached_property
    def trie(self) -> ByteTrie:
        """All ordinary tokens by their bytes. About a second for 128k tokens, once."""
        return ByteTrie([raw or b"" for raw in self._bytes])

    def ids_of(self, text: bytes) -> tuple[int, ...]:
        """Every ordinary id whose bytes are exactly `text`."""
        node = self.trie.find(text)
        return () if node < 0 or not text else self.trie.exact(node)

    def tokens_starting_with(self, prefix: bytes) -> Iterator[tuple[int, bytes]]:
        """`(id, surplus)` of every ordinary token whose bytes start with `prefix`."""
        node = self.trie.find(prefix)
        if node < 0:
            return
        for token in self.trie.under(node).tolist():
            raw = self._bytes[token]
            if raw:
                yield token, raw[len(prefix) :]

    # As a tokenizer.

    def vocab_size(self) -> int:
        return self.size

    def __len__(self) -> int:
        return self.size

    def get_id_to_bytes_list(self) -> list[bytes | None]:
        return list(self._bytes)

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        """Text of each id; control ids are "" unless asked for."""
        return [self.piece(i) if include_special_tokens or i not in self.special_ids else "" for i in range(self.size)]

    def encode(self, text: str | bytes, add_bos: bool = False, **_: Any) -> npt.NDArray[np.int64]:
        """Greedy longest-match token ids, shape (1, n). Not the model's canonical tokenization."""
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
        """The text of ids (any nesting); control ids contribute nothing."""
        flat = np.asarray(ids).reshape(-1).tolist()
        return b"".join(self.bytes_of(i) for i in flat).decode("utf-8", "replace")

    def describe(self) -> str:
        return f"Vocabulary of {self.size} tokens"


_cache: dict[int, tuple[Callable[[], Any], Vocabulary]] = {}
_strong: deque[int] = deque()
# Tokenizers that take no weak reference (the tokenizers library's own) are held themselves, this many.
MAX_STRONG = 4
_lock = threading.Lock()


def _renew_lock() -> None:
    """In a forked child: whoever held it stayed with the parent."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _raw(token: int, text: object) -> bytes | None:
    """A token's bytes. Raises `FilterUsageError` for what has none."""
    if text is None or isinstance(text, bytes):
        return text
    if isinstance(text, bytearray | memoryview):
        return bytes(text)
    if not isinstance(text, str):
        raise FilterUsageError(f"token {token} is {text!r:.80}; tokens are bytes, text, or None for what has no text")
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise FilterUsageError(f"token {token} is {text!r:.80}, half of a surrogate pair: give its bytes") from error


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """The `Vocabulary` of a tokenizer, built once and kept as long as the tokenizer lives.

    Takes a `Vocabulary`, exllamav2's tokenizer or anything with its `get_id_to_piece_list`, a tokenizer of transformers
    or of the tokenizers library, or a plain list of pieces. Raises `FilterUsageError` for anything else.
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
    """Given the cache, not looking it up: it may run when the module is gone."""
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
