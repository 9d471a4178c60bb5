"""Token ids to text, token by token, exact to the byte: a character is emitted when its last byte has arrived."""

from __future__ import annotations

import codecs
import weakref
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from exl_generate.contracts import Tokenizer

__all__ = ["PieceTable", "decode_incremental"]

_cache: weakref.WeakKeyDictionary[Tokenizer, dict[bool, PieceTable]] = weakref.WeakKeyDictionary()


class PieceTable:
    """The bytes of each id. Without `special`, special ids have none."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._starting: dict[bytes, NDArray[np.int64]] = {}
        self._texts: dict[int, str | None] = {}

    @classmethod
    def of(cls, tokenizer: Tokenizer, special: bool) -> PieceTable:
        """Return the table of this tokenizer, built once and shared by all requests."""
        tables = _cache.setdefault(tokenizer, {})
        if special not in tables:
            tables[special] = cls(tokenizer.get_id_to_bytes_list(include_special_tokens=special))
        return tables[special]

    def starting_with(self, prefix: bytes) -> NDArray[np.int64]:
        """Return the ids whose bytes begin with `prefix`, ascending."""
        found = self._starting.get(prefix)
        if found is None:
            ids = [i for i, piece in enumerate(self._pieces) if piece.startswith(prefix)]
            found = self._starting[prefix] = np.array(ids, dtype=np.int64)
        return found

    def text_of(self, token: int) -> str | None:
        """Return the text of a token whose bytes are complete characters; None for any other token."""
        try:
            return self._texts[token]
        except KeyError:
            text, pending = decode_incremental(b"", self[token])
            return self._texts.setdefault(token, None if pending else text)

    def __getitem__(self, token: int) -> bytes:
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""


def decode_incremental(pending: bytes, new: bytes, final: bool = False) -> tuple[str, bytes]:
    """Return the complete text, and the bytes (at most three) of an incomplete last character.

    Invalid bytes become U+FFFD at once. Feeding any split of a byte string and flushing with `final` gives that string
    decoded with errors="replace".
    """
    data = pending + new
    text, used = codecs.utf_8_decode(data, "replace", final)
    return text, data[used:]
