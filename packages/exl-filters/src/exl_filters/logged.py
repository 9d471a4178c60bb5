"""`LoggedFilter`: a filter that logs its calls and answers."""

from __future__ import annotations

import logging
from typing import Any

from exl_filters import bits
from exl_filters.base import Allowed
from exl_filters.bits import Words
from exl_filters.combine import AllOf
from exl_filters.tokens import as_token

__all__ = ["LoggedFilter"]


class LoggedFilter(AllOf):
    """Log every begin, answer, feed and rewind of `inner`, to find out why a constraint acts as it does.

    The answers are those of `inner`. Nothing is formatted unless the logger is enabled for the level.

    Args:
        inner: The filter to log; it is cloned.
        logger: Default: the logger `exl_filters`.
        level: Level of the messages; default DEBUG.
    """

    def __init__(self, inner: Any, *, logger: logging.Logger | None = None, level: int = logging.DEBUG) -> None:
        self._logger, self._level = logger or logging.getLogger("exl_filters"), level
        super().__init__([inner])

    def begin(self, prefix_str: Any = "") -> None:
        """Log the prefix and reset the filter."""
        self._tell("begin(%r)", prefix_str)
        super().begin(prefix_str)

    def feed(self, token: Any) -> None:
        """Log a token, its text and the error that it raises; feed it."""
        token = as_token(token)
        try:
            super().feed(token)
        except Exception as error:
            self._tell("feed(%s) raised %s: %s", token, type(error).__name__, error)
            raise
        self._tell("feed(%s) %r%s", token, self.vocabulary.piece(token), ", ended" if self.ended() else "")

    def next(self) -> Allowed:
        """Return the filter's answer, and log it."""
        allowed, ends = super().next()
        self._tell("next() allows %s, ends at %s", self._shown(allowed), self._shown(ends))
        return allowed, ends

    def fill_bitmask(self, words: Words) -> bool:
        """Write the filter's mask, and log it."""
        spoke = super().fill_bitmask(words)
        if self._logger.isEnabledFor(self._level):
            self._tell("mask of %s", self._shown(bits.to_ids(words)) if spoke else "no opinion")
        return spoke

    def rewind(self, n: int) -> None:
        """Log the number of tokens and undo them."""
        self._tell("rewind(%d)", n)
        super().rewind(n)

    def describe(self) -> str:
        """Return `Logged(...)` with the inner filter's description."""
        return f"Logged({self._parts[0].describe()})"

    def spec(self) -> dict[str, Any]:
        """Return `{"type": "logged", "inner": ...}`."""
        return {"type": "logged", "inner": self._parts[0].spec()}

    def _tell(self, message: str, *values: Any) -> None:
        if self._logger.isEnabledFor(self._level):
            self._logger.log(self._level, f"%s: {message}", self._parts[0].describe(), *values)

    def _shown(self, ids: Any) -> str:
        """Format the number of ids, and the first few as text."""
        if ids is None:
            return "anything"
        some = sorted(ids)[:5]
        texts = ", ".join(repr(self.vocabulary.piece(i)) for i in some)
        return f"{len(ids)} ids ({texts}{', ...' if len(ids) > len(some) else ''})"
