"""`exllamav2.generator.filters.select`."""

from exl_filters import ExLlamaV2SelectFilter

__all__ = ["ExLlamaV2SelectFilter"]
