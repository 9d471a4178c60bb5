"""Settings that all towers read from config.json and the files of the image processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ConfigError, ConfigFileError, ConfigTypeError, UnsupportedError
from ..json_reader import JsonReader, is_number, read_json_file

__all__ = [
    "ACTIVATIONS",
    "MAX_EDGE",
    "Preprocessing",
    "activation",
    "head_dim",
    "preprocessing",
    "processor_file",
    "read_config",
    "rope_theta",
]

MAX_EDGE = 16384  # most pixels of a side
MAX_LAYERS = 4096
MAX_VISION_WIDTH = 1 << 20
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "silu": functional.silu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@dataclass(frozen=True)
class Preprocessing:
    """The conversion of a resized image to numbers: (value * rescale_factor - mean) / std.

    `resample` is PIL's number of the filter for resizing.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float
    resample: int


def read_config(folder: Path) -> tuple[JsonReader, JsonReader]:
    """Return (config.json, its vision_config). Raises ConfigError and its subclasses."""
    file = folder / "config.json"
    read = JsonReader(read_json_file(file), file)
    vision = read.section("vision_config")
    if vision is None:
        raise ConfigError(f"{file}: no vision_config, which has the image encoder's sizes")
    return read, vision


def processor_file(folder: Path, names: Sequence[str], video: bool = False) -> JsonReader | None:
    """Return the settings of the image (or video) processor, whose class must be one of `names`.

    They are in a separate file, or in newer folders in a file with other settings. None if there are none for videos.
    """
    own = folder / ("video_preprocessor_config.json" if video else "preprocessor_config.json")
    both = folder / "processor_config.json"
    read: JsonReader | None = None
    if own.exists():
        read = JsonReader(read_json_file(own), own)
    elif both.exists():
        read = JsonReader(read_json_file(both), both).section("video_processor" if video else "image_processor")
    if read is None:
        if video:
            return None
        raise ConfigFileError(f"Can't find {own}, which says how images are prepared")
    key = "video_processor_type" if video else "image_processor_type"
    kind = read.string(key, default=names[0])
    if kind not in names:
        raise UnsupportedError(f"{read.file}: {key} {kind!r} is not supported; supported: {', '.join(names)}")
    for switch in ("do_resize", "do_rescale", "do_normalize"):
        if not read.boolean(switch, default=True):
            raise UnsupportedError(f"{read.file}: {switch} is false, which is not supported")
    return read


def preprocessing(read: JsonReader, mean: Sequence[float], std: Sequence[float], resample: int = 3) -> Preprocessing:
    """Return the preprocessing with these defaults. resample: 2 bilinear, 3 bicubic."""
    deviations = _triple(read, "image_std", std)
    if min(deviations) <= 0:
        raise ConfigError(f"{read.file}: image_std is {list(deviations)}, must be positive")
    return Preprocessing(
        mean=_triple(read, "image_mean", mean),
        std=deviations,
        rescale_factor=read.number("rescale_factor", default=1 / 255),
        resample=read.integer("resample", default=resample, minimum=0, maximum=5),
    )


def activation(read: JsonReader, key: str, default: str, supported: Sequence[str] = tuple(ACTIVATIONS)) -> str:
    """Return the name of an activation. Raises UnsupportedError for one that is not in `supported`."""
    name: str = read.string(key, default=default)
    if name not in supported:
        raise UnsupportedError(f"{read.file}: {key} {name!r} is not supported; supported: {', '.join(supported)}")
    return name


def head_dim(read: JsonReader, hidden: int, heads: int, multiple: int = 1) -> int:
    """Return the elements of a head of the tower's attention. Raises ConfigError."""
    if hidden % heads or hidden // heads % multiple:
        raise ConfigError(f"{read.file}: vision hidden_size {hidden} does not make {heads} heads of a multiple of 4")
    return hidden // heads


def rope_theta(vision: JsonReader) -> float:
    """Return the base of the tower's rotation. Raises ConfigError."""
    theta: float = (vision.section("rope_parameters") or vision).number("rope_theta", default=10000.0)
    if theta <= 0:
        raise ConfigError(f"{vision.file}: rope_theta is {theta}, must be positive")
    return theta


def _triple(read: JsonReader, key: str, default: Sequence[float]) -> tuple[float, float, float]:
    values: list[Any] = read.listing(key, default=list(default))
    if len(values) != 3 or not all(map(is_number, values)):
        raise ConfigTypeError(f"{read.file}: {key} must be three numbers, not {str(values)[:80]}")
    a, b, c = (float(v) for v in values)
    return a, b, c
