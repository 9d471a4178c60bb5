"""Errors to act on: one base class, a stable code each, messages that name the value, the limit and the remedy."""

from __future__ import annotations

from typing import ClassVar

__all__ = ["DTypeError", "DeviceError", "ExlError", "FormatError", "ShapeError", "UnsupportedError"]


class ExlError(Exception):
    """Base of every error this project raises on purpose. `code` is stable; the text is for people."""

    code: ClassVar[str] = "error"


class FormatError(ExlError, ValueError):
    """A file or a set of tensors is not what its format says: names the file or matrix and what is wrong with it."""

    code = "format"


class ShapeError(ExlError, ValueError):
    """A tensor has the wrong shape."""

    code = "shape"


class DTypeError(ExlError, TypeError):
    """A tensor has the wrong element type or lives on the wrong device."""

    code = "dtype"


class UnsupportedError(ExlError, NotImplementedError):
    """Valid input that this version has no code for; says what to use instead."""

    code = "unsupported"


class DeviceError(ExlError, RuntimeError):
    """A device is missing, out of memory or lost; says what to do."""

    code = "device"
