"""`exllamav2.generator.streaming`."""

from exl_filters import ExLlamaV2Filter
from exl_generate import ExLlamaV2BaseGenerator, ExLlamaV2StreamingGenerator
from exllamav2.generator.sampler import ExLlamaV2Sampler

__all__ = ["ExLlamaV2BaseGenerator", "ExLlamaV2Filter", "ExLlamaV2Sampler", "ExLlamaV2StreamingGenerator"]
