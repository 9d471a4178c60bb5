"""`exllamav2.generator.filters.base`."""

from exl_filters import ExLlamaV2Filter

__all__ = ["ExLlamaV2Filter"]
