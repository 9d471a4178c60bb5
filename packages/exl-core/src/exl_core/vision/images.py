"""Pixels of images as tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..image_files import MAX_ASPECT, MAX_PIXELS, as_rgb, open_image
from .reading import Preprocessing

__all__ = ["MAX_ASPECT", "MAX_PIXELS", "as_rgb", "open_image", "pixels_of"]


def pixels_of(image: Any, rows: int, columns: int, how: Preprocessing) -> Tensor:
    """Return float32 [3, rows, columns] of an RGB image: resized by PIL, rescaled, normalised."""
    if (columns, rows) != image.size:
        image = image.resize((columns, rows), how.resample)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(rows, columns, 3)
    scaled = pixels.permute(2, 0, 1).float() * how.rescale_factor
    mean, std = torch.tensor(how.mean).view(3, 1, 1), torch.tensor(how.std).view(3, 1, 1)
    return (scaled - mean) / std
