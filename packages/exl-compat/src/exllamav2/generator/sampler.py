"""`exllamav2.generator.sampler`."""

from exl_filters import ExLlamaV2Filter
from exl_generate import ExLlamaV2Sampler

__all__ = ["ExLlamaV2Filter", "ExLlamaV2Sampler"]
