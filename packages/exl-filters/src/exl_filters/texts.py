"""Test whether filters accept a text, without a model. For the CI of grammars."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from exl_filters.errors import FilterRejected
from exl_filters.tokens import as_prefix
from exl_filters.vocabulary import Vocabulary

if TYPE_CHECKING:
    from exl_filters.host import FilterStack

__all__ = ["accept_text"]


def accept_text(stack: FilterStack, vocabulary: Vocabulary, text: str | bytes) -> bool:
    """Feed `stack` tokens that spell `text`. Returns True if some tokenization is permitted; False changes no state.

    Longer tokens are tried first. A position whose rest was rejected once is not tried again with other tokens: for
    filters over text, equal text leads to the same state (LAW-28).
    """
    raw = as_prefix(text)
    refused: set[int] = set()
    at, ways = [0], [_spellings(vocabulary, raw, 0)]
    while at[-1] < len(raw):
        token = next(ways[-1], None)
        if token is None:
            refused.add(at.pop())
            ways.pop()
            if not at:
                return False
            stack.rewind(1)
            continue
        reached = at[-1] + len(vocabulary.bytes_of(token))
        if reached in refused:
            continue
        if stack.ended:
            refused.add(reached)
            continue
        try:
            stack.feed(token)
        except FilterRejected:
            continue
        at.append(reached)
        ways.append(_spellings(vocabulary, raw, reached))
    return True


def _spellings(vocabulary: Vocabulary, text: bytes, position: int) -> Iterator[int]:
    """Yield the ids whose bytes `text` continues with at `position`, longest first."""
    trie, node = vocabulary.trie, 0
    found: list[int] = []
    for byte in text[position:]:
        node = trie.child(node, byte)
        if node < 0:
            break
        found.extend(trie.exact(node))
    return reversed(found)
