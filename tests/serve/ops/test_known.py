"""Requests to an API worker that has not read its models' tokenizers yet."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from served import SECONDS, Served

from exl_generate import bundled
from exl_serve.api import app
from exl_serve.api.state import AppState, Caller
from exl_serve.config.model import ServeConfig
from exl_serve.metrics import NoMeter
from exl_serve.testing.server import LocalModels
from exl_serve.testing.waiting import until

Answers = dict[str, tuple[int, str]]


async def ask(state: AppState, *paths: str) -> Answers:
    """Return status and error code of each path, asked at once."""
    transport = httpx.ASGITransport(app.create_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client, asyncio.timeout(SECONDS):
        answers = await asyncio.gather(*(client.get(path) for path in paths))

    def code(answer: httpx.Response) -> str:
        return "" if answer.status_code == 200 else str(answer.json()["error"]["code"])

    return {path: (answer.status_code, code(answer)) for path, answer in zip(paths, answers, strict=True)}


async def unread() -> AppState:
    """The state of a worker that reads its tokenizers."""
    return AppState(ServeConfig(), LocalModels([]), NoMeter(), lambda scope, needed: Caller(), known=asyncio.Event())


def test_routes_that_need_no_model_do_not_wait() -> None:
    async def work() -> Answers:
        return await ask(await unread(), "/health/live", "/health/ready", "/version", "/metrics", "/openapi.json")

    found = asyncio.run(work())
    assert found.pop("/health/ready") == (503, "model_loading")
    assert set(found.values()) == {(200, "")}


def test_others_wait_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "KNOWN_SECONDS", 0.05)

    async def work() -> Answers:
        return await ask(await unread(), "/v1/models", "/load")

    assert set(asyncio.run(work()).values()) == {(503, "model_loading")}


def test_a_request_that_waits_is_answered_once_the_models_are_known() -> None:
    async def work() -> Answers:
        state = await unread()
        assert state.known is not None
        asyncio.get_running_loop().call_later(0.05, state.known.set)
        return await ask(state, "/v1/models")

    assert asyncio.run(work()) == {"/v1/models": (200, "")}


@pytest.mark.full  # tests/serve/ops/test_supervisor.py stops such a worker without processes
def test_a_server_whose_tokenizer_is_unread_is_not_announced_and_can_be_stopped(
    served: Callable[..., Served], tmp_path: Path
) -> None:
    template = tmp_path / "template"
    os.mkfifo(template)  # the worker reads it until the test closes it
    file = tmp_path / "serve.toml"
    address = str(tmp_path / "socket")
    file.write_text(
        f'server.uds = "{address}"\n[[model]]\nid = "m"\npath = "{bundled.default_model_dir()}"\n'
        f'template = "{template}"\nengine = "free"\ndevice = "cpu"\n'
    )
    server = served("--config", str(file))
    until(lambda: "model m: ready" in server.log or server.process.poll() is not None, lambda: server.log)
    with open(template, "w") as writer:
        connection = http.client.HTTPConnection("localhost", timeout=SECONDS)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(SECONDS)
        connection.sock.connect(address)
        connection.request("GET", "/health/ready")
        answer = connection.getresponse()
        assert (answer.status, json.load(answer)["error"]["code"]) == (503, "model_loading")
        connection.request("GET", "/v1/models")
        server.process.send_signal(signal.SIGINT)
        answer = connection.getresponse()
        assert (answer.status, json.load(answer)["error"]["code"]) == (503, "draining")
        connection.close()
        assert "serving at" not in server.log
        writer.write("{{ messages }}")
    assert server.process.wait(SECONDS) == 0
