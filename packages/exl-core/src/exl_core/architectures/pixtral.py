"""Llava with a Pixtral tower, and Mistral 3: a Mistral or Llama language model under a prefix."""

from dataclasses import replace

from ..json_reader import JsonReader
from .mistral import MISTRAL, MISTRAL_WINDOWS


def windows(read: JsonReader, num_layers: int) -> list[int]:
    """Mistral's rule if the text part is a Mistral; Llama has no windows."""
    if read.string("text_config->model_type", default="llama") == "mistral":
        return MISTRAL_WINDOWS(read, num_layers)
    return [0] * num_layers


LLAVA = replace(
    MISTRAL,
    name="LlavaForConditionalGeneration",
    defaults={"rms_norm_eps": 1e-5},
    windows=windows,
    text_model_types=("mistral", "llama"),
    keymap=(
        ("$language_model.", ""),
        ("$model.language_model.", "model."),
        ("$model.vision_tower.", "vision_tower."),
        ("$model.multi_modal_projector.", "multi_modal_projector."),
    ),
    vision="Pixtral",
)

MISTRAL3 = replace(LLAVA, name="Mistral3ForConditionalGeneration", text_model_types=("mistral",))
