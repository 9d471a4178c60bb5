"""Deadlines and limits of connections, which uvicorn's own protocol does not have."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from exl_serve.api.forwarded import TrustedProxies
from exl_serve.api.state import Meter
from exl_serve.config.model import Limits
from exl_serve.errors import ServeError
from exl_serve.metrics import NoMeter

__all__ = ["MAX_HEADERS", "MAX_HEADER_BYTES", "guarded", "keep_alive"]

MAX_HEADERS, MAX_HEADER_BYTES = 100, 16 << 10
OFFER = (b"upgrade", b"http2-settings")
"""Headers with which a client offers another protocol. The server may ignore them (RFC 9110, section 7.8)."""
LEAST_RATE = 1024.0
"""Bytes a second of a body, after `GRACE` seconds."""
GRACE = 5.0
UNREAD_SECONDS, READ_RATE = 30.0, 1024.0
"""A connection is cut whose client reads fewer bytes a second, on average, of an answer in so many seconds."""
UNSENT_BYTES = 64 << 10
"""Bytes that may wait in this process, and as many in the kernel, before a stream waits for its reader."""


def guarded(limits: Limits, proxies: Sequence[str] = (), meter: Meter | None = None) -> type[HttpToolsProtocol]:
    """Return the protocol class for one process: its connections are counted together.

    A connection of a trusted proxy carries requests of many clients: each request counts for its client while it is
    being answered.

    Args:
        limits: An attribute of the class, which may be changed later.
        proxies: Addresses and networks of trusted proxies.
        meter: Counts the connections that are cut because nobody reads.
    """
    members = {
        "limits": limits,
        "proxies": TrustedProxies(proxies),
        "addresses": Counter(),
        "meter": meter or NoMeter(),
    }
    return type("GuardedProtocol", (_Guarded,), members)


def keep_alive(limits: Limits) -> int:
    """Return the seconds that uvicorn keeps an idle connection: whole ones, and at least 1.

    With 0 it would close each connection behind its answer.
    """
    return max(1, math.ceil(limits.keep_alive_seconds))


def _refusing(error: ServeError) -> Any:
    """Return an application that answers with an error."""
    body = msgspec.json.encode(error.body())
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"retry-after", b"%d" % max(1, round(error.retry_after or 0.0))),
    ]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


def _headers_too_large() -> ServeError:
    text = f"the headers have more than {MAX_HEADER_BYTES} bytes or {MAX_HEADERS} lines: send fewer"
    return ServeError(431, "invalid_request_error", "headers_too_large", text)


def _unchunked(cycle: RequestResponseCycle, app: Any) -> Any:
    """Return `app` for a client of HTTP/1.0, which knows no chunks: the end of the connection ends a stream."""

    async def run(scope: Any, receive: Any, send: Any) -> None:
        sized = True

        async def send_on(message: Any) -> None:
            nonlocal sized
            if message["type"] == "http.response.start":
                sized = any(name.lower() == b"content-length" for name, _ in message["headers"])
                if not sized:
                    cycle.chunked_encoding = False
            elif not sized:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_on)

    return run


class _Parser:
    """Parse a request that offers another protocol like one that does not.

    httptools ends such a request after its headers, so its body would be lost. HTTP clients of the JVM offer HTTP/2
    with the first request of a connection.
    """

    def __init__(self, protocol: _Guarded) -> None:
        self._protocol = protocol
        self._parser = self._new()

    def feed_data(self, data: Any) -> None:
        while True:
            try:
                self._parser.feed_data(data)
                return
            except HttpParserUpgrade as upgrade:
                head = self._protocol.take_head()
                if head is None:
                    raise
                # The old parser ignores all that follows a request which closes the connection.
                self._parser = self._new()
                self._parser.feed_data(head)
                data = memoryview(data)[upgrade.args[0] :]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def _new(self) -> HttpRequestParser:
        parser = HttpRequestParser(self._protocol)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
        return parser


class _Ending:
    """The transport of one answer; its protocol decides when it is closed."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, close


