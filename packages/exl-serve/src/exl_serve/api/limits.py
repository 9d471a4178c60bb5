"""Deadlines and limits of connections, which uvicorn's own protocol does not have."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from exl_serve.config.model import Limits
from exl_serve.errors import ServeError

__all__ = ["MAX_HEADERS", "MAX_HEADER_BYTES", "guarded", "keep_alive"]

MAX_HEADERS, MAX_HEADER_BYTES = 100, 16 << 10
LEAST_RATE = 1024.0
"""Bytes a second of a body, after `GRACE` seconds."""
GRACE = 5.0


def guarded(limits: Limits) -> type[HttpToolsProtocol]:
    """Return the protocol class for one process: its connections are counted together.

    `limits` is an attribute of the class and may be changed later.
    """
    return type("GuardedProtocol", (_Guarded,), {"limits": limits, "addresses": Counter()})


def keep_alive(limits: Limits) -> int:
    """Return the seconds that uvicorn keeps an idle connection: whole ones, and at least 1.

    With 0 it would close each connection behind its answer.
    """
    return max(1, math.ceil(limits.keep_alive_seconds))


class _Guarded(HttpToolsProtocol):
    limits: Limits
    addresses: Counter[str]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._timer: asyncio.TimerHandle | None = None
        self._asked = False  # a request has begun: `cycle` is there
        self._reading = False  # a message has begun and is not complete
        self._body_began = 0.0
        self._paused = 0.0  # seconds in which we did not read
        self._received = 0
        self._header_bytes = self._header_count = 0
        self._counted: str | None = None
        self._refusal: ServeError | None = None

    # ---- connections -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limits = self.limits
        if len(self.connections) > limits.max_connections:
            text = f"{limits.max_connections} connections are open: try again"
            self._refuse(ServeError.unavailable("too_many_connections", text, 1.0))
            return
        if self.client is not None:
            address = self.client[0]
            if self.addresses[address] >= limits.max_connections_per_address:
                text = f"this address has {self.addresses[address]} connections open: use fewer"
                self._refuse(ServeError(429, "rate_limit_error", "too_many_requests", text, retry_after=1.0))
                return
            self._counted = address
            self.addresses[address] += 1
        self._arm(limits.header_seconds, self._header_deadline)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._counted is not None:
            self.addresses[self._counted] -= 1
            if self.addresses[self._counted] <= 0:
                del self.addresses[self._counted]
            self._counted = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self._reading and self._timer is None:
            self._arm(self.limits.header_seconds, self._header_deadline)
        super().data_received(data)

    # ---- one message -----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading = True
        self._header_bytes = self._header_count = self._received = 0
        self._paused = 0.0

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        self._count_header(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._disarm()
        super().on_headers_complete()
        self._asked = True
        self._body_began = self.loop.time()
        self._arm(min(1.0, self.limits.body_seconds), self._body_check)

    def on_body(self, body: bytes) -> None:
        self._received += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._reading = False
        self._disarm()
        super().on_message_complete()

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES or self._header_count > MAX_HEADERS:
            text = f"the headers have more than {MAX_HEADER_BYTES} bytes or {MAX_HEADERS} lines: send fewer"
            self._refusal = ServeError(431, "invalid_request_error", "headers_too_large", text)
            raise ValueError(text)  # ends the parser; `send_400_response` follows

    # ---- deadlines -------------------------------------------------------------------------------------------------

    def _arm(self, seconds: float, act: Any) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, act)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _header_deadline(self) -> None:
        self._timer = None
        if not self._reading and not self._asked:
            self.transport.close()  # nothing was sent at all
            return
        if self._asked and not self.cycle.response_complete:
            return  # an answer is on its way; a pipelined message behind it may wait
        seconds = self.limits.header_seconds
        self._refuse(ServeError(408, "timeout", "header_timeout", f"no complete headers within {seconds:g} seconds"))

    def _body_check(self) -> None:
        self._timer = None
        if not self._reading:
            return
        interval = min(1.0, self.limits.body_seconds)
        if self.flow.read_paused:
            self._paused += interval
        took = self.loop.time() - self._body_began - self._paused
        if took > self.limits.body_seconds or (took > GRACE and self._received < LEAST_RATE * (took - GRACE)):
            text = f"{self._received} bytes of the body came in {took:.0f} seconds: send it faster"
            self._refuse(ServeError(408, "timeout", "body_timeout", text))
            return
        self._arm(interval, self._body_check)

    # ---- refusals --------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or ServeError.invalid("this is not an HTTP/1.1 request", code="bad_request"))

    def _refuse(self, error: ServeError) -> None:
        """Answer without the application, and close the connection."""
        self._disarm()
        if self.transport.is_closing():
            return
        if not self._asked or not self.cycle.response_started or self.cycle.response_complete:
            body = msgspec.json.encode(error.body())
            lines = [STATUS_LINE[error.status], b"content-type: application/json\r\nconnection: close\r\n"]
            if error.retry_after is not None:
                lines.append(b"retry-after: %d\r\n" % max(1, round(error.retry_after)))
            lines.append(b"content-length: %d\r\n\r\n" % len(body))
            self.transport.write(b"".join(lines) + body)
            if self._asked:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
        self.transport.close()
