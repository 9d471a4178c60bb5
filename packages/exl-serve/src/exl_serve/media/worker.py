"""The process that decodes images: `python -m exl_serve.media.worker`.

It reads requests on standard input, writes each image as raw RGB bytes into a file, and answers on standard output. It
ends with its input. Its memory is limited before the first image, so a decompression bomb ends only this process. Its
caller ends the process when an image takes too long.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import ctypes
import hashlib
import importlib
import json
import sys
import warnings
from io import BytesIO
from typing import IO, Any

__all__ = ["HEAD", "LOW_SIDE", "main"]

HEAD = 8
"""Bytes of each of the two lengths before a message: of its JSON, and of the bytes that follow."""
EXTRA_MEMORY = 1536 << 20
"""Memory for decoding, in bytes: 2^26 pixels of up to 8 bytes each, twice for a conversion."""
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
"""Flags of unshare(2)."""
LOW_SIDE = 512
"""Pixels of the longer side of an image with the detail "low"."""


class _RefusedError(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def main() -> None:
    """Answer requests until standard input ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    # Only a process of one thread may leave the network, and numpy starts others.
    _leave_network()
    importlib.import_module("exl_core.image_files")  # late import: after the network is gone
    from exl_filters.cores import yield_cores

    _limit_memory()
    yield_cores()  # only now: the first request waits for the start
    while (request := _read(requests)) is not None:
        raw = json.dumps(_answer(*request)).encode()
        answers.write(len(raw).to_bytes(HEAD, "little") + raw)
        answers.flush()


def _read(stream: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    lengths = stream.read(2 * HEAD)
    if len(lengths) < 2 * HEAD:
        return None
    header = json.loads(stream.read(int.from_bytes(lengths[:HEAD], "little")))
    return header, stream.read(int.from_bytes(lengths[HEAD:], "little"))


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + EXTRA_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _leave_network() -> None:
    """Move to a network namespace without interfaces, where the kernel allows that to any user."""
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: a C library without it
        ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET)


def _answer(header: dict[str, Any], text: bytes) -> dict[str, Any]:
    """Decode a base64 image. Returns {"width", "height", "digest"} and writes a file, or {"code", "error"}."""
    try:
        image = _decoded(text, header)
        pixels = image.tobytes()
    except _RefusedError as error:
        return {"code": error.code, "error": str(error)}
    except MemoryError:
        return {"code": "image_too_large", "error": "the image takes more memory than an image may take"}
    try:
        with open(header["path"], "xb") as file:
            file.write(pixels)
    except OSError as error:  # such as a full disk
        return {"code": "unavailable", "error": f"the decoded image cannot be stored ({error.strerror})"}
    width, height = image.size
    digest = hashlib.blake2b(pixels, digest_size=16, person=f"{width} {height}".encode()).hexdigest()
    return {"width": width, "height": height, "digest": digest}


def _decoded(text: bytes, header: dict[str, Any]) -> Any:
    from exl_core.errors import InputError
    from exl_core.image_files import FORMATS, as_rgb

    try:
        from PIL import Image
    except ImportError:
        raise _RefusedError("unsupported", "this server has no decoder for images: install Pillow") from None
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise _RefusedError("image_invalid", f"the data URL is not valid base64 ({error})") from None
    if len(data) > header["max_bytes"]:
        raise _RefusedError(
            "image_too_large", f"the image has {len(data)} bytes; at most {header['max_bytes']} are taken"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise _RefusedError("image_too_large", f"the image has more than {header['max_pixels']} pixels") from None
    except Exception as error:  # a decoder may raise anything
        raise _RefusedError("image_invalid", f"not an image that can be read ({type(error).__name__})") from None
    width, height = opened.size
    if width * height > header["max_pixels"]:
        raise _RefusedError(
            "image_too_large",
            f"the image has {width} x {height} pixels; at most {header['max_pixels']} are taken: send a smaller one",
        )
    try:
        image = as_rgb(opened)
    except InputError as error:
        raise _RefusedError("image_invalid", str(error)) from None
    if header["low"]:
        image.thumbnail((LOW_SIDE, LOW_SIDE))
    return image


if __name__ == "__main__":
    main()
