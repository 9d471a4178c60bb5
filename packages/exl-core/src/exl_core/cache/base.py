"""The base of all caches: allocation on the devices of the model's layers, page views, copying and accounting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from exl_kernels.kv import KVKind, KVPages, load_kv, store_kv
from exl_kernels.selection import Card

from ..axes import RopeOffsets
from ..device import torch_device
from ..errors import CacheError, DeviceError, InputError, ModelStateError
from .writes import record_contiguous_write

if TYPE_CHECKING:
    from ..config import ExLlamaV2Config
    from ..language_model import LanguageModel

__all__ = ["ExLlamaV2CacheBase"]


class ExLlamaV2CacheBase:
    """Keys and values of `batch_size` sequences of up to `max_seq_len` tokens, one pair of tensors a layer.

    Use a subclass. The storage of a layer is [batch_size, max_seq_len, kv_heads, stored elements]; the paged generator
    reads the same memory as pages. Tokens are stored one by one: appending never re-encodes stored tokens.

    Args:
        model: the model. An eager cache needs a loaded model, because its tensors are on the devices of the layers.
        batch_size: number of rows.
        max_seq_len: tokens of a row; -1 takes the model's `config.max_seq_len`.
        copy_from: a cache of the same format and shape whose content is cloned.
        lazy: allocate nothing until `update_cache_tensors`, which `load_autosplit` calls.
        num_key_value_heads: heads to store; default all of the model.
        fixed_device: device of all layers; default: the device of each model layer.

    Raises:
        ModelStateError: the model is not loaded and `lazy` is False.
        CacheError: an argument is invalid, `copy_from` does not fit, or a GPU has no kernel for the format.
        DeviceError: a device has too little memory.
    """

    kind: ClassVar[KVKind]
    wbits: ClassVar[int | None] = None  # 4, 6 or 8 for the quantized classes
    weights_per_element_k: ClassVar[int] = 1  # stored values per element of the tensor
    weights_per_element_v: ClassVar[int] = 1
    dtype: ClassVar[torch.dtype] = torch.uint8
    has_scales: ClassVar[bool] = False
    q_block: ClassVar[int] = 1  # tokens are encoded one by one, so nothing has to be rounded

    def __init__(
        self,
        model: LanguageModel,
        batch_size: int = 1,
        max_seq_len: int = -1,
        copy_from: ExLlamaV2CacheBase | None = None,
        lazy: bool = False,
        num_key_value_heads: int | None = None,
        fixed_device: str | int | None = None,
    ) -> None:
        config = model.config
        self.model = model
        self.batch_size = _at_least_one("batch_size", batch_size)
        self.max_seq_len = config.max_seq_len if max_seq_len == -1 else _at_least_one("max_seq_len", max_seq_len)
        self.num_key_value_heads = num_key_value_heads or config.num_key_value_heads
        self.num_hidden_layers = config.num_hidden_layers
        self.head_dim = config.head_dim
        self.fixed_device = fixed_device
        self.current_seq_len = 0
        self._layers: list[KVPages | None] = [None] * self.num_hidden_layers
        self._places = ["cpu"] * self.num_hidden_layers  # device of each layer, by the name in the model's cache_map
        self._views: dict[tuple[int, int], KVPages] = {}
        self._temp: dict[str, tuple[Tensor, Tensor]] = {}  # by device: targets of get_kv_state's decoding
        self.rope_offsets = RopeOffsets(batch_size)  # of stored images, in contiguous use
        self.create_state_tensors(copy_from, lazy)

    def __repr__(self) -> str:
        shards = self.shards()
        places = dict.fromkeys(place for cache in shards for place in cache._places)
        empty = any(layer is None for cache in shards for layer in cache._layers)
        return (
            f"{type(self).__name__}({self.batch_size} x {self.max_seq_len} tokens, {self.current_seq_len} used, "
            f"{self.num_hidden_layers} layers, {'not allocated' if empty else 'on ' + ', '.join(places)})"
        )

    # ------------------------------------------------------------------------------------------------------- storage

    def create_state_tensors(self, copy_from: ExLlamaV2CacheBase | None, lazy: bool = False) -> None:
        """Create zeroed tensors on each layer's device, or clones of those of `copy_from`, or none if `lazy`.

        Raises CacheError if both are given, and ModelStateError if the model is not loaded and `lazy` is False.
        """
        if copy_from is not None:
            if lazy:
                raise CacheError("a cache cannot be lazy and copy_from another one at the same time")
            self._check_same_layout(copy_from)
            record_contiguous_write(self)
            self._layers = [_clone_pages(p) for p in copy_from._layers]
            self._places = list(copy_from._places)
            self.current_seq_len = copy_from.current_seq_len
            self.rope_offsets = copy_from.rope_offsets.copy()
        elif not lazy:
            if not self.model.loaded:
                raise ModelStateError(
                    f"{type(self).__name__}: load the model before creating its cache, or pass lazy=True and load with "
                    "load_autosplit(cache)"
                )
            self.update_cache_tensors()
        self._views.clear()

    def update_cache_tensors(self) -> None:
        """Give every layer of `model.cache_map` zeroed tensors on its device, unless they exist there already.

        Raises CacheError if the model's heads are sharded over several devices, or a GPU has no kernel for the format.
        """
        context = self.model.tp_context
        if context is not None and len(context.heads) > 1 and self.fixed_device is None:
            raise CacheError(
                f"the matrices of this model are sharded over {', '.join(context.names)}, and so are its heads: use "
                f"ExLlamaV2Cache_TP(model, base={type(self).__name__})"
            )
        for layer, device in self.model.cache_map.items():
            device = _name_of(self.fixed_device) if self.fixed_device is not None else device
            pages = self._layers[layer]
            if pages is None or pages.device != torch_device(device):
                record_contiguous_write(self)
                self._layers[layer] = self._allocate(device)
            self._places[layer] = device
        self._views.clear()

    def check_device(self, device: str) -> None:
        """Raise CacheError if `device` is a GPU that has no kernel of attention for this format and these heads."""
        place = torch_device(device)
        if place.type == "cuda":
            self.check_card(Card.device(place.index or 0))

    def check_card(self, card: Card) -> None:
        """Raise CacheError if a card has no kernel of attention for this format and these heads."""
        why = card.refusal_of_pages(self.kind, self.head_dim)
        if why is not None:
            raise CacheError(
                f"{type(self).__name__} on {card.name}: attention cannot read {self.kind} heads of {self.head_dim} "
                f"elements there: {why}; take a quantized cache, such as ExLlamaV2Cache_Q8 or ExLlamaV2Cache_Q4"
            )

    def _allocate(self, device: str) -> KVPages:
        self.check_device(device)
        try:
            return KVPages.allocate(
                self.kind,
                self.batch_size,
                self.max_seq_len,
                self.num_key_value_heads,
                self.head_dim,
                torch_device(device),
            )
        except (RuntimeError, MemoryError, OverflowError) as e:
            self._layers = [None] * self.num_hidden_layers
            raise DeviceError(
                f"no memory on {device} for a {type(self).__name__} of {self.batch_size} x {self.max_seq_len} tokens, "
                f"{self.num_hidden_layers} layers: take a smaller max_seq_len or a quantized cache"
            ) from e

    def check_model(self, config: ExLlamaV2Config) -> None:
        """Raise CacheError unless the layers, heads and head_dim are those of `config`."""
        mine = (self.num_hidden_layers, self.num_key_value_heads, self.head_dim)
        theirs = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        if mine != theirs:
            raise CacheError(
                f"the cache has (layers, heads, head_dim) {mine}, the model {theirs}: it is another model's"
            )

    def shards(self) -> Sequence[ExLlamaV2CacheBase]:
        """Return the caches that hold the heads, in order: this cache, unless heads are sharded over devices."""
        return (self,)

    def device_of(self, layer_idx: int) -> torch.device:
        """Return torch's device of the tensors of layer `layer_idx`.

        Raises ModelStateError while a lazy cache has none.
        """
        return self._storage(layer_idx).device

    def pages(self, layer_idx: int, page_size: int) -> KVPages:
        """View layer `layer_idx` as [batch * max_seq_len / page_size, ...] pages of the same memory."""
        view = self._views.get((layer_idx, page_size))
        if view is None:
            view = self._views[layer_idx, page_size] = self._storage(layer_idx).repaged(page_size)
        return view

    @property
    def key_states(self) -> list[Tensor | None]:
        """Stored keys of each layer; None where a lazy cache has no tensors yet."""
        return [None if p is None else p.key for p in self._layers]

    @property
    def value_states(self) -> list[Tensor | None]:
        """Stored values of each layer; None where a lazy cache has no tensors yet."""
        return [None if p is None else p.value for p in self._layers]

    @property
    def key_scales(self) -> list[Tensor | None]:
        """Scales of the keys of each layer; None for formats without scales."""
        return [None if p is None else p.key_scales for p in self._layers]

    @property
    def value_scales(self) -> list[Tensor | None]:
        """Scales of the values of each layer; None for formats without scales."""
        return [None if p is None else p.value_scales for p in self._layers]

    def all_tensors(self) -> list[Tensor]:
        """Return every storage tensor: keys of all layers, values, then scales."""
        columns = (self.key_states, self.value_states, self.key_scales, self.value_scales)
        return [t for column in columns for t in column if t is not None]

    def footprint(self) -> list[int]:
        """Return the bytes on each device: index i is device i (cuda:i or cpu:i; the CPU counts as device 0)."""
        held = [(place, p.nbytes) for place, p in zip(self._places, self._layers, strict=True) if p is not None]
        held += [(place, t.nbytes) for place, pair in self._temp.items() for t in pair]
        totals: list[int] = []
        for place, nbytes in held:
            index = torch.device(place).index or 0
            totals += [0] * (index + 1 - len(totals))
            totals[index] += nbytes
        return totals

    # ------------------------------------------------------------------------------------------------------- content

    def reset(self) -> None:
        """Forget the content: the next forward pass starts at position 0."""
        self.current_seq_len = 0
        self.rope_offsets.clear()

    def roll_left(self) -> None:
        """Drop the oldest token of every row and move the stored tokens one place to the left.

        Keys keep the rotation of the position at which they were computed.
        """
        record_contiguous_write(self)
        for tensor in self.all_tensors():
            tensor.copy_(tensor.roll(-1, dims=1))
        self.current_seq_len = max(self.current_seq_len - 1, 0)
        self.rope_offsets.roll_left()

    def clone(self) -> Self:
        """Return a new cache of the same class with copies of all tensors and the same length."""
        return type(self)(
            self.model,
            self.batch_size,
            self.max_seq_len,
            copy_from=self,
            num_key_value_heads=self.num_key_value_heads,
            fixed_device=self.fixed_device,
        )

    def copy_states(
        self,
        target: ExLlamaV2CacheBase,
        from_column: int,
        from_columns: int,
        to_column: int,
        to_columns: int,
        from_row: int,
        from_rows: int,
        to_row: int,
        to_rows: int,
    ) -> None:
        """Copy stored tokens of one row into rows of another cache of the same class, without decoding.

        Args:
            target: cache with the same layers, heads and head_dim.
            from_column: first token to copy.
            from_columns: number of tokens.
            to_column: first token to overwrite.
            to_columns: equal to from_columns.
            from_row: row to copy.
            from_rows: 1.
            to_row: first row to overwrite.
            to_rows: number of rows that get the copy.

        Raises:
            CacheError: the ranges or the caches do not fit.
        """
        if from_rows != 1:
            raise CacheError(f"copy_states: from_rows is {from_rows}, must be 1")
        if from_columns != to_columns:
            raise CacheError(f"copy_states: from_columns {from_columns} and to_columns {to_columns} must be equal")
        if target.kind != self.kind:
            raise CacheError(f"copy_states: {type(self).__name__} cannot be copied into {type(target).__name__}")
        for cache, column, row, rows in ((self, from_column, from_row, 1), (target, to_column, to_row, to_rows)):
            inside = 0 <= column <= column + from_columns <= cache.max_seq_len
            if not (inside and rows >= 0 and 0 <= row <= row + rows <= cache.batch_size):
                raise CacheError(
                    f"copy_states: columns {column}..{column + from_columns}, rows {row}..{row + rows} are outside a "
                    f"cache of {cache.batch_size} rows of {cache.max_seq_len} tokens"
                )
        mine, theirs = self.all_tensors(), target.all_tensors()
        if [t.shape[2:] for t in mine] != [t.shape[2:] for t in theirs]:
            raise CacheError("copy_states: the layers, heads or head_dim of the two caches differ")
        record_contiguous_write(target)
        shares_memory = target is self and to_row <= from_row < to_row + to_rows
        overlaps = shares_memory and abs(from_column - to_column) < from_columns
        copies: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for source, destination in zip(mine, theirs, strict=True) if to_rows and from_columns else ():
            part = source.narrow(0, from_row, 1).narrow(1, from_column, from_columns)
            part = part.clone() if overlaps else part
            to, parts = copies.setdefault((destination.device, destination.dtype), ([], []))
            for row in range(to_row, to_row + to_rows):
                to.append(destination.narrow(0, row, 1).narrow(1, to_column, to_columns))
                parts.append(part)
        for to, parts in copies.values():
            torch._foreach_copy_(to, parts)  # one launch for many layers on a GPU
        if from_column == to_column:
            marks = self.rope_offsets.within(from_row, from_column, from_columns)
            for row in range(to_row, to_row + to_rows):
                target.rope_offsets.write(row, to_column, marks)

    def get_kv_state(
        self,
        layer_idx: int,
        batch_size: int,
        offset: int,
        width: int,
        page_size: int = 0,
        cache_seqlens: Tensor | None = None,
        block_table: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values as half tensors [batch, max_seq_len, kv_heads, head_dim].

        FP16 returns the storage. Other formats decode into a pair of tensors that all layers share: tokens
        [offset, offset + width) of the first `batch_size` rows, or with `page_size` the stored tokens of every
        sequence.

        Args:
            layer_idx: layer.
            batch_size: rows, or sequences in paged terms.
            offset: first token, in contiguous terms.
            width: number of tokens.
            page_size: tokens of a page; 0 for contiguous terms.
            cache_seqlens: int32 [batch], tokens stored for each sequence.
            block_table: int32 [batch, max_pages], page numbers.

        Raises:
            CacheError: the region is outside the cache.
            InputError: page_size without cache_seqlens or block_table.
            ModelStateError: a lazy cache has no tensors yet.
        """
        storage = self._storage(layer_idx)
        if self.kind == "fp16":
            return storage.key, storage.value
        keys, values = self._temp_pair(storage.device)
        slots = self._slots(batch_size, offset, width, page_size, cache_seqlens, block_table, new_tokens=False).to(
            storage.device
        )
        if slots.numel():
            k, v = load_kv(self._flat(layer_idx), slots)
            keys.view(-1, *keys.shape[2:])[slots] = k.half()
            values.view(-1, *values.shape[2:])[slots] = v.half()
        return keys, values

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
        """Encode the region from the pair that `get_kv_state` returned. FP16 needs no work.

        Args:
            layer_idx: layer.
            batch_size: rows, or sequences in paged terms.
            offset: first token, in contiguous terms.
            width: number of tokens; in paged terms after `cache_seqlens` of every sequence.
            page_size: tokens of a page; 0 for contiguous terms.
            cache_seqlens: int32 [batch], tokens stored for each sequence before the region.
            block_table: int32 [batch, max_pages], page numbers.

        Raises:
            CacheError, InputError, ModelStateError: as for `get_kv_state`.
        """
        storage = self._storage(layer_idx)
        record_contiguous_write(self)
        if self.kind == "fp16":
            return
        keys, values = self._temp_pair(storage.device)
        slots = self._slots(batch_size, offset, width, page_size, cache_seqlens, block_table, new_tokens=True).to(
            storage.device
        )
        if slots.numel():
            k = keys.view(-1, *keys.shape[2:])[slots].float()
            v = values.view(-1, *values.shape[2:])[slots].float()
            store_kv(self._flat(layer_idx), k, v, slots)

    def touch_device(self, device: str | torch.device) -> None:
        """Create the pair of half tensors that `get_kv_state` decodes into."""
        if self.kind != "fp16":
            self._temp_pair(torch_device(device))

    @property
    def temp_tensors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """device -> (keys, values) that `get_kv_state` decodes into; empty until its first use."""
        return dict(self._temp)

    # ------------------------------------------------------------------------------------------------------ internals

    def _storage(self, layer_idx: int) -> KVPages:
        pages = self._layers[layer_idx]
        if pages is None:
            raise ModelStateError(
                "this lazy cache has no tensors yet: load the model with load_autosplit(cache), or call "
                "cache.update_cache_tensors() after model.load()"
            )
        return pages

    def _flat(self, layer_idx: int) -> KVPages:
        return self.pages(layer_idx, self.max_seq_len)

    @torch.inference_mode(False)  # made once; callers of every mode write to the tensors in place
    def _temp_pair(self, device: torch.device) -> tuple[Tensor, Tensor]:
        pair = self._temp.get(str(device))
        if pair is None:
            shape = (self.batch_size, self.max_seq_len, self.num_key_value_heads, self.head_dim)
            pair = self._temp[str(device)] = (
                torch.zeros(shape, dtype=torch.half, device=device),
                torch.zeros(shape, dtype=torch.half, device=device),
            )
        return pair

    def _slots(
        self,
        batch_size: int,
        offset: int,
        width: int,
        page_size: int,
        cache_seqlens: Tensor | None,
        block_table: Tensor | None,
        *,
        new_tokens: bool,
    ) -> Tensor:
        """Return token numbers (row * max_seq_len + column) of a region, in contiguous or paged terms."""
        if not page_size:
            if batch_size > self.batch_size or offset < 0 or width < 0 or offset + width > self.max_seq_len:
                raise CacheError(
                    f"tokens {offset}..{offset + width} of {batch_size} rows are outside a cache of "
                    f"{self.batch_size} rows of {self.max_seq_len} tokens"
                )
            rows = torch.arange(batch_size)[:, None] * self.max_seq_len
            return (rows + torch.arange(offset, offset + width)).reshape(-1)
        if cache_seqlens is None or block_table is None:
            raise InputError("cache_seqlens and block_table are needed together with page_size")
        parts = []
        for pages, stored in zip(block_table.long(), cache_seqlens.long(), strict=True):
            span = torch.arange(int(stored), int(stored) + width) if new_tokens else torch.arange(int(stored))
            parts.append(pages[span // page_size] * page_size + span % page_size)
        return torch.cat(parts)

    def _check_same_layout(self, other: ExLlamaV2CacheBase) -> None:
        mine = (self.kind, self.batch_size, self.max_seq_len, self.num_key_value_heads, self.head_dim)
        theirs = (other.kind, other.batch_size, other.max_seq_len, other.num_key_value_heads, other.head_dim)
        if mine != theirs or self.num_hidden_layers != other.num_hidden_layers:
            raise CacheError(f"copy_from: format and shape {theirs} differ from {mine}")


def _at_least_one(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CacheError(f"{name} is {value!r}, must be an int of at least 1")
    return value


def _name_of(device: str | int) -> str:
    return f"cuda:{device}" if isinstance(device, int) else device


@torch.inference_mode(False)  # as `KVPages.allocate`
def _clone_pages(pages: KVPages | None) -> KVPages | None:
    if pages is None:
        return None
    ks, vs = pages.key_scales, pages.value_scales
    return KVPages(
        pages.kind,
        pages.head_dim,
        pages.key.clone(),
        pages.value.clone(),
        None if ks is None else ks.clone(),
        None if vs is None else vs.clone(),
    )
