"""`exllamav2.generator.filters.prefix`."""

from exl_filters import ExLlamaV2PrefixFilter

__all__ = ["ExLlamaV2PrefixFilter"]
