"""`exllamav2.embedding`."""

from exl_core.layers import Embedding
from exllamav2._names import stand_in

__all__ = ["ExLlamaV2Embedding"]

ExLlamaV2Embedding = stand_in("exllamav2.embedding.ExLlamaV2Embedding", Embedding)
