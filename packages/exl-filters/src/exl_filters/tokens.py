"""Conversion of public arguments: tokens as ints or one-element tensors; prefixes as None, str, bytes or a list."""

from __future__ import annotations

import operator
import sys
from functools import cache
from typing import Any

from exl_filters.errors import FilterCompileError, FilterUsageError

__all__ = ["FedToken", "as_prefix", "as_token", "encoded", "fed_token"]


def fed_token(token: int) -> Any:
    """Return an id in the form in which filters written for exllamav2 are fed: an int64 tensor of shape (1, 1).

    The tensor is in CPU memory, whatever torch's default device. It has the hash of the id, so that
    sets and dicts of ints find it. Without torch in the process the id is a `FedToken`.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return FedToken(token)
    return torch.tensor([[token]], dtype=torch.int64, device="cpu").as_subclass(_token_tensor())


@cache
def _token_tensor() -> Any:
    """Return the class of the tensors of `fed_token`. Operations on them give plain tensors."""
    torch: Any = sys.modules["torch"]
    own = {
        "__torch_function__": torch._C._disabled_torch_function_impl,
        "__hash__": lambda self: hash(self.item()),
        "__reduce_ex__": lambda self, protocol: (fed_token, (self.item(),)),
        "__deepcopy__": lambda self, memo: fed_token(self.item()),
        "clone": lambda self, **kwargs: fed_token(self.item()),
    }
    return type("TokenTensor", (torch.Tensor,), own)


class FedToken(int):
    """An int that also answers like the (1, 1) tensor of `fed_token`, for processes without torch.

    `int(t)`, `t.item()`, `t[0][0]` and use as an index all give the id.
    """

    shape = (1, 1)

    def item(self) -> int:
        """Return the id."""
        return int(self)

    def tolist(self) -> list[list[int]]:
        """Return the id as a nested list, `[[id]]`."""
        return [[int(self)]]

    def __getitem__(self, index: Any) -> FedToken:
        return self

    def __len__(self) -> int:
        return 1


def as_token(token: Any) -> int:
    """Return the id in an int, a numpy integer or a tensor of one element.

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
    """Return the UTF-8 of a filter's text parameter; a surrogate escape means a byte that is not UTF-8.

    Raises `FilterCompileError` for any other unpaired surrogate.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise FilterCompileError(f"{what} has an unpaired surrogate at {error.start}, which has no UTF-8") from error


def as_prefix(prefix: Any) -> bytes:
    """The bytes of a healing prefix. None and "" are empty; a list of one piece (base generator) is that piece."""
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
