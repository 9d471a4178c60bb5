"""The errors of the server, with HTTP status and OpenAI's error shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ServeError"]


class ServeError(Exception):
    """An error for the client.

    `message` says what was wrong, with the numbers, and what to change; never a traceback, a path or a prompt.

    Args:
        status: HTTP status.
        type: OpenAI's error type.
        code: Stable error code.
        message: The message.
        param: Path of the request's field, or None.
        retry_after: Seconds for the Retry-After header, or None.
        allow: The Allow header of a 405, or None.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        type: str,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        allow: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.allow = allow
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's shape."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @classmethod
    def invalid(cls, message: str, param: str | None = None, code: str = "invalid_value") -> ServeError:
        """Return a 400: the request is malformed or out of range; `param` is the path of the field."""
        return cls(400, "invalid_request_error", code, message, param=param)

    @classmethod
    def unsupported(cls, param: str, message: str) -> ServeError:
        """Return a 400: the field is known from other servers and not offered here."""
        return cls(400, "invalid_request_error", "unsupported_parameter", message, param=param)

    @classmethod
    def unavailable(cls, code: str, message: str, retry_after: float | None = 1.0) -> ServeError:
        """Return a 503: loading, draining or restarting."""
        return cls(503, "server_error", code, message, retry_after=retry_after)

    @classmethod
    def engine(cls, message: str, code: str = "engine_error") -> ServeError:
        """Return a 500: the engine failed this request."""
        return cls(500, "server_error", code, message)
