"""`exllamav2.model`."""

from exl_core import ExLlamaV2

__all__ = ["ExLlamaV2"]
