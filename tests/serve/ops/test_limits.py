"""Slow and greedy clients, over raw sockets: they are turned away, the others are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from effort import trials

from exl_serve.api import limits as api_limits
from exl_serve.api.__main__ import server_settings
from exl_serve.api.limits import guarded
from exl_serve.config.model import Limits, ServeConfig, ServerConfig
from exl_serve.metrics import NoMeter
from exl_serve.testing import server as testing_server

SLOW = Limits(header_seconds=0.3, body_seconds=1.0, keep_alive_seconds=0.5)
PATIENT = Limits(header_seconds=600, body_seconds=600, keep_alive_seconds=600)


async def app(scope: Any, receive: Any, send: Any) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message["body"])
        more = message["more_body"]
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def stream(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for part in (b"data: a\n\n", b"", b"data: b\n\n"):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


class Counting(NoMeter):
    """Records the names of what is counted."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        self.names.append(name)


@asynccontextmanager
async def server(limits: Limits, proxies: tuple[str, ...] = (), meter: NoMeter | None = None) -> AsyncIterator[int]:
    config = uvicorn.Config(
        app,
        port=0,
        http=guarded(limits, proxies, meter),
        ws="none",
        lifespan="off",
        log_level="critical",
        timeout_keep_alive=api_limits.keep_alive(limits),
        backlog=4096,
    )
    running = uvicorn.Server(config)
    task = asyncio.create_task(running.serve())
    while not running.started:
        await asyncio.sleep(0.01)
    yield running.servers[0].sockets[0].getsockname()[1]
    running.should_exit = running.force_exit = True
    await task


def run(
    limits: Limits,
    work: Callable[[int], Awaitable[None]],
    proxies: tuple[str, ...] = (),
    meter: NoMeter | None = None,
) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), server(limits, proxies, meter) as port:
            await work(port)

    asyncio.run(main())


