"""A client that reads nothing: its stream ends, and another cancellation of its task stays one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from exl_serve.api import generation
from exl_serve.api.app import create_app
from exl_serve.api.state import AppState, Caller
from exl_serve.config.model import ModelConfig, ServeConfig
from exl_serve.metrics import NoMeter
from exl_serve.stream import answer_queue
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer, LocalHandle, LocalModels
from exl_serve.testing.waiting import HANG_SECONDS, until

BODY = json.dumps({"model": "scripted", "prompt": "hm", "max_tokens": 900, "ignore_eos": True, "stream": True}).encode()
SCOPE: dict[str, Any] = {
    "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
    "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
    "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
    "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
}  # fmt: skip


class Counting(NoMeter):
    """Records the names of what is counted."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        self.names.append(name)


async def streamed(engine: EngineThread, meter: NoMeter, act: Callable[[asyncio.Task[None]], Awaitable[None]]) -> int:
    """Run a stream whose client stops reading at its third piece; returns the pieces that it was sent."""
    handle = LocalHandle(engine, ModelConfig(id="scripted", path=engine.card.folder, device="cpu", engine="free"))
    app = create_app(AppState(ServeConfig(), LocalModels([handle]), meter, lambda scope, needed: Caller()))
    bodies = iter([{"type": "http.request", "body": BODY, "more_body": False}])
    pieces = 0

    async def receive() -> Any:
        found = next(bodies, None)
        return found if found is not None else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal pieces
        if message["type"] == "http.response.body":
            pieces += 1
            if pieces == 3:
                await asyncio.Event().wait()

    task = asyncio.ensure_future(app(SCOPE, receive, send))
    try:
        async with asyncio.timeout(HANG_SECONDS):
            while pieces < 3:
                await asyncio.sleep(0.01)
            await act(task)
    finally:
        await handle.close()
    return pieces


def test_a_stream_that_nobody_reads_ends(scripted: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "STALLED_SECONDS", 0.3)
    meter = Counting()

    async def ends(task: asyncio.Task[None]) -> None:
        await task

    assert asyncio.run(streamed(scripted, meter, ends)) == 3
    assert meter.names.count("exl_stalled_streams_total") == 1
    until(lambda: not scripted.generator.num_remaining_jobs())


def test_a_cancelled_write_is_no_stalled_one(scripted: EngineThread) -> None:
    meter = Counting()

    async def cancelled(task: asyncio.Task[None]) -> None:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert asyncio.run(streamed(scripted, meter, cancelled)) == 3
    assert "exl_stalled_streams_total" not in meter.names
    until(lambda: not scripted.generator.num_remaining_jobs())


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_is_larger_than_what_may_wait_goes_on(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(answer_queue, "HIGH_WATER", 2000)
    monkeypatch.setattr(answer_queue, "LOW_WATER", 500)
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hm"}], "max_tokens": 8, "ignore_eos": True}
    more = {"n": 8, "logprobs": True, "top_logprobs": 20, "stream": stream}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body | more, timeout=HANG_SECONDS)
    assert answer.status_code == 200, answer.text
    assert answer.text.count('"finish_reason":"length"') == 8
