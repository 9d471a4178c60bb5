"""The tokenizer: text to ids and back, tables over the vocabulary, chat templates.

`TextTokenizer` needs no torch; `ExLlamaV2Tokenizer` is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .text import TextTokenizer

if TYPE_CHECKING:
    from .tokenizer import ExLlamaV2Tokenizer

__all__ = ["ExLlamaV2Tokenizer", "TextTokenizer"]


def __getattr__(name: str) -> Any:
    if name != "ExLlamaV2Tokenizer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .tokenizer import ExLlamaV2Tokenizer

    return ExLlamaV2Tokenizer
