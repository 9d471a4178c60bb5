"""`exllamav2.generator.filters`."""

from exl_filters import ExLlamaV2Filter, ExLlamaV2PrefixFilter, ExLlamaV2SelectFilter

__all__ = ["ExLlamaV2Filter", "ExLlamaV2PrefixFilter", "ExLlamaV2SelectFilter"]
