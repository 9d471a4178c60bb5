"""The supervisor's and an API worker's loops in the process of the test: signals, a reload, a tokenizer that is not
read.

tests/serve/ops/test_operation.py and test_known.py try the same with processes.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq
from served import SECONDS

from exl_generate import bundled
from exl_serve.api.__main__ import serve_worker
from exl_serve.config.load import load
from exl_serve.config.model import ModelConfig, ServeConfig
from exl_serve.engine.inbox import Inbox
from exl_serve.engine.status import StatusWriter, status_path
from exl_serve.super import engines, link, supervisor
from exl_serve.super.supervisor import Supervisor
from exl_serve.testing.waiting import until

FOLDER = bundled.default_model_dir()


class FakeChild:
    """A process that does nothing: an engine is ready and idle, a worker's messages are the test's."""

    made: dict[str, FakeChild] = {}  # noqa: RUF012

    def __init__(self, module: str, start: bytes, name: str, **options: Any) -> None:
        self.start: dict[str, Any] = json.loads(start)
        self.status: int | None = None
        self.lines: deque[bytes] = deque()
        if module == "exl_serve.engine":
            page = StatusWriter(status_path(Path(self.start["folder"]), self.start["model"]["id"]), os.urandom(16))
            page.state = "ready"
            page.write()
            self.lines.append(b'{"state": "ready"}')
        self.made[name] = self

    def poll(self) -> int | None:
        return self.status

    def terminate(self) -> None:
        self.status = -signal.SIGTERM

    def kill(self, *, stacks: bool = False) -> None:
        self.status = -signal.SIGKILL

    def end(self, seconds: float) -> None:
        self.status = -signal.SIGKILL if self.status is None else self.status

    def rss(self) -> int:
        return 0


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, FakeChild]]:
    """The supervisor's children by name, none of which is a process. Its handlers of signals go with the test."""
    monkeypatch.setattr(FakeChild, "made", {})
    monkeypatch.setattr(engines, "Child", FakeChild)
    monkeypatch.setattr(supervisor, "Child", FakeChild)
    monkeypatch.setattr(engines, "DRAIN_SECONDS", 0.0)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    yield FakeChild.made
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


class FakeWorker:
    """A worker's end of the supervisor's socket."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, round(SECONDS * 1000))
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    def report(self, *, ready: bool) -> None:
        self._socket.send(link.encode(link.Report([], ready)))

    def told(self, true: Callable[[link.State], bool]) -> link.State:
        """The next state for which this is true."""
        while True:
            message = link.decode_told(self._socket.recv())
            if isinstance(message, link.State) and true(message):
                return message

    def close(self) -> None:
        self._socket.close()


def states(message: link.State) -> dict[str, str]:
    return {one.config.id: one.state for one in message.models}


def models(*ids: str) -> str:
    return "".join(f'[[model]]\nid = "{id}"\npath = "{FOLDER}"\ndevice = "cpu"\nengine = "free"\n' for id in ids)


def run_with(made: Supervisor, drive: Callable[[], None]) -> int:
    """Run a supervisor on this thread, as signals need it, and `drive` on another; returns the exit code.

    The supervisor ends at once if `drive` has not ended it.
    """
    ended = threading.Event()

    def driving() -> None:
        try:
            drive()
        finally:
            while not ended.is_set():  # two signals may count as one
                os.kill(os.getpid(), signal.SIGTERM)
                ended.wait(0.1)  # clock: a pause between signals

    with ThreadPoolExecutor(1) as pool:
        driven = pool.submit(driving)
        try:
            code = made.run()
        finally:
            ended.set()
        driven.result()
    return code


def test_hangup_reloads_the_configuration_and_an_interrupt_ends_the_server(
    children: dict[str, FakeChild], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server is announced once its worker answers requests, not when the engine is ready."""
    caplog.set_level(logging.INFO)
    file = tmp_path / "serve.toml"
    file.write_text("server.port = 0\n" + models("a"))
    announced = threading.Event()
    made = Supervisor(load(file), lambda server: announced.set(), reload=lambda: load(file))

    def drive() -> None:
        until(lambda: "worker.0" in children)
        with zmq.Context() as context:
            worker = FakeWorker(context, children["worker.0"].start["address"])
            try:
                operate(worker)
            finally:
                worker.close()

    def operate(worker: FakeWorker) -> None:
        worker.report(ready=False)
        worker.told(lambda message: states(message) == {"a": "ready"})
        assert not announced.is_set()
        worker.report(ready=True)
        assert announced.wait(SECONDS)

        file.write_text("server.port = 1\nserver.limits.max_n = 1\n" + models("b"))
        os.kill(os.getpid(), signal.SIGHUP)
        message = worker.told(lambda message: states(message) == {"b": "ready"})
        assert message.phase == "serving"
        assert message.config is not None
        assert (message.config.server.limits.max_n, message.config.server.port) == (1, 0)
        assert children["engine.a"].poll() == -signal.SIGTERM
        assert "server.port has changed: that needs a restart" in caplog.text

        file.write_text("[server\n")
        os.kill(os.getpid(), signal.SIGHUP)
        until(lambda: "the configuration was not read again" in caplog.text)
        os.kill(os.getpid(), signal.SIGINT)
        message = worker.told(lambda message: message.phase != "serving")
        assert (message.phase, states(message)) == ("stopping", {"b": "ready"})
        assert children["engine.b"].poll() is None
        children["worker.0"].status = 0
        until(lambda: children["engine.b"].poll() is not None)

    assert run_with(made, drive) == 0
    assert children["engine.b"].poll() == -signal.SIGTERM


