"""The project's exceptions: one base class, a stable code per class, messages with value, limit and remedy."""

from __future__ import annotations

from typing import ClassVar

__all__ = ["DTypeError", "DeviceError", "ExlError", "FormatError", "ShapeError", "UnsupportedError"]


class ExlError(Exception):
    """Base class of the errors that this project raises on purpose. `code` is stable; the text is for people."""

    code: ClassVar[str] = "error"


class FormatError(ExlError, ValueError):
    """A file or a set of tensors violates its format. The message names the file or matrix and the violation."""

    code = "format"


class ShapeError(ExlError, ValueError):
    """A tensor has the wrong shape."""

    code = "shape"


class DTypeError(ExlError, TypeError):
    """A tensor has the wrong element type or is on the wrong device."""

    code = "dtype"


class UnsupportedError(ExlError, NotImplementedError):
    """The input is valid, but this version does not support it. The message says what to use instead."""

    code = "unsupported"


class DeviceError(ExlError, RuntimeError):
    """A device is missing, out of memory or lost. The message says what to do."""

    code = "device"
