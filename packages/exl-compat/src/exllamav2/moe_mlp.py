"""`exllamav2.moe_mlp`."""

from exl_core.layers import MoE
from exllamav2._names import stand_in

__all__ = ["ExLlamaV2MoEMLP"]

ExLlamaV2MoEMLP = stand_in("exllamav2.moe_mlp.ExLlamaV2MoEMLP", MoE)
