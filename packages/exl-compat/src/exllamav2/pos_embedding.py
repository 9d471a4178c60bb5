"""`exllamav2.pos_embedding`."""

from exl_core.layers import PositionEmbedding
from exllamav2._names import stand_in

__all__ = ["ExLlamaV2PosEmbedding"]

ExLlamaV2PosEmbedding = stand_in("exllamav2.pos_embedding.ExLlamaV2PosEmbedding", PositionEmbedding)
