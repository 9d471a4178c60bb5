"""`exllamav2.tokenizer.tokenizer`."""

from exl_core import ExLlamaV2Tokenizer

__all__ = ["ExLlamaV2Tokenizer"]
