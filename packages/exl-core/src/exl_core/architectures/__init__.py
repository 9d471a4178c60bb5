"""The table of model families. A new family is one small file in this package and one line in `SUPPORTED`."""

from __future__ import annotations

from ..errors import UnsupportedArchitectureError
from .base import Architecture, Experts, FusedTensor
from .cohere import COHERE, COHERE2
from .dbrx import DBRX
from .gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_MULTIMODAL, GEMMOE
from .glm import GLM, GLM4
from .gpt2 import GPT2, GPT_BIGCODE
from .granite import GRANITE, GRANITE_MOE, MINICPM
from .internlm2 import INTERNLM2
from .llama import INDEX, LLAMA, YI
from .mistral import MISTRAL, MIXTRAL
from .olmo2 import OLMO2, OLMO3, OLMOE
from .orion import ORION
from .others import ARCEE, ERNIE4_5, EXAONE4, HELIUM, SEED_OSS
from .phi import PHI, PHI3, PHI_MOE, PHIMOE
from .pixtral import LLAVA, MISTRAL3
from .qwen import QWEN2, QWEN2_5_VL, QWEN2_MOE, QWEN2_VL, QWEN3, QWEN3_MOE
from .smollm3 import SMOLLM3
from .stablelm import STABLELM
from .starcoder2 import STARCODER2

__all__ = ["Architecture", "Experts", "FusedTensor", "find_architecture", "supported_architectures"]

SUPPORTED: dict[str, Architecture] = {
    a.name: a
    for a in (
        *(LLAMA, YI, INDEX, MISTRAL, MIXTRAL),
        *(QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN2_VL, QWEN2_5_VL),
        *(GEMMA, GEMMOE, GEMMA2, GEMMA3, GEMMA3_MULTIMODAL),
        *(COHERE, COHERE2, PHI, PHI3, PHI_MOE, PHIMOE, GLM, GLM4, GPT2, GPT_BIGCODE, STARCODER2, DBRX),
        *(INTERNLM2, GRANITE, GRANITE_MOE, MINICPM, SMOLLM3, OLMO2, OLMO3, OLMOE, ORION),
        *(SEED_OSS, ERNIE4_5, ARCEE, EXAONE4, HELIUM, STABLELM, LLAVA, MISTRAL3),
    )
}

# Families that differ from Llama and are not supported. They are rejected even where the caller asks for another
# family's code, so that nobody runs them silently wrong.
KNOWN_TO_DIFFER = frozenset(
    {
        "ChatGLMModel",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "FalconForCausalLM",
        "Gemma3nForConditionalGeneration",
        "GptOssForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "Llama4ForConditionalGeneration",
        "MiniCPM3ForCausalLM",
        "NemotronForCausalLM",
        "OlmoForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3VLForConditionalGeneration",
    }
)


def supported_architectures() -> list[str]:
    """Return every string accepted in `architectures[0]` of config.json, sorted."""
    return sorted(SUPPORTED)


def find_architecture(name: str, override: str | None = None) -> Architecture:
    """Return the family called `name`, or the family called `override` where `name` is unknown.

    Args:
        name: `architectures[0]` of config.json.
        override: the caller's `allow_unknown_architecture`, or None.

    Raises:
        UnsupportedArchitectureError: the family is not supported. A model is never loaded as another family than its
            files or the caller name.
    """
    if name in SUPPORTED:
        return SUPPORTED[name]
    known = ", ".join(supported_architectures())
    if override is None:
        state = "not supported" if name in KNOWN_TO_DIFFER else "unknown"
        raise UnsupportedArchitectureError(
            f"architecture {name} is {state}. Supported: {known}. If the model is the same as one of these under "
            'another name, set config.allow_unknown_architecture = "<supported name>" before prepare().'
        )
    if name in KNOWN_TO_DIFFER:
        raise UnsupportedArchitectureError(
            f"architecture {name} is known to differ from {override}, so allow_unknown_architecture does not apply. "
            f"Supported: {known}."
        )
    if override not in SUPPORTED:
        raise UnsupportedArchitectureError(f"allow_unknown_architecture is {override!r}, must be one of: {known}")
    return SUPPORTED[override]
