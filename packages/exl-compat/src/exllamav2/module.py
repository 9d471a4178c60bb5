"""`exllamav2.module`."""

from exl_core import Intervention
from exl_core.layers import Linear, Module
from exllamav2._names import stand_in

__all__ = ["ExLlamaV2Module", "Intervention"]

ExLlamaV2Module = stand_in("exllamav2.module.ExLlamaV2Module", Module, Linear)
