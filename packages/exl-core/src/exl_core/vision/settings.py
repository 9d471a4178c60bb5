"""What config.json and preprocessor_config.json say about a Pixtral tower (spec core.md 12.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ConfigTypeError, UnsupportedError
from ..json_reader import JsonReader, read_json_file

__all__ = ["PixtralSettings", "Preprocessing", "read_settings"]

MAX_EDGE = 16384  # pixels: spec core.md 12.2
PROCESSORS = ("PixtralImageProcessor", "PixtralImageProcessorFast", "PixtralImageProcessorPil")
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Preprocessing:
    """From an image to the tower's input. `resample` is PIL's number of the filter."""

    longest_edge: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float
    resample: int


@dataclass(frozen=True)
class PixtralSettings:
    """Sizes of the tower and its projector."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    merge_size: int  # patches of a side that become one row of the output
    rope_theta: float
    activation: str  # "gelu" or "silu"
    projector_activation: str
    projector_bias: bool
    projector_norm: bool  # Mistral 3: norm and patch merger before the projector
    norm_eps: float  # of the projector's norm
    layers_used: int  # how many layers run: the projector reads their output
    preprocessing: Preprocessing

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def read_settings(folder: Path, architecture: str, norm_eps: float) -> PixtralSettings:
    """Raises ConfigError and its kin, UnsupportedError for towers and switches without code here."""
    file = folder / "config.json"
    read = JsonReader(read_json_file(file), file)
    vision = read.section("vision_config")
    kind = None if vision is None else vision.string("model_type", default=None)
    if vision is None or kind != "pixtral":
        raise UnsupportedError(f"{file}: a vision tower of type {kind!r} is not built in this version; built: pixtral")
    mistral3 = architecture == "Mistral3ForConditionalGeneration"
    rope = vision.section("rope_parameters")
    layers = vision.integer("num_hidden_layers", default=24, minimum=1, maximum=4096)
    if read.string("vision_feature_select_strategy", default="full" if mistral3 else "default") != "full":
        raise UnsupportedError(f"{file}: vision_feature_select_strategy other than full: Pixtral has no class token")
    heads = vision.integer("num_attention_heads", default=16, minimum=1)
    hidden = vision.integer("hidden_size", default=1024, minimum=4)
    if hidden % heads or hidden // heads % 4:
        raise ConfigError(f"{file}: vision hidden_size {hidden} does not make {heads} heads of a multiple of 4")
    return PixtralSettings(
        hidden_size=hidden,
        intermediate_size=vision.integer("intermediate_size", default=4096, minimum=1),
        num_layers=layers,
        num_heads=heads,
        patch_size=vision.integer("patch_size", default=16, minimum=1, maximum=1024),
        merge_size=read.integer("spatial_merge_size", default=2 if mistral3 else 1, minimum=1, maximum=64),
        rope_theta=(rope or vision).number("rope_theta", default=10000.0),
        activation=_activation(vision, "hidden_act"),
        projector_activation=_activation(read, "projector_hidden_act"),
        projector_bias=read.boolean("multimodal_projector_bias", default=not mistral3),
        projector_norm=mistral3,
        norm_eps=norm_eps,
        layers_used=_layers_used(read, layers, default=-1 if mistral3 else -2),
        preprocessing=_read_preprocessing(folder),
    )


def _activation(read: JsonReader, key: str) -> str:
    name: str = read.string(key, default="gelu")
    if name not in ("gelu", "silu"):
        raise UnsupportedError(f"{read.file}: {key} {name!r} is not built in this version; supported: gelu, silu")
    return name


def _layers_used(read: JsonReader, layers: int, default: int) -> int:
    """`vision_feature_layer` counts the embedding as 0, or from the end as -1."""
    index = read.integer("vision_feature_layer", default=default)
    used = index if index >= 0 else layers + 1 + index
    if not 0 <= used <= layers:
        raise ConfigError(f"{read.file}: vision_feature_layer is {index}, the tower has {layers} layers")
    return int(used)


def _read_preprocessing(folder: Path) -> Preprocessing:
    file = folder / "preprocessor_config.json"
    read = JsonReader(read_json_file(file), file)
    processor = read.string("image_processor_type", default=PROCESSORS[0])
    if processor not in PROCESSORS:
        raise UnsupportedError(f"{file}: image_processor_type {processor!r}; built: {', '.join(PROCESSORS)}")
    return Preprocessing(
        longest_edge=read.integer("size->longest_edge", default=1024, minimum=1, maximum=MAX_EDGE),
        mean=_triple(read, "image_mean", CLIP_MEAN),
        std=_triple(read, "image_std", CLIP_STD),
        rescale_factor=read.number("rescale_factor", default=1 / 255),
        resample=read.integer("resample", default=3, minimum=0, maximum=5),
    )


def _triple(read: JsonReader, key: str, default: Sequence[float]) -> tuple[float, float, float]:
    values: list[Any] = read.listing(key, default=list(default))
    if len(values) != 3 or not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
        raise ConfigTypeError(f"{read.file}: {key} must be three numbers, not {values!r}")
    a, b, c = (float(v) for v in values)
    return a, b, c
