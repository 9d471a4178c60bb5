"""The content log's lines: a slow disk, a full one, the end of a server, clients that leave, accepted images."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from held import Held

from exl_generate import bundled
from exl_serve.api import content
from exl_serve.api.__main__ import end_requests
from exl_serve.api.app import create_app
from exl_serve.api.content import ContentLog
from exl_serve.api.state import AppState, Caller
from exl_serve.config.model import ModelConfig, ServeConfig
from exl_serve.metrics import NoMeter
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer, LocalHandle, LocalModels
from exl_serve.testing.waiting import HANG_SECONDS, until

MODEL = ModelConfig(id="scripted", path=str(bundled.default_model_dir()))


SCOPE: dict[str, Any] = {
    "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
    "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
    "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
    "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
}  # fmt: skip


def line(id: str, **more: Any) -> dict[str, Any]:
    return {"id": id, "request": {}, "answers": [], **more}


def ids_of(file: Path) -> list[str]:
    return [json.loads(one)["id"] for one in file.read_text().splitlines()]


class Disk:
    """A disk that hangs until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.reached = threading.Event(), threading.Event()
        self._append = content.append_line
        monkeypatch.setattr(content, "append_line", self._later)

    def _later(self, path: Path, data: bytes) -> None:
        self.reached.set()
        self.go.wait()
        self._append(path, data)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(monkeypatch)
    yield made
    made.go.set()


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Files of this process grow to `size` bytes only, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_hung_disk_takes_bounded_memory(tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "content.jsonl"
    made = ContentLog(file)
    size = content.QUEUED_BYTES // 2 - 2 * content.LINE_BYTES
    for id in ("first", "second", "third", "fourth"):
        made.write(line(id), size)
    assert [record.getMessage() for record in caplog.records] == [
        f"request third: its content was not logged: more than {content.QUEUED_BYTES} bytes wait for the disk"
    ]
    disk.go.set()
    asyncio.run(made.close())
    assert ids_of(file) == ["first", "second"]
    assert "content is logged again; that of 2 requests was not" in caplog.text


def test_long_answers_count_as_well(tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    made = ContentLog(tmp_path / "content.jsonl")
    answers = [{"text": "a" * (content.QUEUED_BYTES // 2)}]
    made.write(line("first", answers=answers), 10)
    made.write(line("second", answers=answers), 10)
    assert "request second: its content was not logged" in caplog.text


def test_the_end_waits_for_a_limited_time(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "CLOSE_SECONDS", 0.2)
    made = ContentLog(tmp_path / "content.jsonl")
    made.write(line("first"), 10)

    async def end() -> bool:
        """Whether the event loop runs meanwhile."""
        closing = asyncio.ensure_future(made.close())
        await asyncio.sleep(0.01)
        running = not closing.done()
        await closing
        return running

    assert asyncio.run(end())
    assert "the content of 1 requests was not logged: the disk is too slow" in caplog.text
    made.write(line("late"), 10)
    assert "request late: its content was not logged: the server stops" in caplog.text


def test_the_end_writes_all_lines(tmp_path: Path) -> None:
    file = tmp_path / "content.jsonl"
    made = ContentLog(file)
    for number in range(200):
        made.write(line(str(number)), 10)
    asyncio.run(made.close())
    assert ids_of(file) == [str(number) for number in range(200)]


def test_a_full_disk_damages_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "content.jsonl"
    made = ContentLog(file)
    made.write(line("before"), 10)
    until(lambda: file.exists() and file.read_bytes().endswith(b"\n"))
    size = file.stat().st_size
    with file_limit(size + 20):
        made.write(line("lost", text="a secret"), 10)
        until(lambda: "request lost: its content was not logged" in caplog.text)
    assert file.stat().st_size == size
    made.write(line("after"), 10)
    asyncio.run(made.close())
    assert ids_of(file) == ["before", "after"]
    assert "a secret" not in caplog.text


def test_a_line_follows_half_a_one_of_an_ended_process(tmp_path: Path) -> None:
    file = tmp_path / "content.jsonl"
    file.touch(0o600)
    file.write_text('{"id": "half')
    made = ContentLog(file)
    made.write(line("whole"), 10)
    asyncio.run(made.close())
    half, whole = file.read_text().splitlines()
    assert (half, json.loads(whole)["id"]) == ('{"id": "half', "whole")


def test_an_unsafe_file_is_one_error_for_each_cause(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "content.jsonl"
    file.touch(0o644)
    made = ContentLog(file)
    for id in ("a", "b", "c"):
        made.write(line(id), 10)
    asyncio.run(made.close())
    (record,) = caplog.records
    assert record.getMessage().startswith("request a: its content was not logged: log.content: ")
    assert file.read_bytes() == b""


def test_an_unknown_value_costs_its_own_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "content.jsonl"
    made = ContentLog(file)
    made.write(line("odd", text={"a secret"}), 10)
    made.write(line("next"), 10)
    asyncio.run(made.close())
    assert ids_of(file) == ["next"]
    assert "request odd: its content was not logged: it cannot be written as JSON (TypeError)" in caplog.text
    assert "a secret" not in caplog.text


@pytest.fixture
def live(scripted: EngineThread, tmp_path: Path) -> Iterator[LiveServer]:
    made = LiveServer({"scripted": scripted}, [MODEL])
    assert made.state is not None
    made.state.content = ContentLog(tmp_path / "content.jsonl")
    yield made
    made.close()
    asyncio.run(made.state.content.close())


def test_a_client_that_leaves_has_a_line_with_what_it_got(
    live: LiveServer, scripted: EngineThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(scripted, monkeypatch, steps=5)
    body = {"prompt": "a secret", "max_tokens": 1000, "stream": True, "ignore_eos": True}
    file = tmp_path / "content.jsonl"
    with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=120) as stream:
        first = json.loads(next(one for one in stream.iter_lines() if one).removeprefix("data: "))
    until(lambda: file.exists() and file.read_bytes().endswith(b"\n"))
    held.release()
    found = json.loads(file.read_text())
    assert (found["status"], found["finish"], found["request"]) == (499, "abort", body)
    assert found["answers"][0]["text"].startswith(first["choices"][0]["text"])
    assert first["choices"][0]["text"]


def test_a_request_that_the_end_of_a_worker_cuts_off_has_a_line(scripted: EngineThread, tmp_path: Path) -> None:
    file = tmp_path / "content.jsonl"
    body = {"prompt": "hm", "max_tokens": 900, "ignore_eos": True, "stream": True}

    async def end() -> None:
        handle = LocalHandle(scripted, MODEL)
        state = AppState(ServeConfig(), LocalModels([handle]), NoMeter(), lambda scope, needed: Caller())
        state.content = ContentLog(file)
        blocked = asyncio.Event()
        bodies = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

        async def receive() -> Any:
            return next(bodies, None) or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":  # a client that reads nothing
                blocked.set()
                await asyncio.Event().wait()

        task = asyncio.ensure_future(create_app(state)(SCOPE, receive, send))
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await blocked.wait()
            await end_requests([task])
            await state.content.close()
        finally:
            await handle.close()

    asyncio.run(end())
    found = json.loads(file.read_text())
    assert (found["request"], found["route"]) == (body, "/v1/completions")
    assert found["answers"][0]["text"]


def test_an_error_of_traces_costs_neither_line_nor_answer(
    live: LiveServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def record(self, call: Any) -> None:
            raise OSError("no exporter")

    assert live.state is not None
    live.state.tracing = Broken()  # type: ignore[assignment]
    file = tmp_path / "content.jsonl"
    with httpx.Client(base_url=live.url, timeout=120) as http, caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    until(lambda: file.exists() and file.read_bytes().count(b"\n") == 2)
    until(lambda: caplog.text.count("its end was not recorded") == 2)
    assert "Exception in ASGI application" not in caplog.text
