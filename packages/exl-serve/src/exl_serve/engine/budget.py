"""A limit on the tokens of a model's reasoning, as a filter."""

from __future__ import annotations

from typing import Any

from exl_filters import ExLlamaV2Filter
from exl_filters.base import Allowed

__all__ = ["ThinkingBudget"]


class ThinkingBudget(ExLlamaV2Filter):
    """Allow `limit` tokens of reasoning, then only the tokens that end it; after that everything.

    Args:
        tokenizer: The model's tokenizer.
        limit: Most tokens of reasoning.
        opens: Marker that opens reasoning: the id of a special token, or a text.
        closes: Marker that closes reasoning.
        calls: Marker that opens a tool call, after which no end is forced; or None.
        inside: Whether the prompt ends in an open region of reasoning.
    """

    def __init__(
        self, tokenizer: Any, limit: int, opens: int | str, closes: int | str, calls: int | str | None, inside: bool
    ) -> None:
        super().__init__(None, tokenizer)
        self._limit, self._inside = limit, inside
        self._opens, self._closes, self._calls = opens, closes, calls
        self._bytes = tokenizer.get_id_to_bytes_list(True)
        self._forced = [closes] if isinstance(closes, int) else tokenizer.encode(closes)[0].tolist()
        texts = [one.encode() for one in (opens, closes, calls) if isinstance(one, str)]
        self._longest = max(map(len, texts), default=0)
        self.begin()

    def begin(self, prefix_str: str | bytes | None = "") -> None:
        """Reset the count of reasoning tokens."""
        self._thinking, self._over = self._inside, False
        self._count = self._at = 0
        self._tail = b""

    def feed(self, token: Any) -> None:
        """Count a token, and look for the markers in the text."""
        id = int(token)
        if self._over:
            return
        if self._at or (self._thinking and self._count >= self._limit):
            self._at += 1
            self._over = self._at == len(self._forced)
            return
        self._tail += self._bytes[id] if 0 <= id < len(self._bytes) else b""
        if not self._thinking:
            self._thinking = self._ends_with(self._opens, id)
        else:
            self._count += 1
            self._over = self._ends_with(self._closes, id)
        if self._calls is not None and self._ends_with(self._calls, id):
            self._over = True
        self._tail = self._tail[-self._longest :] if self._longest else b""

    def clone(self, c: Any = None) -> Any:
        """Return a copy that shares the table of the tokens' bytes, which never changes."""
        return self._clone_sharing(c)

    def next(self) -> Allowed:
        """Return the next token of the forced end, or no opinion."""
        if self._over or not self._thinking or self._count < self._limit:
            return None, set()
        return [self._forced[self._at]], set()

    def _ends_with(self, marker: int | str, id: int) -> bool:
        """Whether the token completes the marker; a text may end in the middle of a token."""
        if isinstance(marker, int):
            return id == marker
        text, new = marker.encode(), len(self._bytes[id]) if 0 <= id < len(self._bytes) else 0
        found = self._tail.rfind(text)
        return found >= 0 and found + len(text) > len(self._tail) - new
