"""`exllamav2.mlp`."""

from exl_core.layers import GatedMLP, PlainMLP
from exllamav2._names import stand_in

__all__ = ["ExLlamaV2MLP"]

ExLlamaV2MLP = stand_in("exllamav2.mlp.ExLlamaV2MLP", GatedMLP, PlainMLP)
