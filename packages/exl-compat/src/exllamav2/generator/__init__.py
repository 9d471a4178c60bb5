"""`exllamav2.generator`."""

from exl_filters import ExLlamaV2Filter, ExLlamaV2PrefixFilter, ExLlamaV2SelectFilter
from exl_generate import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2MMEmbedding,
    ExLlamaV2PostSamplingHook,
    ExLlamaV2PostSamplingResult,
    ExLlamaV2StreamingGenerator,
)
from exllamav2.generator.dynamic import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exllamav2.generator.dynamic_async import ExLlamaV2DynamicGeneratorAsync, ExLlamaV2DynamicJobAsync
from exllamav2.generator.sampler import ExLlamaV2Sampler

__all__ = [
    "ExLlamaV2BaseGenerator",
    "ExLlamaV2DynamicGenerator",
    "ExLlamaV2DynamicGeneratorAsync",
    "ExLlamaV2DynamicJob",
    "ExLlamaV2DynamicJobAsync",
    "ExLlamaV2Filter",
    "ExLlamaV2MMEmbedding",
    "ExLlamaV2PostSamplingHook",
    "ExLlamaV2PostSamplingResult",
    "ExLlamaV2PrefixFilter",
    "ExLlamaV2Sampler",
    "ExLlamaV2SelectFilter",
    "ExLlamaV2StreamingGenerator",
]
