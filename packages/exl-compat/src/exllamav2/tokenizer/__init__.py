"""`exllamav2.tokenizer`."""

from exl_core import ExLlamaV2Tokenizer
from exllamav2.tokenizer.base import ExLlamaV2TokenizerBase
from exllamav2.tokenizer.hf import ExLlamaV2TokenizerHF

__all__ = ["ExLlamaV2Tokenizer", "ExLlamaV2TokenizerBase", "ExLlamaV2TokenizerHF"]
