"""Processes that are stopped or killed, steps that hang or fail, a lost GPU, a drain that takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from raw_worker import RawWorker
from served import SECONDS, Served, gone

from exl_generate import bundled
from exl_serve.config.model import ModelConfig
from exl_serve.engine import wire
from exl_serve.engine.client import EngineStatus
from exl_serve.engine.failures import has_lost_the_gpu
from exl_serve.engine.status import StatusReader
from exl_serve.request.internal import EngineRequest, Sampling
from exl_serve.super.stall import Patience, Watch
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS, until

FOLDER = str(bundled.default_model_dir())
FREE = ModelConfig(id="free", path=FOLDER, device="cpu", max_batch_size=4, engine="free", max_chunk_size=256)
LONG = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    thread = EngineThread(FREE)
    yield thread
    thread.close()


def request(tokens: int = 20, **fields: Any) -> EngineRequest:
    given: dict[str, Any] = {"id": "r", "sampling": Sampling(), "seeds": (1,), "max_tokens": 900, "ignore_eos": True}
    return EngineRequest(prompt=np.full(tokens, 7, dtype="<i4").tobytes(), **given | fields)


def test_completions_whose_prompt_is_computed_are_no_waiting_prompts(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the prompt would count eight times, and others would be refused while the completions wait for rows."""
    monkeypatch.setattr(engine.host, "step_floor", lambda jobs: 0.02)

    async def work() -> list[int]:
        client = await engine.connect()
        try:
            running = await client.submit(request(500, seeds=tuple(range(8)), max_tokens=400), lambda event: None)
            # Until the first completion has computed the prompt.
            while engine.generator.num_active_jobs() < FREE.max_batch_size or client.status.queued_prompt_tokens:
                await asyncio.sleep(0.01)
            seen: list[int] = []
            for _ in range(20):
                seen.append(client.status.queued_prompt_tokens)
                await asyncio.sleep(0.02)
            running.cancel()
            return seen
        finally:
            await client.close()

    assert max(asyncio.run(asyncio.wait_for(work(), HANG_SECONDS))) == 0


