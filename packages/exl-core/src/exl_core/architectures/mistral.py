"""Mistral: Llama with a sliding window on every layer when the file defines one."""

from ..json_reader import JsonReader
from .base import Architecture

DEFAULT_WINDOW = 4096  # what transformers' MistralConfig assumes when config.json has no `sliding_window` at all


def mistral_windows(read: JsonReader, num_layers: int) -> list[int]:
    """One window for all layers; an explicit null means full attention (spec core.md 3.6 item 4)."""
    if "sliding_window" in read.data and read.data["sliding_window"] is None:
        return [0] * num_layers
    window = read.integer("sliding_window", "sliding_window_size", default=DEFAULT_WINDOW, text=True, minimum=0)
    return [window] * num_layers


MISTRAL = Architecture(name="MistralForCausalLM", windows=mistral_windows)
