"""Llava with a Pixtral tower, and Mistral 3: a Mistral or Llama language model under a prefix."""

from dataclasses import replace

from ..json_reader import JsonReader
from .base import Vision
from .mistral import MISTRAL, MISTRAL_WINDOWS


def windows(read: JsonReader, num_layers: int) -> list[int]:
    """Return Mistral's windows if the text part is a Mistral; Llama has no windows."""
    if read.string("text_config->model_type", default="llama") == "mistral":
        return MISTRAL_WINDOWS(read, num_layers)
    return [0] * num_layers


def kv_heads(read: JsonReader) -> int | None:
    """Return the file's number; default: Mistral's default, or as many as heads for Llama."""
    mistral = read.string("text_config->model_type", default="llama") == "mistral"
    said = read.integer("num_key_value_heads", default=8 if mistral else None, text=True, minimum=1, maximum=1 << 22)
    return None if said is None else int(said)


LLAVA = replace(
    MISTRAL,
    name="LlavaForConditionalGeneration",
    # transformers' defaults for an inner Mistral: nested configurations are saved without default values.
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
    },
    windows=windows,
    text_model_types=("mistral", "llama"),
    keymap=(
        ("$language_model.", ""),
        ("$model.language_model.", "model."),
        ("$model.vision_tower.", "vision_tower."),
        ("$model.multi_modal_projector.", "multi_modal_projector."),
    ),
    vision=Vision("Pixtral", "pixtral", "pixtral"),
    kv_heads=kv_heads,
)

MISTRAL3 = replace(
    LLAVA,
    name="Mistral3ForConditionalGeneration",
    text_model_types=("mistral",),
    tied_head=True,
    vision=Vision("Mistral 3", "pixtral", "pixtral", merges=True),
)
