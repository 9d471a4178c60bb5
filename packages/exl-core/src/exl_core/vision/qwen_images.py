"""From images to the patches of Qwen's towers, as in the published processor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .encoder import Grid, Picture
from .images import as_rgb, pixels_of
from .qwen_settings import PixelRange, QwenSettings

__all__ = ["MAX_FRAMES", "MAX_PATCHES", "output_size", "patches_of", "preprocess", "preprocess_video"]

MAX_FRAMES = 4096
MAX_PATCHES = 1 << 19
"""Most patches of a video: 131,072 tokens of the published models, 2.5 GB of numbers."""


def output_size(height: int, width: int, step: int, limits: PixelRange) -> tuple[int, int]:
    """Return (height, width) after resizing: whole merged patches, pixels within `limits`, the aspect ratio kept.

    Python's rounding (half to even), as in the published processor.
    """
    rows, columns = round(height / step) * step, round(width / step) * step
    if rows * columns > limits.most:
        shrink = math.sqrt(height * width / limits.most)
        rows = max(step, math.floor(height / shrink / step) * step)
        columns = max(step, math.floor(width / shrink / step) * step)
    elif rows * columns < limits.least:
        grow = math.sqrt(limits.least / (height * width))
        rows, columns = math.ceil(height * grow / step) * step, math.ceil(width * grow / step) * step
    return rows, columns


def preprocess(image: Any, settings: QwenSettings) -> Picture:
    """Preprocess one image: the same image fills every place of a patch's time."""
    rgb = as_rgb(image)
    frame = _resized(rgb, settings, settings.image_pixels)
    return _picture(frame[None].expand(settings.temporal_patch, -1, -1, -1), settings)


def preprocess_video(frames: Sequence[Any], settings: QwenSettings) -> Picture:
    """Preprocess images of one size; the last is repeated until the frames fill whole patches of time."""
    if not isinstance(frames, (list, tuple)) or not frames:
        raise InputError("a video is a list of PIL images, one at least")
    if len(frames) > MAX_FRAMES:
        raise InputError(f"video of {len(frames)} frames: at most {MAX_FRAMES} are taken; sample fewer")
    sizes = {image.size for image in frames if hasattr(image, "size")}
    if len(sizes) > 1:
        raise InputError(f"frames of different sizes: {sorted(sizes)[:4]}; resize them to one")
    _check_patches(len(frames), next(iter(sizes), (0, 0)), settings)
    done = [_resized(as_rgb(image), settings, settings.video_pixels) for image in frames]
    if len({tuple(f.shape) for f in done}) > 1:
        raise InputError("frames with different EXIF rotations: make all of one size first")
    done += [done[-1]] * (-len(done) % settings.temporal_patch)
    return _picture(torch.stack(done), settings)


def patches_of(frames: Tensor, settings: QwenSettings) -> tuple[Tensor, Grid]:
    """Cut frames float32 [F, 3, H, W] into patches [T * H / p * W / p, 3 * t * p * p]; also return their grid.

    The patches of a block that is merged into one row are adjacent.
    """
    p, m, t = settings.patch_size, settings.merge_size, settings.temporal_patch
    count, channels, height, width = frames.shape
    grid = count // t, height // p, width // p
    cut = frames.reshape(grid[0], t, channels, grid[1] // m, m, p, grid[2] // m, m, p)
    ordered = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return ordered.reshape(math.prod(grid), channels * t * p * p), grid


def _check_patches(frames: int, size: tuple[int, int], settings: QwenSettings) -> None:
    """Raise InputError for a video of more than `MAX_PATCHES` patches, before a frame of it is decoded."""
    if min(size) < 1:
        return  # as_rgb rejects it
    step = settings.patch_size * settings.merge_size
    rows, columns = output_size(size[1], size[0], step, settings.video_pixels)
    times = -(-frames // settings.temporal_patch)
    patches = times * (rows // settings.patch_size) * (columns // settings.patch_size)
    if patches > MAX_PATCHES:
        raise InputError(
            f"video of {frames} frames of {size[0]} x {size[1]} pixels makes {patches} patches, at most {MAX_PATCHES} "
            "are taken; sample fewer frames, or make them smaller"
        )


def _resized(rgb: Any, settings: QwenSettings, limits: PixelRange) -> Tensor:
    width, height = rgb.size
    rows, columns = output_size(height, width, settings.patch_size * settings.merge_size, limits)
    return pixels_of(rgb, rows, columns, settings.preprocessing)


def _picture(frames: Tensor, settings: QwenSettings) -> Picture:
    patches, grid = patches_of(frames, settings)
    return Picture(patches, grid, (frames.shape[3], frames.shape[2]))
