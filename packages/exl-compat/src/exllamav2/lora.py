"""`exllamav2.lora`."""

from exl_core import ExLlamaV2Lora

__all__ = ["ExLlamaV2Lora"]
