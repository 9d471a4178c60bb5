"""Stand-ins for model, cache and tokenizer to test generators with; they check the provenance of K/V."""

from exl_generate.testing.driving import check_pages, drain, streamed_text, streamed_tokens
from exl_generate.testing.scripted import (
    ModelBase,
    ScriptedCache,
    ScriptedConfig,
    ScriptedEmbedding,
    ScriptedLora,
    ScriptedModel,
    ScriptedTokenizer,
)
from exl_generate.testing.small import AsAsked

__all__ = [
    "AsAsked",
    "ModelBase",
    "ScriptedCache",
    "ScriptedConfig",
    "ScriptedEmbedding",
    "ScriptedLora",
    "ScriptedModel",
    "ScriptedTokenizer",
    "check_pages",
    "drain",
    "streamed_text",
    "streamed_tokens",
]
