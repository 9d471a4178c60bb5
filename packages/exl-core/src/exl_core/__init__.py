"""Load and run EXL2, GPTQ and float language models: config, architectures, cache, tokenizer (spec core.md)."""

from . import errors
from .attn_params import AttentionParams, PagedParams
from .cache import (
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Cache_TP,
    ExLlamaV2CacheBase,
)
from .config import ExLlamaV2Config
from .embeddings import ExLlamaV2MMEmbedding
from .lora import ExLlamaV2Lora
from .model import ExLlamaV2
from .modules import Intervention
from .seq_tensor import SeqTensor
from .timer import Timer
from .tokenizer import ExLlamaV2Tokenizer
from .vision import ExLlamaV2VisionTower

__all__ = [
    "AttentionParams",
    "ExLlamaV2",
    "ExLlamaV2Cache",
    "ExLlamaV2CacheBase",
    "ExLlamaV2Cache_8bit",
    "ExLlamaV2Cache_Q4",
    "ExLlamaV2Cache_Q6",
    "ExLlamaV2Cache_Q8",
    "ExLlamaV2Cache_TP",
    "ExLlamaV2Config",
    "ExLlamaV2Lora",
    "ExLlamaV2MMEmbedding",
    "ExLlamaV2Tokenizer",
    "ExLlamaV2VisionTower",
    "Intervention",
    "PagedParams",
    "SeqTensor",
    "Timer",
    "__version__",
    "errors",
]
__version__ = "0.1.0"
