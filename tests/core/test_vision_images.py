"""Images of any kind as input of the towers: modes, rotation, limits, damaged and malicious files."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from exl_core import errors
from exl_core.vision import open_image
from exl_core.vision.images import MAX_PIXELS, as_rgb

pytestmark = pytest.mark.covers("core: multimodal-other")


def noise(width: int = 12, height: int = 7) -> Image.Image:
    return Image.fromarray(np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8), "RGB")


def encoded(image: Image.Image, kind: str, **kw: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **kw)
    return out.getvalue()


def colours_of(image: Image.Image) -> set[tuple[int, ...]]:
    return {tuple(pixel) for pixel in np.asarray(image).reshape(-1, 3).tolist()}


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG that says it is so large, whatever it holds."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "YCbCr", "HSV", "LAB", "RGBA", "LA", "PA", "RGBX"])
def test_modes(mode: str) -> None:
    """The result of PIL's conversion; images without transparency show no white."""
    image = noise().convert("L").convert(mode) if mode in ("LA", "PA") else noise().convert(mode)
    found = as_rgb(image)
    assert found.mode == "RGB"
    assert found.size == image.size
    if mode not in ("LA", "PA", "RGBA"):
        assert found.tobytes() == image.convert("RGB").tobytes()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
def test_transparent_pixels_become_white(mode: str) -> None:
    colours: dict[str, Any] = {"RGBA": (10, 20, 30, 0), "LA": (10, 0), "P": 5, "L": 7, "RGB": (1, 2, 3)}
    image = Image.new(mode, (6, 4), colours[mode])
    if mode in ("P", "L", "RGB"):
        image.info["transparency"] = colours[mode]
    assert colours_of(as_rgb(image)) == {(255, 255, 255)}
    half = Image.new("RGBA", (2, 2), (0, 0, 0, 128))
    assert colours_of(as_rgb(half)) == {(127, 127, 127)}


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I"])
def test_deep_greyscale_keeps_its_upper_half(mode: str) -> None:
    values = np.array([[0, 255, 256, 0x7FFF, 0xFFFF]])
    kinds = {"I;16": "<u2", "I;16B": ">u2", "I": "<i4"}
    image = Image.frombytes(mode, (5, 1), values.astype(kinds[mode]).tobytes())
    assert np.asarray(as_rgb(image))[0, :, 0].tolist() == [0, 0, 1, 0x7F, 0xFF]


def test_pixels_of_no_known_range_are_refused() -> None:
    with pytest.raises(errors.InputError, match="floating-point"):
        as_rgb(Image.new("F", (4, 4)))
    with pytest.raises(errors.InputError, match="16 bits"):
        as_rgb(Image.new("I", (4, 4), 1 << 20))


@pytest.mark.parametrize("turn", range(1, 9))
def test_photos_are_turned_upright(turn: int, tmp_path: Path) -> None:
    """Photos are rotated by their EXIF orientation, as transformers does."""
    load_image = pytest.importorskip("transformers").image_utils.load_image
    exif = Image.Exif()
    exif[0x0112] = turn
    file = tmp_path / "photo.png"
    noise().save(file, exif=exif)
    expected = load_image(str(file))
    found = open_image(file)
    assert found.size == expected.size == ((12, 7) if turn < 5 else (7, 12))
    assert found.tobytes() == expected.tobytes()
    with Image.open(file) as unread:
        assert as_rgb(unread).tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_formats(kind: str) -> None:
    data = encoded(noise(), kind)
    with Image.open(io.BytesIO(data)) as image:
        assert open_image(data).tobytes() == image.convert("RGB").tobytes()


def test_other_formats_are_not_opened() -> None:
    """PostScript would start an interpreter; PIL would open PDF-like, Windows icon and other files too."""
    for data in (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", encoded(noise(16, 16), "ICO"), b"", b"hello"):
        with pytest.raises(errors.InputError, match="not an image that can be read"):
            open_image(data)
    with pytest.raises(errors.InputError, match=r"nowhere\.png"):
        open_image("nowhere.png")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_truncated_files_are_refused(kind: str) -> None:
    data = encoded(noise(64, 64), kind)
    for length in (len(data) // 3, len(data) * 2 // 3):
        with pytest.raises(errors.InputError):
            open_image(data[:length])
        if kind == "WEBP":  # PIL itself opens no part of one
            continue
        with (
            Image.open(io.BytesIO(data[:length])) as image,
            pytest.raises(errors.InputError, match="cannot be decoded"),
        ):
            as_rgb(image)  # opened by the caller: a header is there, pixels are not


@pytest.mark.parametrize(
    ("width", "height"), [(1 << 15, 1 << 15), (8193, 8192), (1 << 30, 1 << 30), (0, 5), (5, 0), (201, 1), (1, 300)]
)
def test_sizes_beyond_the_limits_are_refused_before_anything_is_decoded(width: int, height: int) -> None:
    with pytest.raises(errors.InputError):
        open_image(png(width, height))
    if width * height < 1 << 28:  # what PIL itself opens
        with pytest.raises(errors.InputError, match=f"{width} x {height} pixels"):
            as_rgb(Image.new("1", (width, height)))
    assert MAX_PIXELS == 8192 * 8192


def test_things_that_are_no_images_are_refused() -> None:
    for thing in (None, "photo.png", b"", np.zeros((4, 4, 3)), object()):
        with pytest.raises(errors.InputError, match="PIL image"):
            as_rgb(thing)


KINDS = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"]


@examples(300, 30)
@given(st.sampled_from(KINDS), st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=8), st.data())
def test_damaged_files_end_in_an_image_or_in_an_input_error(
    kind: str, changes: list[tuple[int, int]], data: st.DataObject
) -> None:
    raw = bytearray(encoded(noise(20, 14), kind))
    for place, value in changes:
        raw[place % len(raw)] = value
    raw = raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw
    try:
        image = open_image(bytes(raw))
    except errors.InputError:
        return
    assert image.mode == "RGB"
    assert 0 < image.size[0] * image.size[1] <= MAX_PIXELS
