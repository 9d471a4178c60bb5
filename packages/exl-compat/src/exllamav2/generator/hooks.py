"""`exllamav2.generator.hooks`."""

from exl_generate import ExLlamaV2PostSamplingHook, ExLlamaV2PostSamplingResult

__all__ = ["ExLlamaV2PostSamplingHook", "ExLlamaV2PostSamplingResult"]
