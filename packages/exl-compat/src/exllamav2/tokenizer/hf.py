"""`exllamav2.tokenizer.hf`: the back end that reads tokenizer.json."""

from exl_core.tokenizer.backend import TokenizerBackend
from exllamav2._names import stand_in
from exllamav2.tokenizer.base import ExLlamaV2TokenizerBase

__all__ = ["ExLlamaV2TokenizerBase", "ExLlamaV2TokenizerHF"]

ExLlamaV2TokenizerHF = stand_in("exllamav2.tokenizer.hf.ExLlamaV2TokenizerHF", TokenizerBackend)
