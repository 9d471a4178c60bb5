"""Read requests and write answers: bodies, errors, headers, streams, clients that leave."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import Receive, Scope, Send

from exl_serve.api.state import AppState, Caller
from exl_serve.errors import ServeError
from exl_serve.request.body import read_json

if TYPE_CHECKING:
    from exl_serve.api.auth import Ticket

__all__ = ["Call", "Endpoint", "error_response", "send_json"]

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
LARGE_BODY = 1 << 16
"""A body of more bytes is parsed in another thread, so that the streams of other requests go on."""
PART_BYTES = 1 << 16
"""A write is sent in such parts. Each waits until the client has read most of those before it."""
_encoder = msgspec.json.Encoder()


class Call:
    """One HTTP request on its way through a route."""

    __slots__ = (
        "_receive", "_send", "_watching", "answers", "asked", "began", "caller", "headers", "id", "line", "model",
        "operation", "phases", "scope", "size", "started", "state", "status", "ticket",
        "user",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, send: Send, state: AppState) -> None:
        self.scope, self._receive, self._send, self.state = scope, receive, send, state
        given = self.header("x-request-id") or ""
        self.id = given if _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        self.caller = Caller()
        #: headers of the answer
        self.headers: dict[str, str] = {"x-request-id": self.id}
        self.started = False
        self.status = 0
        self.began = time.monotonic()
        #: name of the model that answers, once it is known
        self.model = ""
        #: digest of the client's name for its user, or None
        self.user: str | None = None
        #: what the log says of the request, once it has its line there
        self.line: Mapping[str, Any] | None = None
        #: body of a request for an answer, and the answers: for the content log
        self.asked: Mapping[str, Any] | None = None
        self.answers: Sequence[Any] = ()
        #: bytes of the body
        self.size = 0
        #: what a request for an answer asks for, as traces name it: chat, text_completion; else ""
        self.operation = ""
        #: name, begin and end (time.monotonic) of the request's parts: for traces
        self.phases: list[tuple[str, float, float]] = []
        #: its place among the requests of its key, once it is admitted; None for a key without limits
        self.ticket: Ticket | None = None
        self._watching: asyncio.Task[None] | None = None

    def header(self, name: str) -> str | None:
        """Return a header of the request by its lower-case name, or None."""
        wanted = name.encode()
        for key, value in self.scope["headers"]:
            if key == wanted:
                return str(value.decode("latin-1"))
        return None

    @property
    def path(self) -> dict[str, str]:
        """Parameters of the path."""
        return dict(self.scope.get("path_params", {}))

    @property
    def query(self) -> dict[str, str]:
        """Parameters of the query string; the last value of each name."""
        from urllib.parse import parse_qsl

        return dict(parse_qsl(self.scope.get("query_string", b"").decode("latin-1")))

    async def body(self, *, media: bool = False) -> bytearray:
        """Return the body. Raises ServeError 413 for a body beyond the limit, 499 if the client leaves."""
        limits = self.state.config.server.limits
        most = limits.max_body_bytes if media else limits.max_plain_body_bytes
        length = self.header("content-length")
        if length is not None and length.isdecimal() and int(length) > most:
            raise _too_large(most)
        data = bytearray()  # it grows in place: to join the parts of a large body would block the loop
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ServeError(499, "cancelled", "client_disconnected", "the client left")
            part = message.get("body", b"")
            if len(data) + len(part) > most:
                raise _too_large(most)
            data += part
            if not message.get("more_body"):
                return data

    def check_kind(self) -> None:
        """Raise ServeError 415 for a body that is not plain JSON.

        Routes without a body ask for this as well: a form of another site cannot send JSON.
        """
        kind = (self.header("content-type") or "application/json").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ServeError(
                415,
                "invalid_request_error",
                "unsupported_media_type",
                f"content-type is {kind[:64]}; send application/json (curl: -H 'content-type: application/json')",
            )
        coding = (self.header("content-encoding") or "identity").strip().lower()
        if coding != "identity":
            raise ServeError(
                415,
                "invalid_request_error",
                "unsupported_media_type",
                f"content-encoding is {coding[:64]}; send the body as it is",
            )

    async def json(self, *, media: bool = False, optional: bool = False) -> dict[str, Any]:
        """Return the body as an object; {} for none where it is optional. Raises ServeError 400 or 413."""
        data, limits = await self.body(media=media), self.state.config.server.limits
        if optional and not data:
            return {}
        self.size = len(data)
        if len(data) > LARGE_BODY:
            return await asyncio.to_thread(read_json, data, limits)
        return read_json(data, limits)

    def on_disconnect(self, act: Callable[[], None]) -> None:
        """Run `act` once the client has left. The body must have been read."""

        async def watch() -> None:
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    act()
                    return

        self._watching = asyncio.create_task(watch())

    def stop_watching(self) -> None:
        """Stop waiting for the client to leave."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def asks(self, operation: str, body: Mapping[str, Any]) -> None:
        """Note what a request for an answer asks for; keep its body where content is logged."""
        self.operation = operation
        if self.state.content is not None:
            self.asked = body

    def phase(self, name: str, began: float) -> None:
        """Note a part of the request's time that ends now, where requests are traced."""
        if self.state.tracing is not None:
            self.phases.append((name, began, time.monotonic()))

    def log(self, line: Mapping[str, Any]) -> None:
        """Write the request's line of the log."""
        self.line = line
        self.state.log_request(line)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send status and headers."""
        self.started, self.status = True, status
        sent = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in {**self.headers, **headers}.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": sent})

    async def write(self, data: bytes, *, more: bool) -> None:
        """Send a part of the body; `more`: further parts follow."""
        for begin in range(0, len(data) or 1, PART_BYTES):
            end = begin + PART_BYTES
            await self._send(
                {"type": "http.response.body", "body": data[begin:end], "more_body": more or end < len(data)}
            )

    async def answer(self, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
        """Send a JSON answer."""
        await send_json(self, status, value, headers)


Endpoint = Callable[[Call], Awaitable[None]]


def _too_large(most: int) -> ServeError:
    return ServeError(
        413,
        "invalid_request_error",
        "body_too_large",
        f"the body is larger than the {most} bytes that are allowed here",
    )


async def send_json(call: Call, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
    """Send a JSON answer with these headers."""
    data = _encoder.encode(value)
    given = {"content-type": "application/json", "content-length": str(len(data)), **(headers or {})}
    await call.start(status, given)
    await call.write(data, more=False)


async def error_response(call: Call, error: ServeError) -> None:
    """Send an error, before any part of an answer was sent."""
    headers = dict(error.headers)
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    if error.allow is not None:
        headers["allow"] = error.allow
    if error.code == "draining":
        headers["connection"] = "close"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    await send_json(call, error.status, error.body(), headers)


def now() -> int:
    """Return the time in whole seconds since the epoch."""
    return int(time.time())
