"""`exllamav2.lora`."""

from exllamav2._names import core_name

ExLlamaV2Lora = core_name("ExLlamaV2Lora")

__all__ = ["ExLlamaV2Lora"]
