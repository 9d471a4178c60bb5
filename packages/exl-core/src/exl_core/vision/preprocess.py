"""From an image to the pixels a Pixtral tower takes, as transformers' processor does it."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from .images import as_rgb, pixels_of
from .settings import PixtralSettings

__all__ = ["output_size", "preprocess"]


def output_size(height: int, width: int, settings: PixtralSettings) -> tuple[int, int]:
    """(height, width) after resizing: shrunk into the longest edge, then up to whole merged patches."""
    longest, step = settings.longest_edge, settings.patch_size * settings.merge_size
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        height, width = max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))
    return -(-height // step) * step, -(-width // step) * step


def preprocess(image: Any, settings: PixtralSettings) -> Tensor:
    """float32 [3, height, width]. image: a PIL image of any mode; where it is transparent it is laid on white.

    Raises InputError for anything else.
    """
    rgb = as_rgb(image)
    width, height = rgb.size
    return pixels_of(rgb, *output_size(height, width, settings), settings.preprocessing)
