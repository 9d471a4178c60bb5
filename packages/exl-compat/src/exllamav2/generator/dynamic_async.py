"""`exllamav2.generator.dynamic_async`."""

from exl_generate import ExLlamaV2DynamicGeneratorAsync, ExLlamaV2DynamicJobAsync

__all__ = ["ExLlamaV2DynamicGeneratorAsync", "ExLlamaV2DynamicJobAsync"]
