"""`exllamav2.layernorm`."""

from exl_core.layers import LayerNorm
from exllamav2._names import stand_in

__all__ = ["ExLlamaV2LayerNorm"]

ExLlamaV2LayerNorm = stand_in("exllamav2.layernorm.ExLlamaV2LayerNorm", LayerNorm)
