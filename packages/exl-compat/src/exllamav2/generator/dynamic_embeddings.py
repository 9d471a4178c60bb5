"""`exllamav2.generator.dynamic_embeddings`."""

from exl_core.embeddings import EMBEDDING_INDEX
from exl_generate import ExLlamaV2MMEmbedding

__all__ = ["EMBEDDING_INDEX", "ExLlamaV2MMEmbedding"]
