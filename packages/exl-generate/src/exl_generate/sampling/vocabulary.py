"""Facts of a vocabulary that the sampler uses: real ids, DRY's default breakers, XTC's default ignored ids."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from exl_generate.errors import RequestError
from exl_kernels.sampling import pack_ids

if TYPE_CHECKING:
    from exl_generate.contracts import Tokenizer

__all__ = ["Mask", "Vocabulary"]

#: packed int32 words: bit i & 31 of word i >> 5 is id i
Mask = NDArray[np.int32]

_BREAKERS = frozenset('.,!?<>[](){}"\n\t')
_cache: weakref.WeakKeyDictionary[Tokenizer, Vocabulary] = weakref.WeakKeyDictionary()


class Vocabulary:
    """Facts derived once per tokenizer; the sets are built on first use, since most requests need none of them.

    Args:
        tokenizer: The tokenizer, or None.
        width: Number of ids in the logits. Without a tokenizer this is the size of the vocabulary, padding (at most 31
            ids) included.
    """

    def __init__(self, tokenizer: Tokenizer | None, width: int = 0) -> None:
        """Keep a weak reference to `tokenizer`; see the class for `width`."""
        self._tokenizer = None if tokenizer is None else weakref.ref(tokenizer)
        self.size = width if tokenizer is None else int(tokenizer.get_vocab_size())
        known = width if tokenizer is None else int(tokenizer.config.vocab_size)
        #: ids that settings may name: the model may know more of them than its tokenizer
        self.width = max(self.size, known)
        #: a bias has a value for each of these; ids that only one of the two knows may be missing
        self.least_bias = max(0, width - 31) if tokenizer is None else min(self.size, known)
        self._dry_breakers: Mask | None = None
        self._xtc_ignored: Mask | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """Return the facts of this tokenizer, shared by all requests that use it."""
        found = _cache.get(tokenizer)
        if found is None:
            found = _cache[tokenizer] = cls(tokenizer)
        return found

    @property
    def dry_breakers(self) -> Mask:
        """Ids whose piece contains punctuation that ends a repeat, and all special ids."""
        if self._dry_breakers is None:
            self._dry_breakers = self.pack(self.dry_breaker_ids)
        return self._dry_breakers

    @property
    def dry_breaker_ids(self) -> set[int]:
        """The set of the ids in `dry_breakers`."""
        return self.containing(_BREAKERS) | self.special

    @property
    def xtc_ignored(self) -> Mask:
        """Ids whose piece contains a newline, and all special ids."""
        if self._xtc_ignored is None:
            self._xtc_ignored = self.pack(self.xtc_ignored_ids)
        return self._xtc_ignored

    @property
    def xtc_ignored_ids(self) -> set[int]:
        """The set of the ids in `xtc_ignored`."""
        return self.containing("\n") | self.special

    @property
    def special(self) -> set[int]:
        """Special and added ids."""
        return set(self._owner.extended_id_to_piece)

    def breaking(self, text: str) -> set[int]:
        """Return the ids that a breaker text means: every id whose piece contains it.

        For a text that spans pieces, the last id of its encoding.
        """
        if not text:
            raise RequestError("a DRY sequence breaker is an empty string; pass text or token ids")
        found = {i for i, piece in enumerate(self._owner.get_id_to_piece_list()) if text in piece}
        found |= {i for i, piece in self._owner.extended_id_to_piece.items() if text in piece}
        if not found:
            found = {int(i) for i in self._owner.encode(text, add_bos=False)[0, -1:]}
        if not found:
            raise RequestError(f"DRY sequence breaker {text!r} cannot be spelled in this vocabulary; leave it out")
        return found

    def containing(self, characters: Collection[str]) -> set[int]:
        """Return the ids whose piece contains any of these characters."""
        wanted = frozenset(characters)
        pieces = self._owner.get_id_to_piece_list()
        return {i for i, piece in enumerate(pieces) if not wanted.isdisjoint(piece)}

    def pack(self, ids: Collection[int]) -> Mask:
        """Return a mask with only the bits of `ids` set."""
        return pack_ids(ids, self.width)

    @property
    def _owner(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                "tokenizer is None, and these settings need the text of tokens (XTC without xtc_ignore_tokens, DRY "
                "without dry_sequence_breakers or with breakers given as text): pass the tokenizer"
            )
        tokenizer = self._tokenizer()
        assert tokenizer is not None, "a request outlived its tokenizer"
        return tokenizer
