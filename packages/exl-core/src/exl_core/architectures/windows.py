"""Rules that families share: which layers have sliding windows, and which are rotated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ..errors import ConfigError
from ..json_reader import JsonReader

__all__ = ["LayerRope", "alternating_windows", "main_rope", "no_windows", "one_window"]

# The RoPE table of a layer: the main one, the second one (with its own theta), or none.
LayerRope = Literal["main", "alt", "none"]

KNOWN_TYPES = ("full_attention", "sliding_attention")


def no_windows(read: JsonReader, num_layers: int) -> list[int]:
    """Return full causal attention on every layer."""
    return [0] * num_layers


def one_window(default: int = 0) -> Callable[[JsonReader, int], list[int]]:
    """Return a rule: `sliding_window` on all layers; `default` if absent, no window if null."""

    def windows(read: JsonReader, num_layers: int) -> list[int]:
        return [read_window(read, default)] * num_layers

    return windows


def alternating_windows(default: int, pattern: int | None) -> Callable[[JsonReader, int], list[int]]:
    """Return a rule: by `layer_types`, else all but each `sliding_window_pattern`th layer slide (default `pattern`)."""

    def windows(read: JsonReader, num_layers: int) -> list[int]:
        window = read_window(read, default)
        kinds = layer_types(read, num_layers)
        if not window:
            return [0] * num_layers
        if kinds is None:
            every = _pattern(read, pattern)
            kinds = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(num_layers)]
        return [window if kind == "sliding_attention" else 0 for kind in kinds]

    return windows


def _pattern(read: JsonReader, default: int | None) -> int:
    """Return `sliding_window_pattern`, the interval of layers with full attention.

    EXAONE writes "LLLG", with L for layers that slide.
    """
    found = read.raw("sliding_window_pattern", text=True)
    if found is not None and isinstance(found[1], str) and found[1].lstrip("L") == "G":
        return len(found[1])
    every: int = read.integer("sliding_window_pattern", default=default, text=True, minimum=1)
    return every


def read_window(read: JsonReader, default: int) -> int:
    """Return `sliding_window`; an explicit null means full attention."""
    if read.explicit_null("sliding_window", text=True):
        return 0
    window: int = read.integer("sliding_window", "sliding_window_size", default=default, text=True, minimum=0)
    return window


def layer_types(read: JsonReader, num_layers: int) -> list[str] | None:
    """Return `layer_types` of config.json, checked, or None. Raises ConfigError."""
    kinds = read.listing("layer_types", default=None, text=True)
    if kinds is None:
        return None
    if len(kinds) != num_layers:
        raise ConfigError(f"{read.file}: layer_types has {len(kinds)} entries for {num_layers} layers")
    for kind in kinds:
        if kind not in KNOWN_TYPES:
            raise ConfigError(f"{read.file}: layer_types holds {kind!r}; expected one of {', '.join(KNOWN_TYPES)}")
    return [str(kind) for kind in kinds]


def main_rope(read: JsonReader, windows: list[int]) -> list[LayerRope]:
    """Rotate every layer by the main table."""
    return ["main"] * len(windows)
