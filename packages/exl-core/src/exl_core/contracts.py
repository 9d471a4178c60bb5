"""Protocols of the objects that layers receive, so that layers need not import the modules that make these objects."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypedDict

import torch
from torch import Tensor

from exl_kernels.kv import KVPages
from exl_kernels.linear import QuantMatrix

if TYPE_CHECKING:
    from .axes import RopeOffsets
    from .config import ExLlamaV2Config
    from .lora.pairs import EmbeddingPair

__all__ = ["Adapter", "Cache", "EmbeddedRows", "ForwardResult", "PagedCache", "first_missing"]


class ForwardResult(TypedDict, total=False):
    """The results of a pass that were asked for."""

    logits: Tensor
    """float32 [batch, q_len, padded vocabulary]. With last_id_only q_len is 1, or the number of rows of `q_lens`."""
    last_state: Tensor
    """[batch, q_len, hidden], float32 or on a GPU half"""
    states: dict[int, Tensor]
    """Inputs of modules by their number, each like `last_state`."""
    aborted: bool
    """True, without other results, if `abort_event` was set."""


class AdapterPair(Protocol):
    """The factors and scale that an adapter adds to one matrix."""

    @property
    def for_kernels(self) -> bool:
        """Whether the kernels of a GPU that add adapters row by row support it."""
        ...

    def add_to(self, x: Tensor, y: Tensor, *, invariant: bool | None = None) -> None:
        """Add the adapter's results for x [T, in] to the matrix's results y [T, out].

        `invariant` is as for `QuantMatrix.matmul`.
        """
        ...


class Adapter(Protocol):
    """A LoRA adapter: its changes to each matrix, by the matrix's key."""

    @property
    def touched(self) -> Collection[str]:
        """Keys of all matrices that the adapter changes."""
        ...

    @property
    def pairs(self) -> Mapping[str, AdapterPair]:
        """Low-rank pairs by the key of their matrix."""

    @property
    def replacements(self) -> Mapping[str, QuantMatrix]:
        """Whole matrices that replace the model's, by key."""

    @property
    def embedding(self) -> Tensor | None:
        """[vocabulary, hidden], in place of the model's table."""
        ...

    @property
    def embedding_pair(self) -> EmbeddingPair | None:
        """Low-rank pair for the embedding, or None."""


class EmbeddedRows(Protocol):
    """Hidden states with token ids."""

    def select(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Find the rows of this object among ids.

        Args:
            ids: int64 [T].

        Returns:
            bool [T], True where the id is a row of this object; and these rows, float32 [n, hidden], on their device.
        """
        ...


class PagedCache(Protocol):
    """Keys and values of every layer, or of the heads on one device."""

    @property
    def num_key_value_heads(self) -> int:
        """Number of key/value heads."""

    def shards(self) -> Sequence[PagedCache]:
        """Return one cache for each device with heads; the cache itself where heads are not sharded."""
        ...

    def device_of(self, layer_idx: int) -> torch.device:
        """Return the device of a layer."""
        ...

    def pages(self, layer_idx: int, page_size: int) -> KVPages:
        """View a layer as pages of `page_size` tokens."""
        ...


class Cache(PagedCache, Protocol):
    """Keys and values of sequences, as executors use them.

    exl_core has two implementations: its caches (`ExLlamaV2CacheBase`), and views of them (`PagedView`). Eager passes
    refuse what lacks a member (`arguments.check_context`). Captured steps do not ask: it would cost each host time.
    """

    current_seq_len: int
    """Tokens of the longest sequence, in contiguous use; the last pass sets it."""
    rope_offsets: RopeOffsets
    """RoPE offsets after stored images, in contiguous use."""

    @property
    def batch_size(self) -> int:
        """Number of rows; pages are cut from one."""
        ...

    @property
    def max_seq_len(self) -> int:
        """Tokens of a row."""
        ...

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers."""
        ...

    def check_model(self, config: ExLlamaV2Config) -> None:
        """Raise CacheError unless the cache fits a model of `config`."""
        ...


def first_missing(part: object, protocol: type) -> str | None:
    """Return the first member of `protocol` that `part` lacks, or None.

    Properties of the part's class are not evaluated.
    """
    kind = type(part)
    return next((name for name in _members(protocol) if not hasattr(kind, name) and not hasattr(part, name)), None)


@cache
def _members(protocol: type) -> tuple[str, ...]:
    own = [vars(base) for base in protocol.__mro__]
    members = (name for found in own for name in (*found.get("__annotations__", ()), *found))
    return tuple(name for name in members if not name.startswith("_"))
