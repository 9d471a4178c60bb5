"""The storage formats of the cache."""

from __future__ import annotations

import torch

from .base import ExLlamaV2CacheBase

__all__ = [
    "ExLlamaV2Cache",
    "ExLlamaV2Cache_8bit",
    "ExLlamaV2Cache_Q4",
    "ExLlamaV2Cache_Q6",
    "ExLlamaV2Cache_Q8",
]


class ExLlamaV2Cache(ExLlamaV2CacheBase):
    """Half precision, 2 bytes an element."""

    kind = "fp16"
    dtype = torch.half


class ExLlamaV2Cache_8bit(ExLlamaV2CacheBase):
    """FP8 E5M2, 1 byte an element. Q8 is nearly as small and far more exact."""

    kind = "fp8"


class ExLlamaV2Cache_Q4(ExLlamaV2CacheBase):
    """4-bit codes after a Hadamard transform, 0.5625 bytes an element."""

    kind = "q4"
    wbits = 4
    weights_per_element_k = 2
    weights_per_element_v = 2
    has_scales = True


class ExLlamaV2Cache_Q6(ExLlamaV2CacheBase):
    """8-bit keys and 4-bit values, 0.8125 bytes an element; exllamav2 calls this format Q6."""

    kind = "q6"
    wbits = 6
    weights_per_element_v = 2
    has_scales = True


class ExLlamaV2Cache_Q8(ExLlamaV2CacheBase):
    """8-bit codes after a Hadamard transform, 1.0625 bytes an element."""

    kind = "q8"
    wbits = 8
    has_scales = True
