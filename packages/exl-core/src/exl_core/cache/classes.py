"""The storage formats of the cache (spec formats.md 5.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch

from ..errors import CacheError
from .base import ExLlamaV2CacheBase

if TYPE_CHECKING:
    from ..model import ExLlamaV2

__all__ = [
    "ExLlamaV2Cache",
    "ExLlamaV2Cache_8bit",
    "ExLlamaV2Cache_Q4",
    "ExLlamaV2Cache_Q6",
    "ExLlamaV2Cache_Q8",
    "ExLlamaV2Cache_TP",
]


class ExLlamaV2Cache(ExLlamaV2CacheBase):
    """Half precision, 2 bytes an element."""

    kind = "fp16"
    dtype = torch.half


class ExLlamaV2Cache_8bit(ExLlamaV2CacheBase):
    """FP8 E5M2, 1 byte an element. Q8 is about as small and far more exact."""

    kind = "fp8"


class ExLlamaV2Cache_Q4(ExLlamaV2CacheBase):
    """4-bit codes after a Hadamard transform, 0.5625 bytes an element."""

    kind = "q4"
    wbits = 4
    weights_per_element_k = 2
    weights_per_element_v = 2
    has_scales = True


class ExLlamaV2Cache_Q6(ExLlamaV2CacheBase):
    """8-bit keys and 4-bit values, 0.8125 bytes an element; the name is the original's."""

    kind = "q6"
    wbits = 6
    weights_per_element_v = 2
    has_scales = True


class ExLlamaV2Cache_Q8(ExLlamaV2CacheBase):
    """8-bit codes after a Hadamard transform, 1.0625 bytes an element."""

    kind = "q8"
    wbits = 8
    has_scales = True


class ExLlamaV2Cache_TP(ExLlamaV2CacheBase):
    """The cache of a model loaded with `load_tp`: storage of class `base`, each layer's beside the layer.

    The original cuts heads over the devices and keeps one cache of each (`caches`); here layers are not cut, so this is
    a cache of `base` in all but name, and `caches` holds itself alone.
    """

    kind = "fp16"

    def __init__(
        self,
        model: ExLlamaV2,
        base: type[ExLlamaV2CacheBase] = ExLlamaV2Cache,
        batch_size: int = 1,
        max_seq_len: int = -1,
        *,
        copy_from: ExLlamaV2CacheBase | None = None,
    ) -> None:
        if not (isinstance(base, type) and issubclass(base, ExLlamaV2CacheBase)) or base is ExLlamaV2Cache_TP:
            raise CacheError(f"base is {base!r}, must be one of the other cache classes")
        self.base = base
        for name in ("kind", "wbits", "weights_per_element_k", "weights_per_element_v", "dtype", "has_scales"):
            setattr(self, name, getattr(base, name))
        super().__init__(model, batch_size, max_seq_len, copy_from=copy_from)

    @property
    def caches(self) -> list[ExLlamaV2CacheBase]:
        """The caches that this one is made of: itself."""
        return [self]

    def clone(self) -> Self:
        return type(self)(self.model, self.base, self.batch_size, self.max_seq_len, copy_from=self)
