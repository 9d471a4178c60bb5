"""The tokenizer: text to ids and back, tables over the vocabulary, chat templates (spec core.md 11)."""

from .tokenizer import ExLlamaV2Tokenizer

__all__ = ["ExLlamaV2Tokenizer"]
