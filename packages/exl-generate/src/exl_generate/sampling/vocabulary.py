"""What the sampler must know of a vocabulary: which ids are real, DRY's default breakers, XTC's default ignore set."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from exl_generate.contracts import Tokenizer

__all__ = ["Vocabulary"]

_BREAKERS = frozenset('.,!?<>[](){}"\n\t')
_cache: weakref.WeakKeyDictionary[Tokenizer, Vocabulary] = weakref.WeakKeyDictionary()


class Vocabulary:
    """Facts derived once per tokenizer; the sets are built on first use, since most requests need none of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = weakref.ref(tokenizer)
        self.size = int(tokenizer.get_vocab_size())
        self._dry_breakers: frozenset[int] | None = None
        self._xtc_ignored: frozenset[int] | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """The facts of this tokenizer, shared by all requests that use it."""
        found = _cache.get(tokenizer)
        if found is None:
            found = _cache[tokenizer] = cls(tokenizer)
        return found

    @property
    def dry_breakers(self) -> frozenset[int]:
        """Ids whose piece contains punctuation that ends a repeat, and all special ids (P-6)."""
        if self._dry_breakers is None:
            self._dry_breakers = self._containing(_BREAKERS)
        return self._dry_breakers

    @property
    def xtc_ignored(self) -> frozenset[int]:
        """Ids whose piece contains a newline, and all special ids (P-19)."""
        if self._xtc_ignored is None:
            self._xtc_ignored = self._containing(frozenset("\n"))
        return self._xtc_ignored

    def _containing(self, characters: frozenset[str]) -> frozenset[int]:
        tokenizer = self._tokenizer()
        assert tokenizer is not None, "a request outlived its tokenizer"
        pieces = tokenizer.get_id_to_piece_list()
        ids = {i for i, piece in enumerate(pieces) if not characters.isdisjoint(piece)}
        return frozenset(ids | set(tokenizer.extended_id_to_piece))


def members(ids: NDArray[np.int64], group: frozenset[int] | set[int]) -> NDArray[np.bool_]:
    """Which of `ids` are in `group`."""
    return np.fromiter((int(i) in group for i in ids), dtype=np.bool_, count=len(ids))
