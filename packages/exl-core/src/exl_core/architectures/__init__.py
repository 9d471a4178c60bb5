"""The table of model families. A new family is one small file here and one line in `SUPPORTED`."""

from __future__ import annotations

from ..errors import UnsupportedArchitectureError
from .base import Architecture, FusedLinear
from .llama import LLAMA
from .mistral import MISTRAL
from .qwen2 import QWEN2

__all__ = ["Architecture", "FusedLinear", "find_architecture", "supported_architectures"]

SUPPORTED: dict[str, Architecture] = {a.name: a for a in (LLAMA, MISTRAL, QWEN2)}

# Families of the spec's table that differ from Llama and have no file here yet: refused by name, so that nobody
# wonders whether the name was misspelt.
PLANNED = frozenset(
    {
        "CohereForCausalLM",
        "Cohere2ForCausalLM",
        "DbrxForCausalLM",
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "GemmaForCausalLM",
        "GemmoeForCausalLM",
        "Glm4ForCausalLM",
        "GraniteForCausalLM",
        "IndexForCausalLM",
        "InternLM2ForCausalLM",
        "LlavaForConditionalGeneration",
        "MiniCPMForCausalLM",
        "Mistral3ForConditionalGeneration",
        "MixtralForCausalLM",
        "OrionForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Starcoder2ForCausalLM",
        "YiForCausalLM",
    }
)


def supported_architectures() -> list[str]:
    """Every string accepted in `architectures[0]` of config.json, sorted."""
    return sorted(SUPPORTED)


def find_architecture(name: str, override: str | None = None) -> Architecture:
    """The family called `name`, or, where that is unknown and the caller insists, the one called `override`.

    Raises UnsupportedArchitectureError otherwise: a model is never loaded as something that it does not say it is.
    """
    if name in SUPPORTED:
        return SUPPORTED[name]
    known = ", ".join(supported_architectures())
    if override is None:
        state = "not built in this version" if name in PLANNED else "unknown"
        raise UnsupportedArchitectureError(
            f"architecture {name} is {state}. Supported: {known}. If the model is the same as one of these under "
            'another name, set config.allow_unknown_architecture = "<supported name>" before prepare().'
        )
    if name in PLANNED:
        raise UnsupportedArchitectureError(
            f"architecture {name} is known to differ from {override}, so allow_unknown_architecture does not apply. "
            f"Supported: {known}."
        )
    if override not in SUPPORTED:
        raise UnsupportedArchitectureError(f"allow_unknown_architecture is {override!r}, must be one of: {known}")
    return SUPPORTED[override]