class _Guarded(HttpToolsProtocol):
    limits: Limits
    proxies: TrustedProxies
    addresses: Counter[str]
    meter: Meter

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser = _Parser(self)  # type: ignore[assignment]
        #: request line and headers of a request that offers another protocol, without the offer
        self._head: bytes | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: looks whether the client reads
        self._looking: asyncio.TimerHandle | None = None
        #: the request that is being answered; `cycle` is the last one that came
        self._answering: RequestResponseCycle | None = None
        self._asked = False  # a request has begun: `cycle` is there
        self._reading = False  # a message has begun and is not complete
        self._in_body = False  # its headers are complete
        self._last = False  # it has its answer, and is the last one of the connection
        self._body_began = 0.0
        self._paused = 0.0  # seconds in which we did not read
        self._received = 0
        self._header_bytes = self._header_count = 0
        self._unfinished = 0  # bytes since the parser last reported something
        self._proxied = False
        #: addresses that this connection counts for: its own, or those of a proxy's unanswered requests, in order; None
        #: is that of a request over the limit
        self._counted: deque[str | None] = deque()
        self._refusal: ServeError | None = None
        #: the error that follows the answers of the requests before it
        self._deferred: ServeError | None = None

    @property
    def _waiting(self) -> bool:
        """Whether the client waits for an answer or the rest of one."""
        return self._answering is not None and not self._answering.response_complete

    # ---- connections -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(UNSENT_BYTES)  # that of TLS is higher
        with contextlib.suppress(OSError, AttributeError):  # not TCP, or a system without it
            # Without it the kernel takes megabytes, and it seems for seconds that a slow client reads nothing.
            own = transport.get_extra_info("socket")
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        limits = self.limits
        if len(self.connections) > limits.max_connections:
            text = f"{limits.max_connections} connections are open: try again"
            self._refuse(ServeError.unavailable("too_many_connections", text, 1.0))
            return
        peer = None if self.client is None else self.client[0]
        self._proxied = self.proxies.trusts(peer)
        if peer is not None and not self._proxied and (refusal := self._count(self.proxies.client(peer, ()))):
            self._refuse(refusal)
            return
        self._arm(limits.header_seconds, self._header_deadline)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._looking is not None:
            self._looking.cancel()
        if self._answering is not None:
            self._answering.transport = self.transport  # no cycle of references is left
            if not self._answering.response_complete:
                self._answering.disconnected = True  # uvicorn marks `cycle` only
                self._answering.message_event.set()
        while self._counted:
            self._forget_first()
        super().connection_lost(exc)

    def _count(self, address: str) -> ServeError | None:
        """Count a connection, or a request of a proxy; returns the error for one too many."""
        most = self.limits.max_connections_per_address
        if self.addresses[address] >= most:
            text = f"this address has {most} connections or requests open: use fewer"
            return ServeError(429, "rate_limit_error", "too_many_requests", text, retry_after=1.0)
        self.addresses[address] += 1
        self._counted.append(address)
        return None

    def _forget_first(self) -> None:
        address = self._counted.popleft()
        if address is None:
            return
        self.addresses[address] -= 1
        if self.addresses[address] <= 0:
            del self.addresses[address]

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._deferred is not None:
            return
        if not self._reading and self._timer is None:
            self._arm(self.limits.header_seconds, self._header_deadline)
        self._unfinished += len(data)
        super().data_received(data)
        if self._reading and self._unfinished > MAX_HEADER_BYTES:  # the parser keeps a header until its line ends
            self._refuse(_headers_too_large())

    # ---- one message -----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading, self._in_body = True, False
        self._header_bytes = self._header_count = self._received = self._unfinished = 0
        self._paused = 0.0
        if self._timer is None:  # it begins in one segment with the end of the message before it
            self._arm(self.limits.header_seconds, self._header_deadline)

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        self._unfinished = 0
        self._count_header(len(name) + len(value) + 4)
        if not self._in_body:  # a trailer is no header (RFC 9110, section 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise ValueError("no tunnels here")  # httptools would take its body for the next request
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() != "1.0"):
            self._refusal = ServeError.invalid(f"the request has {hosts} host headers: send one", code="bad_request")
            raise ValueError("not one host")
        if self.parser.should_upgrade():
            lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
            lines += [b"%s: %s" % header for header in self.headers if header[0] not in OFFER]
            self._head = b"\r\n".join(lines) + b"\r\n\r\n"
            return
        self._disarm()
        app = self.app
        if self._proxied:
            peer = None if self.client is None else self.client[0]
            refusal = self._count(self.proxies.client(peer, self.headers))
            if refusal is not None:
                self._counted.append(None)
                self.app = _refusing(refusal)  # an answer like any other: the proxy's connection stays
        try:
            super().on_headers_complete()
        finally:
            self.app = app
        self._asked = self._in_body = True
        self._body_began = self.loop.time()
        self._arm(min(1.0, self.limits.body_seconds), self._body_check)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self.transport.is_closing():
            return  # it follows the connection's last request
        self._answering = cycle
        cycle.transport = _Ending(self.transport, self._end)  # type: ignore[assignment]
        if cycle.scope["http_version"] == "1.0":
            app = _unchunked(cycle, app)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._received += len(body)
        self._unfinished = 0
        super().on_body(body)

    def take_head(self) -> bytes | None:
        """Return the head to parse instead of one with an offer, once."""
        head, self._head = self._head, None
        return head

    def on_message_complete(self) -> None:
        if self._head is not None:
            return
        self._reading = False
        self._disarm()
        super().on_message_complete()
        if self._last:
            self.transport.close()

    def _end(self) -> None:
        """Close the connection, but not while the client sends the body of a request that has its answer: many clients
        do not look for an answer after a reset (RFC 9112, section 9.6).
        """
        answering = self._answering
        if answering is not None and answering.response_complete and answering.more_body:
            self._last = True  # the body has a time limit, as everywhere
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        if self._proxied and self._counted:
            self._forget_first()
        super().on_response_complete()
        if self._deferred is not None and not self._waiting and not self.transport.is_closing():
            self._send_refusal(self._deferred)
        self._watch()

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES or self._header_count > MAX_HEADERS:
            self._refusal = _headers_too_large()
            raise ValueError("too many headers")  # ends the parser; `send_400_response` follows

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
        answered = not self._asked or self.cycle.response_complete
        if not self._reading:
            if answered:
                self.transport.close()  # nothing was sent at all, or only an empty line after an answer
            return
        if not answered:  # a pipelined message after the answer may wait
            self._arm(self.limits.header_seconds, self._header_deadline)
            return
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

    def pause_writing(self) -> None:
        """Handle that more waits for the client than may: nothing is written until it has read."""
        super().pause_writing()
        self._watch()

    # ---- clients that do not read ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look in a while whether the client reads what waits for it."""
        if self._looking is not None:
            self._looking.cancel()
        waits = self.transport.get_write_buffer_size()
        self._looking = self.loop.call_later(UNREAD_SECONDS, self._look, waits) if waits else None

    def _look(self, before: int) -> None:
        """Cut the connection if the client has read too little of `before` bytes, also one that is being closed: it
        would stay until the client has read all.
        """
        self._looking = None
        waits = self.transport.get_write_buffer_size()
        answering = self._answering  # not `cycle`: after the last answer it may be one that gets none
        if answering is not None and not answering.response_complete and not self.flow.write_paused:
            return  # the next answer has begun, and adds to what waits
        if waits and before - waits < READ_RATE * UNREAD_SECONDS:
            self.meter.count("exl_stalled_streams_total")
            self.transport.abort()
        else:
            self._watch()

    # ---- refusals --------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or ServeError.invalid("this is not an HTTP/1.1 request", code="bad_request"))

    def _refuse(self, error: ServeError) -> None:
        """Answer without the application, after the answers of all requests that came before, and close the
        connection.
        """
        self._disarm()
        if self.transport.is_closing():
            return
        if self._reading and self._in_body:  # the error is in the body of `cycle`
            if not self.pipeline:
                self._break_off(error)
                return
            self.pipeline.popleft()  # `cycle`, which has not begun
        if self._waiting:
            self._deferred = error
        else:
            self._send_refusal(error)

    def _break_off(self, error: ServeError) -> None:
        """End the request that is being answered. Its answer is the error, unless another one has begun."""
        if not self.cycle.response_started:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._send_refusal(error)
            return
        self._watch()
        self.transport.close()

    def _send_refusal(self, error: ServeError) -> None:
        body = msgspec.json.encode(error.body())
        lines = [STATUS_LINE[error.status], b"content-type: application/json\r\nconnection: close\r\n"]
        if error.retry_after is not None:
            lines.append(b"retry-after: %d\r\n" % max(1, round(error.retry_after)))
        lines.append(b"content-length: %d\r\n\r\n" % len(body))
        self.transport.write(b"".join(lines) + body)
        self._watch()
        self.transport.close()
