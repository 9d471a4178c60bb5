"""Clients that read nothing, or more slowly than an answer comes."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from held import Held

from exl_serve.api import limits
from exl_serve.api.__main__ import end_requests
from exl_serve.api.app import create_app
from exl_serve.api.state import AppState, Caller
from exl_serve.config.model import ModelConfig, ServeConfig
from exl_serve.metrics import NoMeter
from exl_serve.stream import answer_queue
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer, LocalHandle, LocalModels
from exl_serve.testing.waiting import HANG_SECONDS, until

MESSAGES = [{"role": "user", "content": "hm"}]
SCORED = {"model": "scripted", "messages": MESSAGES, "ignore_eos": True, "n": 8, "logprobs": True, "top_logprobs": 20}
"""Kilobytes for each token."""


class Counting(NoMeter):
    """Records the names of what is counted."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        self.names.append(name)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def test_a_stream_that_nobody_reads_ends(scripted: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has the request's own line, and none of the server's library."""
    monkeypatch.setattr(limits, "UNREAD_SECONDS", 0.3)
    meter, lines, log = Counting(), Lines(), logging.getLogger("uvicorn.error")
    model = ModelConfig(id="scripted", path=scripted.card.folder, device="cpu", engine="free")
    live = LiveServer({"scripted": scripted}, [model], meter=meter)
    log.addHandler(lines)
    try:
        place = urlsplit(live.url)
        body = json.dumps(SCORED | {"max_tokens": 900, "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((place.hostname, place.port))
            client.sendall(head.encode() + body)
            until(lambda: "exl_stalled_streams_total" in meter.names)
            until(lambda: "exl_disconnects_total" in meter.names)
        until(lambda: not scripted.generator.num_remaining_jobs())
    finally:
        live.close()
        log.removeHandler(lines)
    assert meter.names.count("exl_stalled_streams_total") == 1
    assert lines.texts == []


def test_a_client_that_leaves_with_another_request_queued_ends_its_stream(
    scripted: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter, lines, logs = Counting(), Lines(), [logging.getLogger(name) for name in ("uvicorn.error", "exl_serve")]
    held = Held(scripted, monkeypatch, steps=5)
    model = ModelConfig(id="scripted", path=scripted.card.folder, device="cpu", engine="free")
    live = LiveServer({"scripted": scripted}, [model], meter=meter)
    for log in logs:
        log.addHandler(lines)
    try:
        place = urlsplit(live.url)
        body = json.dumps({"model": "scripted", "messages": MESSAGES, "max_tokens": 900, "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection((place.hostname or "", place.port or 0)) as client:
            client.sendall(2 * (head.encode() + body))
            assert client.recv(100).startswith(b"HTTP/1.1 200")

        def left() -> bool:
            held.steps += 1  # a write tells that the client has left
            return "exl_disconnects_total" in meter.names

        until(left)
        held.release()
        until(lambda: not scripted.generator.num_remaining_jobs())
    finally:
        live.close()
        for log in logs:
            log.removeHandler(lines)
    assert lines.texts == []


def test_a_large_answer_waits_for_its_client_after_each_part(scripted: EngineThread) -> None:
    """Connections with TLS take whatever they are given, and do not tell how much of it nobody has read."""
    body = SCORED | {"max_tokens": 300}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"host", b"127.0.0.1")],
        "client": ("127.0.0.1", 1),
    }
    sizes: list[int] = []

    async def ask() -> None:
        handle = LocalHandle(scripted, ModelConfig(id="scripted", path=scripted.card.folder))
        state = AppState(ServeConfig(), LocalModels([handle]), NoMeter(), lambda scope, needed: Caller())
        bodies = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

        async def receive() -> Any:
            return next(bodies, None) or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sizes.append(len(message.get("body", b"")))
            if len(sizes) > 3:
                unread.set()
                await asyncio.Event().wait()

        unread = asyncio.Event()
        task = asyncio.ensure_future(create_app(state)(scope, receive, send))
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await unread.wait()
            await end_requests([task])
        finally:
            await handle.close()

    asyncio.run(ask())
    assert len(sizes) == 4
    assert sum(sizes) < 256 << 10


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_is_larger_than_what_may_wait_goes_on(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(answer_queue, "HIGH_WATER", 2000)
    monkeypatch.setattr(answer_queue, "LOW_WATER", 500)
    body = SCORED | {"max_tokens": 8, "stream": stream}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=HANG_SECONDS)
    assert answer.status_code == 200, answer.text
    assert answer.text.count('"finish_reason":"length"') == 8
