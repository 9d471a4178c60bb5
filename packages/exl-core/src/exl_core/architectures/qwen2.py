"""Qwen2 and Qwen2.5: Llama with biases on q, k, v; a window on the upper layers if `use_sliding_window` is set."""

from ..errors import ConfigError
from ..json_reader import JsonReader
from .base import Architecture

# What transformers' Qwen2Config assumes for keys that config.json leaves out.
DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28


def qwen2_windows(read: JsonReader, num_layers: int) -> list[int]:
    """transformers' rule: if switched on, `layer_types` decides, else layers from `max_window_layers` on slide."""
    if not read.boolean("use_sliding_window", default=False, text=True):
        return [0] * num_layers
    window = read.integer("sliding_window", "sliding_window_size", default=DEFAULT_WINDOW, text=True, minimum=0)
    layer_types = read.listing("layer_types", default=None, text=True)
    if layer_types is None:
        first = read.integer("max_window_layers", default=DEFAULT_MAX_WINDOW_LAYERS, text=True, minimum=0)
        return [window if i >= first else 0 for i in range(num_layers)]
    if len(layer_types) != num_layers:
        raise ConfigError(f"{read.file}: layer_types has {len(layer_types)} entries for {num_layers} layers")
    return [window if kind == "sliding_attention" else 0 for kind in layer_types]


QWEN2 = Architecture(name="Qwen2ForCausalLM", qkv_bias=True, windows=qwen2_windows)