async def ask(port: int, data: bytes = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n") -> bytes:
    """The whole answer, to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = await reader.read()
    writer.close()
    return answer


def code(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


CLOSE = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"


def test_slow_headers_end_only_their_connection() -> None:
    async def work(port: int) -> None:
        slow = asyncio.create_task(ask(port, b"POST / HTTP/1.1\r\nhost: a\r\n"))
        assert (await ask(port, CLOSE)).endswith(b"\r\n\r\n0")
        assert code(await slow) == (408, "header_timeout")
        assert await ask(port, b"") == b""

    run(SLOW, work)


async def late(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(3 * SLOW.header_seconds)
    await early(scope, receive, send)


def test_headers_that_begin_after_a_request_have_their_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin while the answer is on its way, and are never complete."""
    monkeypatch.setattr(f"{__name__}.app", late)

    async def work(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\nGET / HTTP/1.1\r\nx: ")
        await reader.readuntil(b"\r\n\r\nno")
        assert code(await reader.read()) == (408, "header_timeout")
        writer.close()

    run(SLOW, work)


def test_an_empty_line_after_an_answer_is_no_request() -> None:
    """Some clients send one after a body."""

    async def work(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n0")
        writer.write(b"\r\n")
        assert await reader.read() == b""
        writer.close()

    run(SLOW, work)


@pytest.mark.parametrize("hosts", [b"", b"host: a\r\nhost: b\r\n", b"host: a\r\nHost: a\r\n"])
def test_a_request_has_one_host(hosts: bytes) -> None:
    """RFC 9112, section 3.2. A proxy and this server might read two of them differently."""

    async def work(port: int) -> None:
        assert code(await ask(port, b"GET / HTTP/1.1\r\n" + hosts + b"\r\n")) == (400, "bad_request")
        answer = await ask(port, b"GET / HTTP/1.0\r\n" + hosts + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 400 " if hosts else b"HTTP/1.1 200 ")

    run(PATIENT, work)


def test_a_slow_body_ends_with_408() -> None:
    async def work(port: int) -> None:
        answer = await ask(port, b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\nabc")
        assert code(answer) == (408, "body_timeout")

    run(SLOW, work)


def test_a_body_that_drips_ends_before_its_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes come, but fewer than 1,024 a second. None comes after the answer: it would reset the connection."""
    monkeypatch.setattr(api_limits, "GRACE", 0.1)

    async def work(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n")
        for _ in range(4):
            writer.write(b"x")
            await asyncio.sleep(0.05)
        assert code(await reader.read()) == (408, "body_timeout")
        writer.close()

    run(PATIENT, work)


def test_a_body_that_comes_in_pieces_is_read() -> None:
    async def work(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 200000\r\n\r\n")
        for _ in range(20):
            writer.write(b"x" * 10_000)
            await writer.drain()
            await asyncio.sleep(0.001)
        assert (await reader.read()).endswith(b"\r\n\r\n200000")
        writer.close()

    run(PATIENT, work)


STARTED: list[str] = []
"""Methods of the requests that reached `early`."""


async def early(scope: Any, receive: Any, send: Any) -> None:
    STARTED.append(scope["method"])
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


@pytest.mark.parametrize("end", [b"1.1\r\nconnection: close", b"1.0\r\nconnection: keep-alive"])
@pytest.mark.parametrize("after", [b"", CLOSE])
def test_a_last_request_that_is_answered_early_is_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch, end: bytes, after: bytes
) -> None:
    """A client that sends its whole body before it reads would see a reset connection instead of the answer."""
    STARTED.clear()
    monkeypatch.setattr(f"{__name__}.app", early)

    async def work(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/" + end + b"\r\nhost: a\r\ncontent-length: 20000000\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        for part in [bytes(1_000_000)] * 19 + [bytes(1_000_000) + after]:
            writer.write(part)
            await writer.drain()
        assert head.startswith(b"HTTP/1.1 401 ")
        assert await reader.read() == b"no"
        writer.close()
        assert STARTED == ["POST"]

    run(PATIENT, work)


@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
def test_a_request_that_is_answered_early_has_one_answer(monkeypatch: pytest.MonkeyPatch, connection: bytes) -> None:
    """An error in its body, or a body that does not come, ends the connection."""
    monkeypatch.setattr(f"{__name__}.app", early)
    post = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: " + connection + b"\r\ntransfer-encoding: chunked\r\n\r\n"

    async def work(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post)
        await reader.readuntil(b"no")
        writer.write(b"zz\r\n")
        assert await reader.read() == b""
        writer.close()
        assert (await ask(port, post)).endswith(b"\r\n\r\nno")

    run(SLOW, work)


@pytest.mark.parametrize(
    "length", [b"content-length: 3\r\n\r\nabc", b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("size", [1, 60, 100_000])
def test_a_request_that_offers_another_protocol_keeps_its_body(length: bytes, size: int) -> None:
    """HTTP clients of the JVM offer HTTP/2; `size`: bytes of a segment."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    post = b"POST / HTTP/1.1\r\nhost: a\r\n" + offer + length

    async def work(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data = post + b"GET / HTTP/1.1\r\nhost: a\r\n" + offer + b"\r\n" + post + CLOSE
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)
        answers = (await reader.read()).split(b"HTTP/1.1 ")[1:]
        writer.close()
        assert [(one[:3], one[-1:]) for one in answers] == [
            (b"200", b"3"),
            (b"200", b"0"),
            (b"200", b"3"),
            (b"200", b"0"),
        ]

    run(PATIENT, work)


def test_a_stream_for_a_client_of_http_1_0_has_no_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.app", stream)

    async def work(port: int) -> None:
        for method, body in ((b"GET", b"data: a\n\ndata: b\n\ndata: [DONE]\n\n"), (b"HEAD", b"")):
            head, _, got = (await ask(port, method + b" / HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
            assert b"chunked" not in head
            assert b"\r\nconnection: close" in head
            assert got == body
        assert b"\r\ntransfer-encoding: chunked" in await ask(port, CLOSE)

    run(PATIENT, work)


@pytest.mark.parametrize("end", [b"1.1\r\nconnection: close, upgrade", b"1.0\r\nconnection: upgrade"])
def test_a_request_that_offers_another_protocol_may_end_its_connection(end: bytes) -> None:
    head = b"POST / HTTP/" + end + b"\r\nhost: a\r\nupgrade: h2c\r\ncontent-length: 3\r\n\r\n"

    async def work(port: int) -> None:
        answer = await ask(port, head + b"abc" + CLOSE)
        assert answer.endswith(b"\r\n\r\n3")
        assert answer.count(b"HTTP/1.1 ") == 1

    run(PATIENT, work)


def test_data_after_an_offer_of_another_protocol_is_checked() -> None:
    offer = b"host: a\r\nconnection: upgrade\r\nupgrade: h2c\r\n"

    async def work(port: int) -> None:
        assert code(await ask(port, b"POST / HTTP/1.1\r\n" + offer + b"transfer-encoding: chunked\r\n\r\nzz\r\n")) == (
            400,
            "bad_request",
        )
        assert code(await ask(port, b"CONNECT a:1 HTTP/1.1\r\n" + offer + b"\r\n")) == (400, "bad_request")

    run(PATIENT, work)


async def names(scope: Any, receive: Any, send: Any) -> None:
    body = b" ".join(name for name, _ in scope["headers"])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})


def test_trailers_are_no_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that removes or checks headers need not look at trailers."""
    monkeypatch.setattr(f"{__name__}.app", names)

    async def work(port: int) -> None:
        post = b"POST / HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx-api-key: k\r\n\r\n"
        assert (await ask(port, post)).endswith(b"\r\n\r\nhost transfer-encoding")

    run(PATIENT, work)


def test_connect_is_rejected() -> None:
    """The parser would take its body for another request, which a proxy has not seen."""

    async def work(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"CONNECT /a HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(CLOSE))
        first = await reader.readuntil(b"\r\n\r\n")
        writer.write(CLOSE)
        rest = await reader.read()
        writer.close()
        assert code(first + rest) == (400, "bad_request")

    run(PATIENT, work)


def test_an_idle_connection_is_closed_after_its_answer() -> None:
    async def work(port: int) -> None:
        assert (await ask(port)).endswith(b"\r\n\r\n0")

    run(SLOW, work)


@pytest.mark.parametrize("headers", [b"x: " + b"y" * 20_000 + b"\r\n", b"".join(b"x%d: 1\r\n" % i for i in range(200))])
def test_large_headers_are_refused(headers: bytes) -> None:
    async def work(port: int) -> None:
        assert code(await ask(port, b"GET / HTTP/1.1\r\nhost: a\r\n" + headers + b"\r\n")) == (431, "headers_too_large")
        assert code(await ask(port, b"GET /" + b"u" * 20_000 + b" HTTP/1.1\r\n\r\n")) == (431, "headers_too_large")

    run(PATIENT, work)


HEAD = b"GET / HTTP/1.1\r\nhost: a\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n"


@pytest.mark.parametrize("begin", [HEAD + b"x: ", HEAD, CHUNKED + b"0\r\nx: ", CHUNKED + b"1;x="])
def test_a_line_without_an_end_is_not_kept(begin: bytes) -> None:
    """A value, a name, a trailer and the extension of a chunk."""

    async def work(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for part in (begin, *[b"y" * 6_000] * 4):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)  # the server runs in this loop, and receives the part meanwhile
        assert code(await reader.read()) == (431, "headers_too_large")
        writer.close()

    run(PATIENT, work)


def test_headers_below_the_limit_and_long_chunks_may_come_in_any_parts() -> None:
    headers = b"x: " + b"y" * 16_000 + b"\r\n"
    size = 40_000
    data = HEAD.replace(b"GET", b"POST") + headers + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    data += b"%x\r\n" % size + b"b" * size + b"\r\n0\r\n\r\n"

    async def work(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for begin in range(0, len(data), 1_500):
            writer.write(data[begin : begin + 1_500])
            await writer.drain()
            await asyncio.sleep(0)
        assert (await reader.read()).endswith(b"\r\n\r\n%d" % size)
        writer.close()

    run(PATIENT, work)


def test_a_target_without_a_path_is_answered_400() -> None:
    """Also after a request that has its answer."""
    bad = b"GET http://a HTTP/1.1\r\nhost: a\r\n\r\n"

    async def work(port: int) -> None:
        assert code(await ask(port, bad)) == (400, "bad_request")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n0")
        writer.write(bad)
        assert code(await reader.read()) == (400, "bad_request")
        writer.close()

    run(SLOW, work)


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00", b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"])
def test_bytes_that_are_no_request_are_answered_400(data: bytes) -> None:
    async def work(port: int) -> None:
        assert code(await ask(port, data)) == (400, "bad_request")

    run(PATIENT, work)


def test_connections_of_an_address_are_limited() -> None:
    async def work(port: int) -> None:
        open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert code(await ask(port)) == (429, "too_many_requests")  # the server accepts them in order
        for _, writer in open_ones:
            writer.close()
            await writer.wait_closed()
        while not (await ask(port, CLOSE)).endswith(b"\r\n\r\n0"):  # until the server has noticed
            await asyncio.sleep(0.01)

    run(Limits(max_connections_per_address=3), work)


def test_behind_a_trusted_proxy_the_requests_of_each_client_are_limited() -> None:
    """The connections of the proxy are no client's, and stay open when a client has too many requests."""

    def head(client: bytes, rest: bytes = b"") -> bytes:
        return b"GET / HTTP/1.1\r\nhost: a\r\nx-forwarded-for: 198.51.100.1, %s\r\n%s\r\n" % (client, rest)

    async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
        lines = (await reader.readuntil(b"\r\n\r\n")).lower()
        size = next(int(line.split()[1]) for line in lines.split(b"\r\n") if line.startswith(b"content-length"))
        return int(lines.split()[1]), await reader.readexactly(size)

    async def work(port: int) -> None:
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        for reader, writer in connections[:3]:  # idle connections of a proxy's pool count for nobody
            writer.write(head(b"203.0.113.5"))
            assert await answer(reader) == (200, b"0")
        for _, writer in connections[:2]:
            writer.write(head(b"203.0.113.5", b"content-length: 1\r\n"))  # open until the body is there
        reader, writer = connections[2]
        status = 200
        while status == 200:  # until the server has read those two
            writer.write(head(b"203.0.113.5"))
            status, body = await answer(reader)
        assert (status, json.loads(body)["error"]["code"]) == (429, "too_many_requests")
        writer.write(head(b"203.0.113.6"))
        assert await answer(reader) == (200, b"0")
        connections[0][1].write(b"x")
        assert await answer(connections[0][0]) == (200, b"1")
        writer.write(head(b"203.0.113.5"))
        assert await answer(reader) == (200, b"0")
        for _, writer in connections:
            writer.close()

    run(Limits(max_connections_per_address=2), work, ("127.0.0.0/8",))


def test_a_clients_own_forwarding_header_is_not_believed() -> None:
    async def work(port: int) -> None:
        open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        spoofed = b"GET / HTTP/1.1\r\nhost: a\r\nx-forwarded-for: 203.0.113.5\r\n\r\n"
        assert code(await ask(port, spoofed)) == (429, "too_many_requests")
        for _, writer in open_ones:
            writer.close()

    run(Limits(max_connections_per_address=3), work, ("10.0.0.0/8", "unix"))


def test_connections_of_the_process_are_limited() -> None:
    async def work(port: int) -> None:
        open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        answer = await ask(port)
        assert code(answer) == (503, "too_many_connections")
        assert b"retry-after: 1" in answer
        for _, writer in open_ones:
            writer.close()

    run(Limits(max_connections=3), work)


def test_idle_connections_take_nothing_from_others() -> None:
    async def work(port: int) -> None:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(trials(2000, 500))]
        answers = await asyncio.gather(*(ask(port, CLOSE) for _ in range(50)))
        assert all(answer.endswith(b"\r\n\r\n0") for answer in answers)
        for _, writer in idle:
            writer.close()

    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 5000:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    run(Limits(max_connections_per_address=10_000, max_connections=10_000, header_seconds=600), work)


@pytest.mark.parametrize(("seconds", "kept"), [(0.1, 1), (0.9, 1), (1.0, 1), (1.5, 2), (75.0, 75)])
def test_idle_connections_stay_open_for_as_long_as_configured(
    monkeypatch: pytest.MonkeyPatch, seconds: float, kept: int
) -> None:
    config = ServeConfig(server=ServerConfig(limits=Limits(keep_alive_seconds=seconds)))
    assert server_settings(config, app, guarded(config.server.limits)).timeout_keep_alive == kept
    found: list[uvicorn.Config] = []

    class Kept(uvicorn.Server):
        def __init__(self, settings: uvicorn.Config) -> None:
            found.append(settings)
            super().__init__(settings)

    monkeypatch.setattr(uvicorn, "Server", Kept)
    testing_server.LiveServer({}, [], config).close()
    assert found[0].timeout_keep_alive == kept


LARGE = 4 << 20


async def large(scope: Any, receive: Any, send: Any) -> None:
    """Answer with more than the kernel takes for a client that does not read."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LARGE)]})
    await send({"type": "http.response.body", "body": b"x" * LARGE})


def small_client(port: int) -> socket.socket:
    """Return a connected socket that takes little before it is read."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.connect(("127.0.0.1", port))
    found.setblocking(False)
    return found


async def received(client: socket.socket, pause: float = 0.0) -> int:
    """Read to the end with a pause after each piece; returns the number of bytes."""
    loop, size = asyncio.get_running_loop(), 0
    with client, contextlib.suppress(ConnectionResetError):
        while part := await loop.sock_recv(client, 1 << 16):
            size += len(part)
            await asyncio.sleep(pause)
    return size


@pytest.mark.parametrize("again", [b"", CLOSE])
def test_a_whole_answer_that_nobody_reads_is_dropped(monkeypatch: pytest.MonkeyPatch, again: bytes) -> None:
    """Also with another request after it."""
    monkeypatch.setattr(f"{__name__}.app", large)
    monkeypatch.setattr(api_limits, "UNREAD_SECONDS", 0.2)
    meter = Counting()

    async def work(port: int) -> None:
        with small_client(port) as client:
            client.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" + again)
            while not meter.names:
                await asyncio.sleep(0.01)
            assert await received(client) < LARGE

    run(PATIENT, work, meter=meter)
    assert meter.names == ["exl_stalled_streams_total"]


def test_a_last_answer_that_nobody_reads_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another request follows it, which gets no answer, and so little waits that writing goes on."""
    monkeypatch.setattr(f"{__name__}.app", large)
    monkeypatch.setattr(api_limits, "UNREAD_SECONDS", 0.2)
    monkeypatch.setattr(api_limits, "UNSENT_BYTES", 2 * LARGE)
    meter = Counting()

    async def work(port: int) -> None:
        with small_client(port) as client:
            client.send(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n" + CLOSE)  # which is not granted
            while not meter.names:
                await asyncio.sleep(0.01)

    run(PATIENT, work, meter=meter)


def test_a_whole_answer_that_is_read_slowly_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client takes many times as long as a client may that reads nothing."""
    monkeypatch.setattr(f"{__name__}.app", large)
    monkeypatch.setattr(api_limits, "UNREAD_SECONDS", 1.0)
    monkeypatch.setattr(api_limits, "READ_RATE", 1.0)
    meter = Counting()

    async def work(port: int) -> None:
        client = small_client(port)
        client.send(CLOSE)
        assert await received(client, 0.003) > LARGE

    run(PATIENT, work, meter=meter)
    assert meter.names == []
