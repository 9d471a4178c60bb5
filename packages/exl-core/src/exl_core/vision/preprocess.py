"""From an image to the pixels a tower takes (spec core.md 12.3), as transformers' Pixtral processor does it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .settings import PixtralSettings

__all__ = ["output_size", "preprocess"]

MAX_ASPECT = 200


def output_size(height: int, width: int, settings: PixtralSettings) -> tuple[int, int]:
    """(height, width) after resizing: shrunk into the longest edge, then up to whole merged patches."""
    longest, step = settings.preprocessing.longest_edge, settings.patch_size * settings.merge_size
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        height, width = max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))
    return -(-height // step) * step, -(-width // step) * step


def preprocess(image: Any, settings: PixtralSettings) -> Tensor:
    """float32 [3, height, width]. image: a PIL image of any mode; where it is transparent it is laid on white.

    Raises InputError for anything else.
    """
    if not all(hasattr(image, name) for name in ("convert", "resize", "size", "mode")):
        raise InputError(f"image is a {type(image).__name__}, must be a PIL image (PIL.Image.open(file))")
    width, height = image.size
    if min(width, height) < 1 or max(width, height) > MAX_ASPECT * min(width, height):
        raise InputError(f"image of {width} x {height} pixels: sides may differ by a factor of {MAX_ASPECT} at most")
    image = _on_white(image)
    rows, columns = output_size(height, width, settings)
    how = settings.preprocessing
    if (columns, rows) != image.size:
        image = image.resize((columns, rows), how.resample)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(rows, columns, 3)
    scaled = pixels.permute(2, 0, 1).float() * how.rescale_factor
    mean, std = torch.tensor(how.mean).view(3, 1, 1), torch.tensor(how.std).view(3, 1, 1)
    return (scaled - mean) / std


def _on_white(image: Any) -> Any:
    if image.mode == "RGB":
        return image
    rgba = image.convert("RGBA")
    white = rgba.copy()
    white.paste((255, 255, 255, 255), (0, 0, *rgba.size))
    white.alpha_composite(rgba)
    return white.convert("RGB")
