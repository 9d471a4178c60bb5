"""Open and check images with PIL, and convert them to upright RGB. This module does not import torch."""

from __future__ import annotations

import os
from io import BytesIO
from typing import Any

import numpy as np

from .errors import InputError, UnsupportedError

__all__ = ["FORMATS", "MAX_ASPECT", "MAX_PIXELS", "as_rgb", "open_image"]

MAX_ASPECT = 200
MAX_PIXELS = 1 << 26
"""Most pixels of an image before it is resized; decoded, a pixel takes up to 8 bytes."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats that `open_image` accepts. PIL knows others, some of which start other programs."""

DEEP_GREY = ("I;16", "I;16L", "I;16B", "I;16N", "I")


def open_image(file: str | os.PathLike[str] | bytes) -> Any:
    """Open an image as an upright RGB PIL image: PNG, JPEG, WebP, GIF, BMP, TIFF or PPM.

    Args:
        file: path of a file, or the bytes of one.

    Raises:
        InputError: the file cannot be read, is damaged, or has more than `MAX_PIXELS` pixels.
    """
    image_module = _pil()
    name = "the image" if isinstance(file, bytes) else os.fspath(file)
    try:
        with image_module.open(BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS) as image:
            return as_rgb(image)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error.__cause__
    except Exception as error:  # a decoder may raise any exception
        raise InputError(f"{name}: not an image that can be read ({_short(error)})") from error


def as_rgb(image: Any) -> Any:
    """Convert a PIL image to RGB, rotated by its EXIF orientation, with transparent parts on white.

    Sizes are checked before decoding. Greyscale of 16 bits is reduced to the upper 8 bits.

    Raises:
        InputError: the object is no image, or is damaged, empty, too large or too narrow.
    """
    if not all(hasattr(image, name) for name in ("convert", "resize", "size", "mode", "load")):
        raise InputError(f"image is a {type(image).__name__}, must be a PIL image (PIL.Image.open(file))")
    width, height = image.size
    if min(width, height) < 1 or max(width, height) > MAX_ASPECT * min(width, height):
        raise InputError(f"image of {width} x {height} pixels: sides may differ by a factor of {MAX_ASPECT} at most")
    if width * height > MAX_PIXELS:
        raise InputError(
            f"image of {width} x {height} pixels: at most {MAX_PIXELS} are taken; shrink it first (image.thumbnail)"
        )
    try:
        image.load()
        return _on_white(_eight_bits(_upright(image)))
    except InputError:
        raise
    except Exception as error:  # a decoder may raise any exception
        raise InputError(f"image cannot be decoded: {_short(error)}") from error


def _pil() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise UnsupportedError(
            'images need Pillow: in a checkout, pip install "./packages/exl-core[vision]" installs it'
        ) from error
    return Image


def _upright(image: Any) -> Any:
    if not hasattr(image, "getexif"):
        return image
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def _eight_bits(image: Any) -> Any:
    if image.mode == "F":
        raise InputError("image of floating-point pixels: their range is not known; convert it to 8 bits first")
    if image.mode not in DEEP_GREY:
        return image
    values = np.asarray(image).astype(np.int64)
    if values.size and (values.min() < 0 or values.max() > 0xFFFF):
        raise InputError("image of more than 16 bits a pixel: convert it to 8 bits first")
    return _pil().fromarray((values >> 8).astype(np.uint8))


def _on_white(image: Any) -> Any:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    white = _pil().new("RGBA", rgba.size, (255, 255, 255, 255))
    white.alpha_composite(rgba)
    return white.convert("RGB")


def _short(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= 160 else text[:157] + "..."
