"""Packed token masks: int32 words; token i is bit `i & 31` of word `i >> 5`; 1 = allowed.

llguidance, xgrammar, vLLM and SGLang use the same layout. A mask that is narrower than its operand counts as zero
beyond its width. Bits at and above the vocabulary size are always zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
import numpy.typing as npt

__all__ = [
    "Words",
    "and_into",
    "apply",
    "clear_from",
    "copy_into",
    "count",
    "empty",
    "expand",
    "from_ids",
    "full",
    "is_empty",
    "put",
    "test",
    "to_ids",
    "word_count",
]

Words = npt.NDArray[np.int32]
_BITS = tuple(np.array([1 << i], dtype=np.uint32).view(np.int32)[0] for i in range(32))


def word_count(size: int) -> int:
    """Return the number of words that `size` tokens need."""
    return (size + 31) >> 5


def empty(size: int) -> Words:
    """Return a mask for `size` tokens that allows none."""
    return np.zeros(word_count(size), dtype=np.int32)


def full(size: int) -> Words:
    """Return a mask that allows exactly the ids 0..size-1; the tail bits stay zero."""
    words = np.full(word_count(size), -1, dtype=np.int32)
    clear_from(words, size)
    return words


def clear_from(words: Words, size: int) -> None:
    """Clear every bit at and above `size`, in place."""
    whole, rest = size >> 5, size & 31
    if whole >= len(words):
        return
    if rest:
        words[whole] &= np.int32((1 << rest) - 1)
        whole += 1
    words[whole:] = 0


def from_ids(ids: Iterable[int] | npt.NDArray[np.integer], size: int) -> Words:
    """Pack token ids, in any order and with repeats. Ids outside [0, size) are left out."""
    array = ids if isinstance(ids, np.ndarray) else np.fromiter(ids, dtype=np.int64)
    words = empty(size)
    if len(array) == 0:
        return words
    array = array[(array >= 0) & (array < size)]
    if len(array) > 64:
        flags = np.zeros(len(words) * 32, dtype=np.uint8)
        flags[array] = 1
        words.view(np.uint8)[:] = np.packbits(flags, bitorder="little")
        return words
    unsigned = words.view(np.uint32)
    for token in array.tolist():
        unsigned[token >> 5] |= np.uint32(1 << (token & 31))
    return words


def expand(words: Words, size: int | None = None) -> npt.NDArray[np.uint8]:
    """Unpack to one byte per token, 1 = allowed: uint8 of `size` entries (default: every bit), zero beyond the mask's
    width.
    """
    flags = np.unpackbits(words.view(np.uint8), bitorder="little")
    if size is None or size == len(flags):
        return flags
    if size < len(flags):
        return flags[:size]
    return np.concatenate([flags, np.zeros(size - len(flags), dtype=np.uint8)])


def to_ids(words: Words) -> list[int]:
    """Return the allowed ids in ascending order."""
    filled = np.flatnonzero(words)
    if len(filled) * 4 > len(words):
        dense: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        return dense
    flags = np.unpackbits(words[filled].view(np.uint8), bitorder="little").reshape(-1, 32)
    row, bit = np.nonzero(flags)
    ids: list[int] = (filled[row] * 32 + bit).tolist()
    return ids


def test(words: Words, token: int) -> bool:
    """Whether `token` is allowed; False outside the mask's width."""
    word = token >> 5
    return 0 <= word < len(words) and bool((int(words[word]) >> (token & 31)) & 1)


def put(words: Words, token: int, allowed: bool) -> None:
    """Set or clear the bit of one token. Tokens outside the mask's width are ignored."""
    word = token >> 5
    if 0 <= word < len(words):
        bit = _BITS[token & 31]
        if allowed:
            words[word] |= bit
        else:
            words[word] &= ~bit


def is_empty(words: Words) -> bool:
    """Whether the mask allows nothing. Stops at the first nonzero byte, which is faster than `any()`."""
    octets = words.view(np.uint8)
    return not octets[octets.view(np.bool_).argmax()] if len(octets) else True


def count(words: Words) -> int:
    """Return the number of allowed ids."""
    return int(np.unpackbits(words.view(np.uint8)).sum(dtype=np.int64))


def copy_into(source: Words, target: Words) -> None:
    """Write `source` over `target`, whatever their widths. Words that the source does not cover become zero."""
    width = min(len(source), len(target))
    target[:width] = source[:width]
    target[width:] = 0


def and_into(source: Words, target: Words) -> None:
    """Compute `target &= source`. A narrower source counts as zero beyond its width."""
    if len(source) == len(target):
        np.bitwise_and(target, source, out=target)
        return
    width = min(len(source), len(target))
    np.bitwise_and(target[:width], source[:width], out=target[:width])
    target[width:] = 0


def apply(words: Words, logits: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """Set the logits of excluded ids to -inf, in place; returns `logits`.

    `logits` has shape [..., W] and any float dtype. Entries beyond the mask's width are excluded; allowed entries keep
    their value.
    """
    width = logits.shape[-1]
    if logits.dtype.kind != "f" or logits.dtype.itemsize not in _INTS:
        np.copyto(logits, -np.inf, where=expand(words, width) == 0)
        return logits
    keep, fill = _tables(logits.dtype)
    octets = np.zeros((width + 7) >> 3, dtype=np.uint8)
    given = words.view(np.uint8)[: len(octets)]
    octets[: len(given)] = given
    # On the bit patterns: AND with ones or zeros, then OR with zeros or -inf. A masked assignment is several times
    # slower.
    patterns = logits.view(_INTS[logits.dtype.itemsize])
    np.bitwise_and(patterns, np.take(keep, octets, axis=0, mode="clip").reshape(-1)[:width], out=patterns)
    np.bitwise_or(patterns, np.take(fill, octets, axis=0, mode="clip").reshape(-1)[:width], out=patterns)
    return logits


_INTS: dict[int, type[np.signedinteger]] = {2: np.int16, 4: np.int32, 8: np.int64}


@cache
def _tables(dtype: np.dtype[np.floating]) -> tuple[npt.NDArray[np.signedinteger], npt.NDArray[np.signedinteger]]:
    """Return two tables indexed by a byte of a mask: the eight patterns to AND with, and the eight to OR with."""
    ints = _INTS[dtype.itemsize]
    allowed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(bool)
    minus_infinity = np.array(-np.inf, dtype=dtype).view(ints)
    return np.where(allowed, ints(-1), ints(0)), np.where(allowed, ints(0), minus_infinity)
