"""The cache of a model whose heads are sharded over devices: one ordinary cache for the heads of each device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from exl_kernels.kv import KVPages

from ..device import torch_device
from ..errors import CacheError, InputError
from .base import ExLlamaV2CacheBase
from .classes import ExLlamaV2Cache
from .writes import record_contiguous_write

if TYPE_CHECKING:
    from ..language_model import LanguageModel

__all__ = ["ExLlamaV2Cache_TP"]


class ExLlamaV2Cache_TP(ExLlamaV2CacheBase):
    """Keys and values of a model loaded with `load_tp`, stored in the format of `base`.

    `caches` has one cache of class `base` for every device with heads, in the order of the heads. Where an ordinary
    cache returns a tensor (`key_states` and the like, `get_kv_state`), this class returns a list with one tensor for
    each of `caches`. Everything else is as for `base`. A model on one device has one cache. There is no lazy mode.

    Args:
        model: a loaded model.
        base: cache class of each device.
        batch_size: number of rows.
        max_seq_len: tokens of a row; -1 takes the model's `config.max_seq_len`.
        copy_from: a cache of the same format and shape whose content is cloned.

    Raises:
        ModelStateError: the model is not loaded.
        CacheError: `base` is no cache class, or `copy_from` does not fit.
    """

    kind = "fp16"

    def __init__(
        self,
        model: LanguageModel,
        base: type[ExLlamaV2CacheBase] = ExLlamaV2Cache,
        batch_size: int = 1,
        max_seq_len: int = -1,
        *,
        copy_from: ExLlamaV2CacheBase | None = None,
    ) -> None:
        if not (isinstance(base, type) and issubclass(base, ExLlamaV2CacheBase)) or issubclass(base, ExLlamaV2Cache_TP):
            raise CacheError(f"base is {base!r}, must be one of the other cache classes")
        self.base = base
        for name in ("kind", "wbits", "weights_per_element_k", "weights_per_element_v", "dtype", "has_scales"):
            setattr(self, name, getattr(base, name))
        self.caches: list[ExLlamaV2CacheBase] = []
        super().__init__(model, batch_size, max_seq_len, copy_from=copy_from)

    def create_state_tensors(self, copy_from: ExLlamaV2CacheBase | None, lazy: bool = False) -> None:
        """Create one cache for each device with heads, or clones of those of `copy_from`.

        Raises CacheError if `lazy`.
        """
        if lazy:
            raise CacheError("an ExLlamaV2Cache_TP has no lazy mode: make it after load_tp")
        context = self.model.tp_context
        places: list[tuple[int | None, str | None]] = [(None, None)]
        if context is not None:
            places = [(end - begin, context.names[shard]) for shard, begin, end in context.local_heads]
        sources: Sequence[ExLlamaV2CacheBase | None] = [None] * len(places)
        if copy_from is not None:
            sources = copy_from.shards()
            if len(sources) != len(places):
                raise CacheError(f"copy_from: its heads are on {len(sources)} devices, the model's on {len(places)}")
            record_contiguous_write(self)
            self.current_seq_len = copy_from.current_seq_len
            self.rope_offsets = copy_from.rope_offsets.copy()
        self.caches = [
            self.base(
                self.model,
                self.batch_size,
                self.max_seq_len,
                copy_from=source,
                num_key_value_heads=heads,
                fixed_device=device,
            )
            for (heads, device), source in zip(places, sources, strict=True)
        ]

    def update_cache_tensors(self) -> None:
        """Update the tensors of every cache, as `base` does."""
        for cache in self.caches:
            cache.update_cache_tensors()

    def shards(self) -> Sequence[ExLlamaV2CacheBase]:
        """Return `caches` as a tuple."""
        return tuple(self.caches)

    def device_of(self, layer_idx: int) -> torch.device:
        """Return the device of the tensors of layer `layer_idx` in the first cache."""
        return self.caches[0].device_of(layer_idx)

    def pages(self, layer_idx: int, page_size: int) -> KVPages:
        """View a layer of the only cache as pages. Raises CacheError if there are several caches: use `shards`."""
        if len(self.caches) != 1:
            raise CacheError(
                "this cache was made for a model sharded over devices by load_tp: make a new one for this model"
            )
        return self.caches[0].pages(layer_idx, page_size)

    # ------------------------------------------------------------------------------------------------ one of each cache
    # As in exllamav2, these return lists where an ordinary cache returns a tensor, so they override other types.

    @property
    def key_states(self) -> list[list[Tensor | None]]:  # type: ignore[override]
        """Stored keys of each layer: a list with one tensor for each of `caches`."""
        return self._by_layer(lambda cache: cache.key_states)

    @property
    def value_states(self) -> list[list[Tensor | None]]:  # type: ignore[override]
        """Stored values of each layer: a list with one tensor for each of `caches`."""
        return self._by_layer(lambda cache: cache.value_states)

    @property
    def key_scales(self) -> list[list[Tensor | None]]:  # type: ignore[override]
        """Scales of the keys of each layer, as lists; lists of None for formats without scales."""
        return self._by_layer(lambda cache: cache.key_scales)

    @property
    def value_scales(self) -> list[list[Tensor | None]]:  # type: ignore[override]
        """Scales of the values of each layer, as lists; lists of None for formats without scales."""
        return self._by_layer(lambda cache: cache.value_scales)

    def _by_layer(self, column: Callable[[ExLlamaV2CacheBase], list[Tensor | None]]) -> list[list[Tensor | None]]:
        return [list(parts) for parts in zip(*(column(cache) for cache in self.caches), strict=True)]

    def all_tensors(self) -> list[Tensor]:
        """Return every storage tensor, cache after cache."""
        return [tensor for cache in self.caches for tensor in cache.all_tensors()]

    def footprint(self) -> list[int]:
        """Return the bytes on each device, as `base` counts them, over all caches."""
        held = [cache.footprint() for cache in self.caches]
        return [sum(part[i] for part in held if i < len(part)) for i in range(max(map(len, held)))]

    def get_kv_state(  # type: ignore[override]
        self,
        layer_idx: int,
        batch_size: int,
        offset: int,
        width: int,
        page_size: int = 0,
        cache_seqlens: Tensor | None = None,
        block_table: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return a list of keys and a list of values, one of each cache. The arguments are those of `base`."""
        region = (layer_idx, batch_size, offset, width, page_size, cache_seqlens, block_table)
        pairs = [cache.get_kv_state(*region) for cache in self.caches]
        return [keys for keys, _ in pairs], [values for _, values in pairs]

    def store_kv_state(
        self,
        layer_idx: int,
        batch_size: int,
        offset: int,
        width: int,
        page_size: int = 0,
        cache_seqlens: Tensor | None = None,
        block_table: Tensor | None = None,
    ) -> None:
        """Encode the pairs that `get_kv_state` returned. The arguments are those of `base`."""
        record_contiguous_write(self)
        for cache in self.caches:
            cache.store_kv_state(layer_idx, batch_size, offset, width, page_size, cache_seqlens, block_table)

    def touch_device(self, device: str | torch.device) -> None:
        """Create the pair of half tensors of the caches on that device. Raises InputError if there are none."""
        wanted = torch_device(device)
        found = [cache for cache in self.caches if cache.device_of(0) == wanted]
        if not found:
            raise InputError(f"touch_device: no part of this cache is on {device}")
        for cache in found:
            cache.touch_device(device)

    @property
    def temp_tensors(self) -> dict[str, list[tuple[Tensor, Tensor]]]:  # type: ignore[override]
        """device -> list of the pairs on it that `get_kv_state` decodes into."""
        found: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for cache in self.caches:
            for device, pair in cache.temp_tensors.items():
                found.setdefault(device, []).append(pair)
        return found

    def clone(self) -> Self:
        """Return a new cache with copies of all tensors and the same length."""
        return type(self)(self.model, self.base, self.batch_size, self.max_seq_len, copy_from=self)