@pytest.mark.parametrize("other", [0, 1, 1 << 31, (1 << 32) - 2])
def test_the_supervisor_and_engines_accept_their_own_user_alone(
    children: dict[str, FakeChild], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    """The kernel tells them the user of a connection; for the test they take themselves for another user."""
    user = other or os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user)
    file = tmp_path / "serve.toml"
    file.write_text("server.port = 0\n" + models("a"))
    answers: list[bytes] = []

    def greeting(address: str) -> bytes:
        """The first byte that a connection gets; none where it is closed."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(SECONDS)
            connection.connect(address.removeprefix("ipc://"))
            return connection.recv(1)

    def drive() -> None:
        until(lambda: "worker.0" in children)
        answers.append(greeting(children["worker.0"].start["address"]))

    run_with(Supervisor(load(file)), drive)
    engine = Inbox(f"ipc://{tmp_path}/engine")
    answers.append(greeting(f"ipc://{tmp_path}/engine"))
    engine.close()
    assert answers == ([b"", b""] if other else [b"\xff", b"\xff"])


def test_a_worker_whose_tokenizer_is_unread_can_be_stopped(tmp_path: Path) -> None:
    """The worker has reported no model as ready, and requests that wait for the tokenizer are refused."""
    template = tmp_path / "template"
    os.mkfifo(template)  # the worker reads it until the test closes it
    model = ModelConfig(id="m", path=str(FOLDER), template=str(template), engine="free", device="cpu")
    reports: list[link.Report] = []
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as boss,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        boss.setsockopt(zmq.RCVTIMEO, round(SECONDS * 1000))
        address = f"ipc://{tmp_path}/super"
        boss.bind(address)
        start = link.WorkerStart(
            config=ServeConfig(model=(model,)), listener=os.dup(listener.fileno()), address=address, parent=os.getpid()
        )
        worker = threading.Thread(target=lambda: asyncio.run(serve_worker(start)), name="exl-worker", daemon=True)
        worker.start()

        def hear() -> bytes:
            name, data = boss.recv_multipart()
            message = link.decode_report(data)
            assert isinstance(message, link.Report)
            reports.append(message)
            return name

        def tell(phase: str) -> None:
            one = link.ModelState(config=model, state="ready", address=f"ipc://{tmp_path}/engine", epoch=1)
            boss.send_multipart([name, link.encode(link.State([one], phase))])

        name = hear()
        tell("serving")
        with open(template, "w"):  # opens once the worker reads
            connection = http.client.HTTPConnection("127.0.0.1", listener.getsockname()[1], timeout=SECONDS)
            connection.request("GET", "/health/ready")
            answer = connection.getresponse()
            assert (answer.status, json.load(answer)["error"]["code"]) == (503, "model_loading")
            connection.request("GET", "/v1/models")
            tell("stopping")
            answer = connection.getresponse()
            assert (answer.status, json.load(answer)["error"]["code"]) == (503, "draining")
            connection.close()
            while boss.poll(0):
                hear()
            assert not any(report.ready for report in reports)
        worker.join(SECONDS)
        assert not worker.is_alive()
