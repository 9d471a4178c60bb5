"""Load and run EXL2, GPTQ and float language models: config, architectures, cache, tokenizer.

Names are imported on first use: a process that only tokenizes text (`exl_core.tokenizer.TextTokenizer`) never imports
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors
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
    from .execution.attn_params import AttentionParams, PagedParams
    from .execution.sharded.processes import ProcessExchange
    from .layers import Intervention
    from .lora import ExLlamaV2Lora
    from .model import ExLlamaV2
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
    "ProcessExchange",
    "SeqTensor",
    "Timer",
    "__version__",
    "errors",
]
__version__ = "0.1.0"

_HOME = {
    "AttentionParams": "execution.attn_params",
    "ExLlamaV2": "model",
    "ExLlamaV2Cache": "cache",
    "ExLlamaV2CacheBase": "cache",
    "ExLlamaV2Cache_8bit": "cache",
    "ExLlamaV2Cache_Q4": "cache",
    "ExLlamaV2Cache_Q6": "cache",
    "ExLlamaV2Cache_Q8": "cache",
    "ExLlamaV2Cache_TP": "cache",
    "ExLlamaV2Config": "config",
    "ExLlamaV2Lora": "lora",
    "ExLlamaV2MMEmbedding": "embeddings",
    "ExLlamaV2Tokenizer": "tokenizer",
    "ExLlamaV2VisionTower": "vision",
    "Intervention": "layers",
    "PagedParams": "execution.attn_params",
    "ProcessExchange": "execution.sharded.processes",
    "SeqTensor": "seq_tensor",
    "Timer": "timer",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module(f"{__name__}.errors")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
