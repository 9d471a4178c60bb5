"""`exllamav2.tokenizer.spm`: the back end that reads tokenizer.model (extra `sentencepiece` of exl-core)."""

from exl_core.tokenizer.sentencepiece_backend import SentencePieceBackend
from exllamav2._names import stand_in
from exllamav2.tokenizer.base import ExLlamaV2TokenizerBase

__all__ = ["ExLlamaV2TokenizerBase", "ExLlamaV2TokenizerSPM"]

ExLlamaV2TokenizerSPM = stand_in("exllamav2.tokenizer.spm.ExLlamaV2TokenizerSPM", SentencePieceBackend)
