"""Bytes that are almost an HTTP request: the server answers with an error of its own or closes, and goes on."""

from __future__ import annotations

import contextlib
import json
import socket

import httpx
from effort import trials
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exl_serve.config.model import Limits, ModelConfig, ServeConfig, ServerConfig
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS

BODY = json.dumps({"prompt": "Once", "max_tokens": 2, "stream": False}).encode()
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n" % len(BODY) + BODY
)
PIECES = [
    b"transfer-encoding: chunked\r\n",
    b"content-length: 99999999999999999999\r\n",
    b"content-length: -1\r\n",
    b"expect: 100-continue\r\n",
    b"upgrade: websocket\r\nconnection: upgrade\r\n",
    b"\0",
    b"\r\n",
    b"\r\n\r\n",
    b"\xff\xfe",
    b"HTTP/9.9",
    b"{" * 200,
    b"GET / HTTP/1.1\r\n\r\n",
]

edits = st.lists(
    st.tuples(
        st.sampled_from(["replace", "insert", "delete", "cut", "double"]),
        st.integers(0, len(REQUEST) - 1),
        st.one_of(st.sampled_from(PIECES), st.binary(max_size=8)),
    ),
    min_size=1,
    max_size=5,
)


def edited(changes: list[tuple[str, int, bytes]]) -> bytes:
    data = REQUEST
    for kind, at, piece in changes:
        if kind == "replace":
            data = data[:at] + piece + data[at + len(piece) :]
        elif kind == "insert":
            data = data[:at] + piece + data[at:]
        elif kind == "delete":
            data = data[:at] + data[at + max(1, len(piece)) :]
        elif kind == "cut":
            data = data[:at]
        else:
            data += data[at:]
    return data


def send(port: int, *requests: bytes) -> list[bytes]:
    """The whole answers to these requests, which are sent at once over connections of their own."""
    with contextlib.ExitStack() as stack:
        connections = []
        for data in requests:
            connection = socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS)
            connections.append(stack.enter_context(connection))
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
        return [read(connection) for connection in connections]


def read(connection: socket.socket) -> bytes:
    answer = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            answer += part
    return answer


def test_requests_with_edited_bytes(scripted: EngineThread) -> None:
    model = ModelConfig(id="scripted", path=scripted.card.folder)
    limits = Limits(header_seconds=0.3, body_seconds=0.6, keep_alive_seconds=0.3)
    live = LiveServer({"scripted": scripted}, [model], ServeConfig(server=ServerConfig(limits=limits)))
    port = int(live.url.rpartition(":")[2])

    @settings(max_examples=trials(12, 3), suppress_health_check=list(HealthCheck))
    @given(st.lists(edits, min_size=16, max_size=16))
    def check(many: list[list[tuple[str, int, bytes]]]) -> None:
        for answer in send(port, *map(edited, many)):
            if not answer:
                continue
            assert answer.startswith(b"HTTP/1.1 "), answer[:200]
            status = int(answer[9:12])
            assert status < 500 or b'"unsupported"' in answer, answer[:1000]
            assert b"Traceback" not in answer

    try:
        assert send(port, REQUEST)[0].startswith(b"HTTP/1.1 200 ")
        check()
        assert send(port, REQUEST)[0].startswith(b"HTTP/1.1 200 ")
        assert httpx.get(f"{live.url}/health/ready", timeout=HANG_SECONDS).status_code == 200
        listed = httpx.get(f"{live.url}/v1/requests", timeout=HANG_SECONDS).json()["data"]
        assert listed == []
    finally:
        live.close()
