"""The one-request generators of exllamav2, built on the dynamic generator's engine."""

from exl_generate.static.base import ExLlamaV2BaseGenerator
from exl_generate.static.streaming import ExLlamaV2StreamingGenerator

__all__ = ["ExLlamaV2BaseGenerator", "ExLlamaV2StreamingGenerator"]