# ---- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["queue", "prompt", "decode", "several"])
def test_a_cancelled_request_frees_its_pages_within_two_steps(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """Counted in steps of the engine, from the one during which the message came. Other requests run on."""
    generator, step = engine.generator, engine.generator.iterate_columns
    monkeypatch.setattr(engine.host, "step_floor", lambda jobs: 0.002)
    others = FREE.max_batch_size if phase == "queue" else 1
    tokens = 1000 if phase == "prompt" else 20
    worker = RawWorker(engine)
    for tag in range(others):
        assert isinstance(worker.submit(tag, request()), wire.Accepted)
    until(lambda: generator.num_active_jobs() == others)
    jobs: list[Any] = []
    #: of each step from the cancellation on: whether the engine knows the request, and the pages that it holds
    seen: list[tuple[bool, int]] = []
    done = threading.Event()

    def group() -> Any:
        return next((one for (_, tag), one in engine.host._groups.items() if tag == 99), None)  # noqa: SLF001

    def reached(found: Any) -> bool:
        if phase == "queue":
            return found.entry is not None
        computed = [one.job.pages.progress[0] for one in found.running.values()]
        return bool(computed) and (0 < computed[0] < tokens - 1 if phase == "prompt" else found.generated > 3)

    def counted() -> Any:
        found = group()
        if found is not None and not seen and reached(found):
            jobs.extend(one.job for one in found.running.values())
            seen.append((True, sum(len(s.allocated_pages) for job in jobs for s in job.sequences)))
            worker.send(wire.Cancel(99))
        columns = step()
        if seen and not done.is_set():
            seen.append((group() is not None, sum(len(s.allocated_pages) for job in jobs for s in job.sequences)))
            if len(seen) == 4:
                done.set()
        return columns

    monkeypatch.setattr(generator, "iterate_columns", counted)
    seeds = (1, 2, 3) if phase == "several" else (1,)
    worker.send(wire.Submit(99, request(tokens, seeds=seeds, max_tokens=20 if phase == "prompt" else 900)))
    assert done.wait(HANG_SECONDS)
    assert (seen[0][1] > 0) == (phase != "queue")
    assert len(jobs) == len(seeds)
    assert seen[2] == (False, 0), "the step under way, then the next one"
    assert len(engine.host.requests()) <= others
    worker.close()


def test_a_step_that_never_returns_is_seen_on_the_status_page(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a long step that does return is none. The page is all that the supervisor looks at."""
    go_on, entered = threading.Event(), threading.Event()
    step = engine.generator.iterate_columns

    def hanging() -> Any:
        entered.set()
        assert go_on.wait(HANG_SECONDS)
        return step()

    monkeypatch.setattr(engine.generator, "iterate_columns", hanging)
    worker = RawWorker(engine)
    assert isinstance(worker.submit(1, request(max_tokens=3)), wire.Accepted)
    assert entered.wait(HANG_SECONDS)
    reader = StatusReader(worker.status_path)
    watch = Watch(Patience(stall=30, kill=90))
    before: EngineStatus = reader.read()
    assert before.began > before.ended, "a step is open"
    writes = reader.writes
    assert [watch.look(reader.read(), writes, now) for now in (0, 29, 31, 119, 121)] == [
        "ok",
        "ok",
        "stalled",
        "stalled",
        "kill",
    ]
    assert reader.writes == writes
    go_on.set()
    until(lambda: reader.read().ended >= reader.read().began)
    assert watch.look(reader.read(), reader.writes, 122) == "ok"
    worker.close()
    reader.close()


LOST = "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize("where", ["step", "job"])
def test_an_engine_that_has_lost_its_gpu_ends(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The supervisor then starts another engine; until then requests fail."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError(LOST)

    if where == "step":
        monkeypatch.setattr(engine.generator, "iterate_columns", fail)
    else:
        monkeypatch.setattr(engine.generator.model, "forward_chunk", fail)
    worker = RawWorker(engine)
    worker.send(wire.Submit(1, request()))
    until(lambda: not engine.running)
    assert engine.host.broken
    worker.close()


def test_other_errors_end_no_engine(engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(engine.generator.model, "forward_chunk", fail)
        live = LiveServer({"free": engine}, [FREE])
        try:
            body = {"prompt": "x", "max_tokens": 3}
            answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=HANG_SECONDS)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
            assert "CUDA" not in answer.text
            patched.undo()
            assert httpx.post(f"{live.url}/v1/completions", json=body, timeout=HANG_SECONDS).status_code == 200
        finally:
            live.close()
    assert not engine.host.broken


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (LOST, True),
        ("the GPU failed while asked to run: its context is lost, restart the process (x)", True),
        ("kernel: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered", True),
        ("CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure", True),
        ("CUDA error: out of memory", False),
        ("CUDA_ERROR_OUT_OF_MEMORY: out of memory", False),
        ("no token is left", False),
    ],
)
def test_errors_after_which_a_gpu_is_lost(text: str, lost: bool) -> None:
    assert has_lost_the_gpu(RuntimeError(text)) == lost
    outer = ValueError("a job failed")
    outer.__cause__ = RuntimeError(text)
    assert has_lost_the_gpu(outer) == lost
    assert not has_lost_the_gpu(None)


def test_a_worker_that_says_nothing_is_forgotten(engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests would run for nobody: the worker may have been stopped."""
    monkeypatch.setattr(engine.host, "step_floor", lambda jobs: 0.02)
    worker = RawWorker(engine)
    assert isinstance(worker.submit(1, request()), wire.Accepted)
    assert engine.host.requests()
    monkeypatch.setattr(wire, "SILENCE", 0.05)
    until(lambda: not engine.host.requests() and not engine.generator.referenced_pages)
    worker.close()


@pytest.mark.parametrize("first", ["ping", "request"])
def test_a_worker_that_was_forgotten_is_known_again(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """At the worker's next message its running requests end with an error, and new requests are accepted."""
    monkeypatch.setattr(engine.host, "step_floor", lambda jobs: 0.02)
    monkeypatch.setattr(wire, "PING_SECONDS", 0.5 if first == "ping" else 2 * HANG_SECONDS)
    live = LiveServer({"free": engine}, [FREE])
    short = {"prompt": "x", "max_tokens": 1}

    def ask() -> int:
        return httpx.post(f"{live.url}/v1/completions", json=short, timeout=HANG_SECONDS).status_code

    try:
        with httpx.stream("POST", f"{live.url}/v1/completions", json=LONG, timeout=HANG_SECONDS) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            with monkeypatch.context() as silent:
                silent.setattr(wire, "SILENCE", 0.05)
                until(lambda: not engine.host.requests())
            if first == "request":
                assert ask() == 200
            errors = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert errors[-1]["error"]["code"] == "engine_restarting"
        assert [ask(), ask()] == [200, 200]
    finally:
        live.close()


def test_templates_are_rendered_after_their_processes_have_died(engine: EngineThread) -> None:
    live = LiveServer({"free": engine}, [FREE])
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}

    def ask() -> int:
        return httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=HANG_SECONDS).status_code

    def renderers() -> list[int]:
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid() and b"template_worker" in (place / "cmdline").read_bytes():
                    found.append(int(place.name))
            except (OSError, ValueError):
                continue
        return found

    try:
        assert ask() == 200
        assert renderers()
        for pid in renderers():
            os.kill(pid, signal.SIGKILL)
        assert [ask() for _ in range(6)] == [200] * 6
    finally:
        live.close()


# ---- processes -------------------------------------------------------------------------------------------------------


def configured(folder: Path, text: str = "", more: str = "") -> list[str]:
    """Options of a server with a model `m`; `more` are further lines of the model."""
    file = folder / "serve.toml"
    file.write_text(f'{text}\n[[model]]\nid = "m"\npath = "{FOLDER}"\ndevice = "cpu"\nengine = "free"\n{more}\n')
    return ["--config", str(file)]


@pytest.mark.full
def test_a_stopped_api_worker_stops_no_other(served: Callable[..., Served], tmp_path: Path) -> None:
    server = served(*configured(tmp_path), "--workers", "2").up()
    until(lambda: len(server.children("exl_serve.api")) == 2)
    for worker in server.children("exl_serve.api"):
        os.kill(worker, signal.SIGSTOP)
        assert [server.complete().status_code for _ in range(3)] == [200] * 3
        os.kill(worker, signal.SIGCONT)
    assert server.complete().status_code == 200


def test_a_drain_refuses_new_requests_and_finishes_old_ones(served: Callable[..., Served], tmp_path: Path) -> None:
    """The service manager is notified of the start, of liveness and of the end.

    The manager hears of the start once the server has read its models' tokenizers.
    """
    heard: list[bytes] = []
    template = tmp_path / "template"
    os.mkfifo(template)  # the worker reads it until the test closes it

    def listen() -> None:
        while not heard or heard[-1] != b"STOPPING=1":
            heard.append(manager.recv(200))

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(SECONDS)
        listener = threading.Thread(target=listen)
        listener.start()
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        options = configured(tmp_path, "drain.timeout = -1", f'template = "{template}"')
        server = served(*options, environment=environment)
        until(lambda: "model m: ready" in server.log or server.process.poll() is not None, lambda: server.log)
        assert server.process.poll() is None, server.log  # nobody else would read the template
        with open(template, "w") as writer:
            assert "serving at" not in server.log
            assert not heard
            writer.write("{{ messages }}")
        server.up()
        until(lambda: len(heard) > 5)
        check_drain(server)
        listener.join()
    assert heard[0].startswith(b"READY=1\n")
    assert set(heard[1:-1]) == {b"WATCHDOG=1"}
    assert heard[-1] == b"STOPPING=1"


def check_drain(server: Served) -> None:
    """End a server while a request runs, and ask for more meanwhile."""
    (engine,) = server.children("exl_serve.engine")
    everything = [engine, *server.children("exl_serve.api")]
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=SECONDS) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: {")
        os.kill(engine, signal.SIGSTOP)  # the stream does not end meanwhile
        server.process.send_signal(signal.SIGINT)
        until(lambda: server.get("/health/ready") == 503)
        until(lambda: "another signal (Ctrl-C) ends them at once" in server.log)

        def refused() -> httpx.Response | None:
            answer = server.complete()
            return answer if answer.json()["error"]["code"] == "draining" else None

        answer = until(refused)
        assert (answer.status_code, answer.headers["retry-after"], answer.headers["connection"]) == (503, "5", "close")
        assert server.get("/health/live") == 200
        os.kill(engine, signal.SIGCONT)
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(SECONDS) == 0
    assert gone(everything)


def test_a_drain_waits_until_a_slow_client_has_read_its_answer(served: Callable[..., Served], tmp_path: Path) -> None:
    server = served(*configured(tmp_path, "drain.delay = 0.1")).up()
    place = httpx.URL(server.url)
    body = json.dumps({"prompt": "x", "max_tokens": 900, "ignore_eos": True, "logprobs": 20, "n": 8}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {place.host}\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((place.host, place.port))
        client.sendall(head.encode() + body)
        answer = client.recv(1000)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: '"code":"draining"' in server.complete().text)
        time.sleep(1.0)  # a worker without answers ends earlier
        while part := client.recv(1 << 20):
            answer += part
    head, _, text = answer.decode().partition("\r\n\r\n")
    assert f"content-length: {len(text.encode())}" in head
    assert server.process.wait(SECONDS) == 0
    assert "Traceback" not in server.log


@pytest.mark.full
@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_requests_that_outlive_a_drain_end_with_an_error(
    served: Callable[..., Served], tmp_path: Path, how: str
) -> None:
    server = served(*configured(tmp_path, f"drain.timeout = {0 if how == 'timeout' else -1}")).up()
    (engine,) = server.children("exl_serve.engine")
    rest: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=SECONDS) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: {")
        os.kill(engine, signal.SIGSTOP)  # the stream does not end by itself
        server.process.send_signal(signal.SIGINT)
        if how == "second signal":
            until(lambda: server.get("/health/ready") == 503)
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGINT)
        with contextlib.suppress(httpx.TransportError):
            rest += (line for line in lines if line.startswith("data: "))
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)  # so that it ends when it is asked to
    assert server.process.wait(SECONDS) == 0
    if how == "timeout":
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["error"]["code"] == "draining"
