"""The settings of the towers of Qwen2-VL and Qwen2.5-VL in the files of a model folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, ConfigTypeError
from ..json_reader import JsonReader
from .images import MAX_PIXELS
from .reading import (
    CLIP_MEAN,
    CLIP_STD,
    MAX_EDGE,
    MAX_LAYERS,
    MAX_VISION_WIDTH,
    Preprocessing,
    activation,
    head_dim,
    preprocessing,
    processor_file,
    read_config,
    rope_theta,
)

__all__ = ["PixelRange", "QwenSettings", "read_qwen_settings"]

PROCESSORS = tuple(
    name + end for end in ("", "Fast", "Pil") for name in ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor")
)
VIDEO_PROCESSORS = ("Qwen2VLVideoProcessor", "Qwen2_5_VLVideoProcessor")
FULL_LAYERS = (7, 15, 23, 31)  # default of Qwen2.5-VL


@dataclass(frozen=True)
class PixelRange:
    """Limits of the number of pixels of a resized image or frame."""

    least: int
    most: int


@dataclass(frozen=True)
class QwenSettings:
    """Sizes of the tower and its merger."""

    gated: bool  # Qwen2.5-VL: gated MLPs, RMS norms, windows
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    patch_size: int
    temporal_patch: int  # frames that make one patch
    merge_size: int  # patches of a side that become one row of the output
    window: int  # rows of a side of the output that attend to each other; 0: the whole frame
    full_layers: frozenset[int]  # layers without windows
    rope_theta: float
    activation: str
    tokens_per_second: float  # positions along the time axis of a video
    preprocessing: Preprocessing
    image_pixels: PixelRange
    video_pixels: PixelRange

    @property
    def patch_numbers(self) -> int:
        """Numbers of a patch."""
        return int(3 * self.temporal_patch * self.patch_size**2)


def read_qwen_settings(folder: Path, gated: bool) -> QwenSettings:
    """Read the settings of a folder's tower; gated: Qwen2.5-VL.

    Raises:
        ConfigError: a file is invalid.
        UnsupportedError: an option is not supported.
    """
    _, vision = read_config(folder)
    hidden = vision.integer(
        "hidden_size" if gated else "embed_dim", default=3584 if gated else 1280, minimum=4, maximum=MAX_VISION_WIDTH
    )
    heads = vision.integer("num_heads", default=16, minimum=1, maximum=MAX_VISION_WIDTH)
    layers = vision.integer("depth", default=32, minimum=1, maximum=MAX_LAYERS)
    patch = vision.integer("patch_size", default=14, minimum=1, maximum=1024)
    merge = vision.integer("spatial_merge_size", default=2, minimum=1, maximum=64)
    temporal = vision.integer("temporal_patch_size", default=2, minimum=1, maximum=64)
    if vision.integer("in_channels", "in_chans", default=3) != 3:
        raise ConfigError(f"{vision.file}: in_channels must be 3, the colours of an image")
    images = processor_file(folder, PROCESSORS)
    assert images is not None
    _same_cut(images, (patch, merge, temporal))
    video = processor_file(folder, VIDEO_PROCESSORS, video=True)
    if video is not None:
        _same_cut(video, (patch, merge, temporal))
    step = patch * merge
    pixels = _pixels(images, step, PixelRange(56 * 56, 28 * 28 * 1280))
    return QwenSettings(
        gated=gated,
        hidden_size=hidden,
        intermediate_size=_intermediate(vision, hidden, gated),
        num_layers=layers,
        num_heads=heads,
        head_dim=head_dim(vision, hidden, heads, multiple=4),
        patch_size=patch,
        temporal_patch=temporal,
        merge_size=merge,
        window=_window(vision, step) if gated else 0,
        full_layers=_full_layers(vision, layers) if gated else frozenset(range(layers)),
        rope_theta=rope_theta(vision),
        activation=activation(vision, "hidden_act", "silu" if gated else "quick_gelu"),
        tokens_per_second=vision.number("tokens_per_second", default=4.0) if gated else 1.0,
        preprocessing=preprocessing(images, CLIP_MEAN, CLIP_STD),
        image_pixels=pixels,
        video_pixels=pixels if video is None else _pixels(video, step, PixelRange(128 * 28 * 28, 28 * 28 * 768)),
    )


def _intermediate(vision: JsonReader, hidden: int, gated: bool) -> int:
    if gated:
        return int(vision.integer("intermediate_size", default=3420, minimum=1, maximum=MAX_VISION_WIDTH))
    width = hidden * vision.number("mlp_ratio", default=4.0)
    if not 1 <= width <= MAX_VISION_WIDTH:
        raise ConfigError(
            f"{vision.file}: mlp_ratio makes an MLP of width {width}, must be from 1 to {MAX_VISION_WIDTH}"
        )
    return int(width)


def _window(vision: JsonReader, step: int) -> int:
    size = vision.integer("window_size", default=112, minimum=1, maximum=MAX_EDGE)
    if size < step:
        raise ConfigError(f"{vision.file}: window_size {size} holds no merged patch of {step} pixels")
    return int(size // step)


def _full_layers(vision: JsonReader, layers: int) -> frozenset[int]:
    found = vision.listing("fullatt_block_indexes", default=None)
    indices = FULL_LAYERS if found is None else found
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in indices):
        raise ConfigTypeError(f"{vision.file}: fullatt_block_indexes must be a list of layers, not {indices!r}")
    return frozenset(i for i in indices if 0 <= i < layers)


def _same_cut(read: JsonReader, wanted: tuple[int, int, int]) -> None:
    """Check that the processor cuts images into the tower's patches."""
    for key, expected in zip(("patch_size", "merge_size", "temporal_patch_size"), wanted, strict=True):
        found = read.integer(key, default=expected)
        if found != expected:
            raise ConfigError(f"{read.file}: {key} is {found}, the tower's in config.json is {expected}")


def _pixels(read: JsonReader, step: int, default: PixelRange) -> PixelRange:
    keys = ("min_pixels", "size->min_pixels", "size->shortest_edge")
    least = read.integer(*keys, default=default.least, minimum=1, maximum=MAX_PIXELS)
    keys = ("max_pixels", "size->max_pixels", "size->longest_edge")
    most = read.integer(*keys, default=default.most, minimum=1, maximum=MAX_PIXELS)
    if most < max(least, step * step):
        raise ConfigError(f"{read.file}: between {least} and {most} pixels there is no image of whole patches")
    return PixelRange(least, most)
