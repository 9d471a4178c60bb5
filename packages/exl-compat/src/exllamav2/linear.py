"""`exllamav2.linear`."""

from exl_core.layers import Linear
from exllamav2._names import stand_in

__all__ = ["ExLlamaV2Linear"]

ExLlamaV2Linear = stand_in("exllamav2.linear.ExLlamaV2Linear", Linear)
