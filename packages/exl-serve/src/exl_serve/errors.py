"""The errors of the server: each knows its HTTP status and its place in OpenAI's error shape."""

from __future__ import annotations

from typing import Any

__all__ = ["ServeError"]


class ServeError(Exception):
    """An error that is told to the client.

    `message` says what was wrong, with the numbers, and what to change; never a traceback, a path or a prompt.
    `retry_after`: seconds for the Retry-After header, or None.
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
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """OpenAI's error shape."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @classmethod
    def invalid(cls, message: str, param: str | None = None, code: str = "invalid_value") -> ServeError:
        """400: the request is malformed or out of range; `param` is the path of the field."""
        return cls(400, "invalid_request_error", code, message, param=param)

    @classmethod
    def unsupported(cls, param: str, message: str) -> ServeError:
        """400: a field that is known from other servers and not offered here."""
        return cls(400, "invalid_request_error", "unsupported_parameter", message, param=param)

    @classmethod
    def unavailable(cls, code: str, message: str, retry_after: float | None = 1.0) -> ServeError:
        """503: loading, draining or restarting."""
        return cls(503, "server_error", code, message, retry_after=retry_after)

    @classmethod
    def engine(cls, message: str, code: str = "engine_error") -> ServeError:
        """500: the engine failed this request."""
        return cls(500, "server_error", code, message)
