"""SmolLM3: Llama with every fourth layer without positions."""

from ..errors import ConfigError
from ..json_reader import JsonReader
from .base import Architecture
from .windows import LayerRope, layer_types, read_window

DEFAULT_INTERVAL = 4


def smollm3_windows(read: JsonReader, num_layers: int) -> list[int]:
    """Return the windows by `layer_types`; default: with `use_sliding_window` layers without positions."""
    window = read_window(read, 0)
    kinds = layer_types(read, num_layers)
    if kinds is not None:
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    if not read.boolean("use_sliding_window", default=False):
        return [0] * num_layers
    return [0 if rope == "main" else window for rope in smollm3_rope(read, [0] * num_layers)]


def smollm3_rope(read: JsonReader, windows: list[int]) -> list[LayerRope]:
    """Return the layers with positions: 1 in `no_rope_layers`; else all but each `no_rope_layer_interval`th."""
    flags = read.listing("no_rope_layers", default=None)
    if flags is None:
        interval = read.integer("no_rope_layer_interval", default=DEFAULT_INTERVAL, minimum=1)
        flags = [int((i + 1) % interval != 0) for i in range(len(windows))]
    if len(flags) != len(windows):
        raise ConfigError(f"{read.file}: no_rope_layers has {len(flags)} entries for {len(windows)} layers")
    return ["main" if flag else "none" for flag in flags]


SMOLLM3 = Architecture(
    name="SmolLM3ForCausalLM",
    tied_head=True,
    rope_theta=2_000_000.0,
    windows=smollm3_windows,
    layer_rope=smollm3_rope,
)
