"""The settings of a Pixtral tower in config.json and preprocessor_config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, UnsupportedError
from ..json_reader import JsonReader
from .reading import (
    CLIP_MEAN,
    CLIP_STD,
    MAX_EDGE,
    MAX_LAYERS,
    Preprocessing,
    activation,
    head_dim,
    preprocessing,
    processor_file,
    read_config,
    rope_theta,
)

__all__ = ["PixtralSettings", "read_settings"]

PROCESSORS = ("PixtralImageProcessor", "PixtralImageProcessorFast", "PixtralImageProcessorPil")
SUPPORTED_ACTIVATIONS = ("gelu", "silu")


@dataclass(frozen=True)
class PixtralSettings:
    """Sizes of the tower and its projector."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    patch_size: int
    merge_size: int  # patches of a side that become one row of the output
    rope_theta: float
    activation: str  # "gelu" or "silu"
    projector_activation: str
    projector_bias: bool
    projector_norm: bool  # Mistral 3: norm and patch merger before the projector
    norm_eps: float  # of the projector's norm
    layers_used: int  # number of layers that run: the projector reads their output
    longest_edge: int  # pixels of a resized image's longer side
    preprocessing: Preprocessing


def read_settings(folder: Path, architecture: str, norm_eps: float, *, merges: bool) -> PixtralSettings:
    """Read the settings of a folder's tower.

    Args:
        folder: the model's.
        architecture: the model's, for error messages.
        norm_eps: of the projector's norm.
        merges: whether the projector norms features and merges patches before its matrices, with the defaults of
            Mistral 3. Else it is Llava's.

    Raises:
        ConfigError: a file is invalid.
        UnsupportedError: the tower or an option is not supported.
    """
    read, vision = read_config(folder)
    kind = vision.string("model_type", default=None)
    if kind != "pixtral":
        raise UnsupportedError(
            f"{read.file}: a vision tower of type {kind!r} is not supported for {architecture}; supported: pixtral"
        )
    layers = vision.integer("num_hidden_layers", default=24, minimum=1, maximum=MAX_LAYERS)
    if read.string("vision_feature_select_strategy", default="full" if merges else "default") != "full":
        raise UnsupportedError(
            f"{read.file}: vision_feature_select_strategy other than full: Pixtral has no class token"
        )
    heads = vision.integer("num_attention_heads", default=16, minimum=1)
    hidden = vision.integer("hidden_size", default=1024, minimum=4)
    images = processor_file(folder, PROCESSORS)
    assert images is not None
    return PixtralSettings(
        hidden_size=hidden,
        intermediate_size=vision.integer("intermediate_size", default=4096, minimum=1),
        num_layers=layers,
        num_heads=heads,
        head_dim=head_dim(vision, hidden, heads, multiple=4),
        patch_size=vision.integer("patch_size", default=16, minimum=1, maximum=1024),
        merge_size=read.integer("spatial_merge_size", default=2 if merges else 1, minimum=1, maximum=64),
        rope_theta=rope_theta(vision),
        activation=activation(vision, "hidden_act", "gelu", SUPPORTED_ACTIVATIONS),
        projector_activation=activation(read, "projector_hidden_act", "gelu", SUPPORTED_ACTIVATIONS),
        projector_bias=read.boolean("multimodal_projector_bias", default=not merges),
        projector_norm=merges,
        norm_eps=norm_eps,
        layers_used=_layers_used(read, layers, default=-1 if merges else -2),
        longest_edge=images.integer("size->longest_edge", default=1024, minimum=1, maximum=MAX_EDGE),
        preprocessing=preprocessing(images, CLIP_MEAN, CLIP_STD),
    )


def _layers_used(read: JsonReader, layers: int, default: int) -> int:
    """Return the number of layers; `vision_feature_layer` counts the embedding as 0, or from the end as -1."""
    index = read.integer("vision_feature_layer", default=default)
    used = index if index >= 0 else layers + 1 + index
    if not 0 <= used <= layers:
        raise ConfigError(f"{read.file}: vision_feature_layer is {index}, the tower has {layers} layers")
    return int(used)
