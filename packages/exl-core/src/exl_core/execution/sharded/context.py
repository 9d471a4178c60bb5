"""The devices that share the matrices of a model, and the share of each: `model.tp_context`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl_kernels.kv import KVPages

from ...device import torch_device
from ...errors import CacheError
from ...placement import Placement
from ...transfer import send
from .exchange import Exchange, LocalExchange
from .shares import Bounds, Shares

if TYPE_CHECKING:
    from ...contracts import PagedCache
    from ..batch import Step

__all__ = ["TensorParallel"]


class TensorParallel:
    """Devices by name. One of this process' devices is the home: it holds hidden states, norms, embedding and routers.

    Attributes:
        names: names of all devices.
        shares: share of each device.
        exchange: brings results to the home device.
        heads: key/value heads of each device that has any.
        local_heads: the same, of this process' devices.
        home: torch's device of hidden states.
    """

    def __init__(
        self,
        names: Sequence[str],
        shares: Shares,
        kv_heads: int,
        *,
        float_residual: bool = False,
        exchange: Exchange | None = None,
    ) -> None:
        self.names = list(names)
        self.shares = shares
        self.exchange = LocalExchange(len(self.names)) if exchange is None else exchange
        self.heads: Bounds = shares.kv_heads(kv_heads)
        self.local_heads: Bounds = tuple(bounds for bounds in self.heads if self.is_local(bounds[0]))
        self.home = torch_device(self.names[self.exchange.home])
        self._placement = Placement(self.names, float_residual)

    @property
    def local_names(self) -> list[str]:
        """Names of this process' devices."""
        return [name for shard, name in enumerate(self.names) if self.is_local(shard)]

    def is_local(self, shard: int) -> bool:
        """Return whether this process computes for a device."""
        return shard in self.exchange.local

    def device(self, shard: int) -> torch.device:
        """Return torch's device of a shard."""
        return torch_device(self.names[shard])

    def spread(self, x: Tensor) -> Callable[[int], Tensor]:
        """Return a function shard -> x on its device; x is sent once."""
        sent: dict[torch.device, Tensor] = {x.device: x}

        def there(shard: int) -> Tensor:
            device = self.device(shard)
            if device not in sent:
                sent[device] = send(x, device)
            return sent[device]

        return there

    def step_on(self, step: Step, shard: int) -> Step:
        """Return the step with its tensors on the shard's device; cached for all layers."""
        device = self.device(shard)
        if device == step.rows.device:
            return step  # not stored in itself: the cycle would keep its cache alive until a garbage collection
        if device not in step.elsewhere:
            step.elsewhere[device] = self._placement.step_on(step, device)
        return step.elsewhere[device]

    def shards_of(self, step: Step, pages: Sequence[Callable[[int], KVPages]]) -> tuple[Step, ...]:
        """Return the step on each device of `local_heads`, with the pages of those heads."""
        shards = [self.step_on(step, shard) for shard, _, _ in self.local_heads]
        return tuple(replace(there, pages=own) for there, own in zip(shards, pages, strict=True))

    # ---------------------------------------------------------------------------------------------------------- pages

    def pages(
        self, cache: PagedCache | None, page_size: int, scratch: tuple[int, int]
    ) -> tuple[Callable[[int], KVPages], ...]:
        """Return, for every entry of `local_heads`, a function layer -> pages of those heads.

        Without a cache one scratch layer of `scratch` = (pages, head_dim) serves all layers. Raises CacheError unless
        the cache was made for this model with these shards.
        """
        if cache is None:
            count, head_dim = scratch
            made = [
                KVPages.allocate("fp16", count, page_size, end - begin, head_dim, self.device(shard))
                for shard, begin, end in self.local_heads
            ]
            return tuple(_always(pages) for pages in made)
        caches = cache.shards()
        wanted = [(self.device(shard), end - begin) for shard, begin, end in self.local_heads]
        if [(c.device_of(0), c.num_key_value_heads) for c in caches] != wanted:
            raise CacheError(
                f"the matrices of this model are sharded over {', '.join(self.names)}: it needs an ExLlamaV2Cache_TP "
                "made after load_tp, its base any other cache class"
            )
        return tuple(_paged(c, page_size) for c in caches)


def _always(pages: KVPages) -> Callable[[int], KVPages]:
    return lambda layer: pages


def _paged(cache: PagedCache, page_size: int) -> Callable[[int], KVPages]:
    return lambda layer: cache.pages(layer, page_size)
