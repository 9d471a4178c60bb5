"""From an image to the pixels of a Pixtral tower, as in transformers' processor."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from .images import as_rgb, pixels_of
from .settings import PixtralSettings

__all__ = ["output_size", "preprocess"]


def output_size(height: int, width: int, settings: PixtralSettings) -> tuple[int, int]:
    """Return (height, width) after resizing: within the longest edge, then rounded up to whole merged patches."""
    longest, step = settings.longest_edge, settings.patch_size * settings.merge_size
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        height, width = max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))
    return -(-height // step) * step, -(-width // step) * step


def preprocess(image: Any, settings: PixtralSettings) -> Tensor:
    """Return float32 [3, height, width] of a PIL image of any mode; transparent parts become white.

    Raises InputError.
    """
    rgb = as_rgb(image)
    width, height = rgb.size
    return pixels_of(rgb, *output_size(height, width, settings), settings.preprocessing)
