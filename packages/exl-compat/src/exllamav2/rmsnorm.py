"""`exllamav2.rmsnorm`."""

from exl_core.layers import RMSNorm
from exllamav2._names import stand_in

__all__ = ["ExLlamaV2RMSNorm"]

ExLlamaV2RMSNorm = stand_in("exllamav2.rmsnorm.ExLlamaV2RMSNorm", RMSNorm)
