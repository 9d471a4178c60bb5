"""Protocols of what layers are handed, so that their files need not import those that make it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from exl_kernels.kv import KVPages
from exl_kernels.linear import QuantMatrix

if TYPE_CHECKING:
    from .lora.pairs import EmbeddingPair

__all__ = ["Adapter", "EmbeddedRows", "PagedCache"]


class AdapterPair(Protocol):
    """The factors and scale that an adapter adds to one matrix."""

    def add_to(self, x: Tensor, y: Tensor) -> None:
        """Adds to the matrix's results y [T, out] of x [T, in]."""
        ...


class Adapter(Protocol):
    """A LoRA adapter: what it adds to which matrix, by the matrix's key."""

    @property
    def touched(self) -> Collection[str]:
        """Keys of all matrices that it changes."""
        ...

    @property
    def pairs(self) -> Mapping[str, AdapterPair]: ...
    @property
    def replacements(self) -> Mapping[str, QuantMatrix]: ...
    @property
    def embedding(self) -> Tensor | None:
        """[vocabulary, hidden], in place of the model's table."""
        ...

    @property
    def embedding_pair(self) -> EmbeddingPair | None: ...


class EmbeddedRows(Protocol):
    """Hidden states that have token ids of their own."""

    def select(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(bool [T]: which of `ids` [T] are rows of this object; those rows float32 [n, hidden], on their device)."""
        ...


class PagedCache(Protocol):
    """Keys and values of every layer, or of the heads that one device has."""

    @property
    def num_key_value_heads(self) -> int: ...

    def shards(self) -> Sequence[PagedCache]:
        """One cache for each device with heads; the cache itself where heads are not cut."""
        ...

    def device_of(self, layer_idx: int) -> torch.device:
        """Where a layer is."""
        ...

    def pages(self, layer_idx: int, page_size: int) -> KVPages:
        """One layer as pages of `page_size` tokens."""
        ...
