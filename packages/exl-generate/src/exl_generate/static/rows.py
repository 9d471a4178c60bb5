"""Present a cache of several rows as one long row from which pages are cut: the same memory with other numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from exl_core.cache import ExLlamaV2CacheBase
from exl_generate.contracts import Cache, CacheView

if TYPE_CHECKING:
    import torch

    from exl_core import ExLlamaV2Config
    from exl_kernels.kv import KVPages

__all__ = ["OneRow", "one_row", "page_size_of"]


class OneRow(CacheView):
    """Present `cache` with batch_size 1 and the length of all its rows together."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.batch_size = 1
        self.max_seq_len = cache.batch_size * cache.max_seq_len
        self.current_seq_len = 0

    @property
    def underlying(self) -> Cache:
        """The cache that owns the memory."""
        return self._cache

    @property
    def model(self) -> object:
        """The model that the cache was made for."""
        return self._cache.model

    @property
    def kind(self) -> str:
        """The format of the stored keys and values."""
        return self._cache.kind

    def copy_states(self, target: Any, from_column: int, from_columns: int, to_column: int, *_: int) -> None:
        """Copy tokens inside one page to another page; pages never cross the end of a row."""
        length = self._cache.max_seq_len
        from_row, from_column = divmod(from_column, length)
        to_row, to_column = divmod(to_column, length)
        other = target._cache if isinstance(target, OneRow) else target
        self._cache.copy_states(other, from_column, from_columns, to_column, from_columns, from_row, 1, to_row, 1)


class PagedOneRow(OneRow):
    """`OneRow` of a cache of exl_core, with all that its models read of a cache whose rows are pages."""

    def __init__(self, cache: ExLlamaV2CacheBase) -> None:
        super().__init__(cache)
        self._paged = cache
        self.num_hidden_layers = cache.num_hidden_layers
        self.num_key_value_heads = cache.num_key_value_heads

    def check_model(self, config: ExLlamaV2Config) -> None:
        """Raise CacheError unless the cache fits a model of `config`."""
        self._paged.check_model(config)

    def shards(self) -> Sequence[ExLlamaV2CacheBase]:
        """Return one cache for each device with heads."""
        return self._paged.shards()

    def device_of(self, layer_idx: int) -> torch.device:
        """Return the device of a layer."""
        return self._paged.device_of(layer_idx)

    def pages(self, layer_idx: int, page_size: int) -> KVPages:
        """View a layer as pages of `page_size` tokens."""
        return self._paged.pages(layer_idx, page_size)


def one_row(cache: Cache) -> OneRow:
    """Return the view of `cache` for a generator over all of its rows."""
    return PagedOneRow(cache) if isinstance(cache, ExLlamaV2CacheBase) else OneRow(cache)


def page_size_of(cache: Cache) -> int:
    """Return the largest page size up to 64 tokens that divides the cache's length; short, since few sequences share
    it.
    """
    return next(size for size in range(min(64, cache.max_seq_len), 0, -1) if cache.max_seq_len % size == 0)
