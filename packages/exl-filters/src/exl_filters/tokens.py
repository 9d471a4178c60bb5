"""What crosses the door: tokens as ints or one-element tensors, prefixes as None, str, bytes or a list of pieces."""

from __future__ import annotations

import operator
from typing import Any

from exl_filters.errors import FilterCompileError, FilterUsageError

__all__ = ["FedToken", "as_prefix", "as_token", "encoded"]


class FedToken(int):
    """An int that also answers like the (1, 1) tensor that filters written for exllamav2 expect (spec FC-1).

    `int(t)`, `t.item()`, `t[0][0]` and use as an index all give the id.
    """

    shape = (1, 1)

    def item(self) -> int:
        return int(self)

    def tolist(self) -> list[list[int]]:
        return [[int(self)]]

    def __getitem__(self, index: Any) -> FedToken:
        return self

    def __len__(self) -> int:
        return 1


def as_token(token: Any) -> int:
    """The id in an int, a numpy integer or a tensor of one element.

    Raises `FilterUsageError` for anything else.
    """
    if type(token) is int:
        return token
    try:
        return operator.index(token)
    except (TypeError, ValueError, RuntimeError):
        pass
    try:
        return int(token.item())
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise FilterUsageError(
            f"feed() takes an int or a tensor of one element, got {type(token).__name__} {token!r:.60}"
        ) from error


def encoded(what: str, text: str) -> bytes:
    """UTF-8 of a text that a filter is made of; a byte that is none may stand as its surrogate escape.

    Raises `FilterCompileError` for any other half of a surrogate pair.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise FilterCompileError(f"{what} has half of a surrogate pair at {error.start}, which is no text") from error


def as_prefix(prefix: Any) -> bytes:
    """The bytes of a healing prefix: None and "" are empty, a list of one piece per row (base generator) is its one
    row.
    """
    if prefix is None:
        return b""
    if isinstance(prefix, str):
        return encoded("the prefix", prefix)
    if isinstance(prefix, bytes | bytearray):
        return bytes(prefix)
    if isinstance(prefix, list | tuple):
        if not prefix:
            return b""
        if len(prefix) == 1 or all(piece == prefix[0] for piece in prefix):
            return as_prefix(prefix[0])
        raise FilterUsageError(
            f"begin() got {len(prefix)} different prefixes; a filter constrains one row, clone it per row"
        )
    raise FilterUsageError(f"begin() takes None, str, bytes or a list of one piece, got {type(prefix).__name__}")
