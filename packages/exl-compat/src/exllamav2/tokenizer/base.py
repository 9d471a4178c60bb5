"""`exllamav2.tokenizer.base`: the back ends of a tokenizer."""

from exl_core.tokenizer.backend import TokenizerBackend
from exl_core.tokenizer.sentencepiece_backend import SentencePieceBackend
from exllamav2._names import stand_in

__all__ = ["ExLlamaV2TokenizerBase"]

ExLlamaV2TokenizerBase = stand_in(
    "exllamav2.tokenizer.base.ExLlamaV2TokenizerBase", TokenizerBackend, SentencePieceBackend
)
