"""A view of a cache that presents all of its rows as one, from which pages are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..axes import RopeOffsets

if TYPE_CHECKING:
    from exl_kernels.kv import KVPages

    from ..config import ExLlamaV2Config
    from ..contracts import Cache, PagedCache

__all__ = ["PagedView"]


class PagedView:
    """The memory of a cache as one row, for paged passes of its model (`contracts.Cache`).

    Args:
        cache: the cache that owns the memory.
    """

    def __init__(self, cache: Cache) -> None:
        self._paged = cache
        self.batch_size = 1
        self.max_seq_len = cache.batch_size * cache.max_seq_len
        self.current_seq_len = 0
        self.rope_offsets = RopeOffsets(1)
        self.num_hidden_layers = cache.num_hidden_layers
        self.num_key_value_heads = cache.num_key_value_heads

    def check_model(self, config: ExLlamaV2Config) -> None:
        """Raise CacheError unless the cache fits a model of `config`."""
        self._paged.check_model(config)

    def shards(self) -> Sequence[PagedCache]:
        """Return one cache for each device with heads."""
        return self._paged.shards()

    def device_of(self, layer_idx: int) -> torch.device:
        """Return the device of a layer."""
        return self._paged.device_of(layer_idx)

    def pages(self, layer_idx: int, page_size: int) -> KVPages:
        """View a layer as pages of `page_size` tokens."""
        return self._paged.pages(layer_idx, page_size)
