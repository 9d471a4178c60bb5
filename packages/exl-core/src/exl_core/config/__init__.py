"""Model configuration: config.json and the other JSON files of a model folder.

`ExLlamaV2Config` is imported on first use, because the tokenizer reads JSON files without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import CPU_MATMUL_MODES, ExLlamaV2Config

__all__ = ["CPU_MATMUL_MODES", "ExLlamaV2Config"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.config"), name)
