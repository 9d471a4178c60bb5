"""A running server: a stopped engine, a reload, models that make room for each other, what is measured."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import children_of

from exl_generate import bundled

FOLDER = bundled.default_model_dir()
RUN = """
import sys
from pathlib import Path
from exl_serve.config.load import load
from exl_serve.super.logs import set_up
from exl_serve.super.stall import Patience
from exl_serve.super.supervisor import Supervisor
file = Path(sys.argv[1])
config = load(file)
set_up(config.log, "%(message)s")
made = Supervisor(config, lambda s: print("at", s.address, file=sys.stderr, flush=True), reload=lambda: load(file),
                  patience=Patience(stall=float(sys.argv[2]), kill=float(sys.argv[2])))
sys.exit(made.run())
"""
MODEL = f'[[model]]\nid = "{{id}}"\npath = "{FOLDER}"\ndevice = "cpu"\nengine = "{{engine}}"\npreload = {{preload}}\n'


def models(**engines: str) -> str:
    return "".join(
        MODEL.format(id=id, engine=e, preload=str(i == 0).lower()) for i, (id, e) in enumerate(engines.items())
    )


class Server:
    def __init__(self, file: Path, patience: float, environment: dict[str, str]) -> None:
        command = [sys.executable, "-c", RUN, str(file), str(patience)]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | environment, start_new_session=True
        )
        self.log = ""
        self.said = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        self.wait_for(r"at (\S+)\n")
        found = re.search(r"^at (\S+)$", self.log, re.MULTILINE)
        assert found, self.log
        self.url = found[1]

    def _read(self) -> None:
        for line in self.process.stderr or ():
            with self.said:
                self.log += line
                self.said.notify_all()

    def wait_for(self, pattern: str) -> None:
        with self.said:
            assert self.said.wait_for(lambda: re.search(pattern, self.log), timeout=180), self.log

    def until(self, true: Callable[[], bool]) -> None:
        for _ in range(6000):
            if true():
                return
            time.sleep(0.03)
        raise AssertionError(self.log)

    def complete(self, model: str) -> httpx.Response:
        body = {"model": model, "prompt": "Once", "max_tokens": 3, "min_tokens": 3, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=180)

    def ready(self) -> str:
        answer = httpx.get(f"{self.url}/health/ready", timeout=180)
        return "ok" if answer.status_code == 200 else str(answer.json()["error"]["code"])

    def states(self) -> dict[str, str]:
        answer = httpx.get(f"{self.url}/load", timeout=180)
        found = answer.json()["models"] if answer.status_code == 200 else {}  # the supervisor may be busy
        return {id: entry["state"] for id, entry in found.items()}

    def children(self, module: str) -> list[int]:
        return children_of(self.process.pid, module)


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as begin:
        yield begin


@contextlib.contextmanager
def starting(folder: Path) -> Iterator[Start]:
    made: list[Server] = []

    def begin(text: str, patience: float = 600.0, **environment: Any) -> Server:
        file = folder / "serve.toml"
        file.write_text("server.port = 0\n" + text)
        made.append(Server(file, patience, environment))
        return made[-1]

    try:
        yield begin
    finally:
        for server in made:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="module")
def cramped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the model `a` and no room for the model `b`. Only one test asks `a` for tokens: it counts them."""
    with starting(tmp_path_factory.mktemp("cramped")) as begin:
        yield begin("memory.budget.cpu = 1000000\n" + models(a="free", b="model"))


@pytest.mark.full
@pytest.mark.parametrize("half_written", [False, True])
def test_a_stopped_engine_is_logged_ended_and_started_again(start: Start, half_written: bool) -> None:
    server = start(models(a="free"), patience=3.0)
    assert server.complete("a").status_code == 200
    (engine,) = server.children("exl_serve.engine")
    os.kill(engine, signal.SIGSTOP)
    if half_written:
        # As if it had been stopped in the middle of a write: its number is odd.
        page = re.search(r"/\S+/status-a$", Path(f"/proc/{engine}/maps").read_text(), re.MULTILINE)
        assert page is not None
        with open(page[0], "r+b") as file:
            number = file.read(1)[0]
            file.seek(0)
            file.write(bytes([number | 1]))
    server.until(lambda: server.ready() == "engine_stalled")
    assert server.complete("a").json()["error"]["code"] == "engine_stalled"
    server.until(lambda: server.children("exl_serve.engine") not in ([], [engine]))
    server.until(lambda: server.ready() == "ok")
    assert server.complete("a").status_code == 200
    assert "makes no progress" in server.log


@pytest.mark.full  # tests/serve/ops/test_supervisor.py reloads one without processes
def test_a_reload_takes_over_models_and_limits(start: Start, tmp_path: Path) -> None:
    server = start(models(a="free"))
    file = tmp_path / "serve.toml"
    file.write_text("server.port = 1\nserver.limits.max_n = 1\n" + models(b="free"))
    server.process.send_signal(signal.SIGHUP)
    server.wait_for("server.port has changed: that needs a restart")
    server.until(lambda: server.states() == {"b": "ready"})
    assert server.complete("a").status_code == 404
    assert server.complete("b").status_code == 200
    assert len(server.children("exl_serve.engine")) == 1
    file.write_text("[server\n")
    server.process.send_signal(signal.SIGHUP)
    server.wait_for("the configuration was not read again")
    assert server.complete("b").status_code == 200


@pytest.mark.full
def test_models_are_loaded_when_they_are_asked_for_and_by_operators(start: Start) -> None:
    server = start(models(a="free", b="free"))
    assert server.states() == {"a": "ready", "b": "unloaded"}
    server.until(lambda: server.complete("b").status_code == 200)
    options = {"headers": {"content-type": "application/json"}, "timeout": 180, "content": "{}"}
    told = httpx.post(f"{server.url}/v1/models/a/unload", **options)  # type: ignore[arg-type]
    assert told.status_code == 200
    server.until(lambda: server.states()["a"] == "unloaded")

    def loaded() -> bool:  # a load that takes long is answered before its end
        told = httpx.post(f"{server.url}/v1/models/a/load", **options)  # type: ignore[arg-type]
        assert told.status_code == 200, told.text
        return told.json() == {"id": "a", "state": "ready"}

    server.until(loaded)
    assert server.complete("a").status_code == 200
    assert httpx.post(f"{server.url}/v1/models/zzz/load", **options).status_code == 404  # type: ignore[arg-type]


@pytest.mark.full  # tests/serve/test_engine.py counts those of an engine
def test_an_idle_server_rarely_wakes(start: Start) -> None:
    """Each process a few times a second: the event loop's clock, signs of life, a look at the engine."""
    server = start(models(a="free"))
    assert server.complete("a").status_code == 200
    processes = [server.process.pid, *server.children("exl_serve.api"), *server.children("exl_serve.engine")]
    seconds = 3.0

    def waits() -> list[int]:
        status = [Path(f"/proc/{pid}/status").read_text() for pid in processes]
        return [int(re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", text, re.MULTILINE)[0]) for text in status]

    time.sleep(2.0)  # what the request has left is reported
    before = waits()
    time.sleep(seconds)
    assert all(after - then <= 4 * seconds for then, after in zip(before, waits(), strict=True))


@pytest.mark.full
def test_loading_and_unloading_leaves_nothing(start: Start) -> None:
    """Neither processes, open files nor bytes in the metrics. bench_bars.py cycles does it 100 times, with a model."""
    server = start(models(a="free", b="free"))
    assert server.complete("a").status_code == 200
    processes = [server.process.pid, *server.children("exl_serve.api")]

    def open_files() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in processes]

    def post(what: str) -> None:
        headers = {"content-type": "application/json"}
        told = httpx.post(f"{server.url}/v1/models/a/{what}", headers=headers, timeout=180, content="{}")
        assert told.status_code == 200, told.text + server.log

    def unload() -> None:
        post("unload")
        server.until(lambda: server.children("exl_serve.engine") == [] and server.states()["a"] == "unloaded")
        server.until(lambda: 'process="engine a"' not in httpx.get(f"{server.url}/metrics", timeout=180).text)

    unload()
    first = open_files()
    for number in range(20):
        if number % 2:  # by the operator, or by the request
            post("load")
        server.until(lambda: server.complete("a").status_code == 200)
        unload()
        # The server may still be closing the connections of the last requests.
        server.until(lambda: all(after <= before for after, before in zip(open_files(), first, strict=True)))


@pytest.mark.full
def test_the_names_of_tabbyapi(start: Start) -> None:
    server = start(models(a="free", b="free"))

    def post(path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(server.url + path, json=body, timeout=180)

    assert httpx.get(f"{server.url}/v1/model", timeout=180).json()["id"] == "a"
    listed = httpx.get(f"{server.url}/v1/model/list", timeout=180).json()["data"]
    assert {one["id"]: one["state"] for one in listed} == {"a": "ready", "b": "unloaded"}
    events = [json.loads(line[6:]) for line in post("/v1/model/load", {"model_name": "b"}).text.split("\n\n") if line]
    assert (events[-1]["status"], events[-1]["state"]) == ("finished", "ready")
    assert post("/v1/model/load", {"model_name": "c"}).status_code == 404
    assert post("/v1/model/load", {}).status_code == 400
    same = {"model_name": "b", "max_seq_len": None, "cache_mode": "FP16", "gpu_split_auto": True, "rope_scale": 1.0}
    assert '"finished"' in post("/v1/model/load", same).text
    assert {one["id"] for one in post("/v1/model/unload", {}).json()["data"]} == {"a", "b"}
    server.until(lambda: set(server.states().values()) == {"unloaded"})
    assert httpx.get(f"{server.url}/v1/auth/permission", timeout=180).json()["permission"] == "admin"


@pytest.mark.full  # tests/serve/ops/test_registry.py refuses one in the process
def test_a_model_for_which_there_is_no_room_is_refused_with_the_numbers(cramped: Server) -> None:
    answers: list[httpx.Response] = []

    def is_known() -> bool:
        """503 `model_loading` until the worker has read its tokenizer."""
        answers.append(cramped.complete("b"))
        return answers[-1].status_code != 503

    cramped.until(is_known)
    answer = answers[-1]
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "memory_budget")
    assert re.search(r"cpu: needs 0\.\d\d GiB of 0\.00; held by no model", answer.json()["error"]["message"])
    assert cramped.states()["a"] == "ready"


@pytest.mark.full  # tests/serve/test_processes.py reads the metrics of a server, tests/serve/test_http.py and
# test_other_fields.py count refusals and ignored fields
def test_durations_of_requests_are_measured(cramped: Server) -> None:
    for _ in range(3):
        assert cramped.complete("a").status_code == 200
    assert httpx.get(f"{cramped.url}/nothing", timeout=180).status_code == 404
    body = {"model": "a", "keep_alive": "5m", "text of a client": 1, "more of it": 2}
    assert httpx.post(f"{cramped.url}/v1/completions", json=body, timeout=180).status_code == 400  # no prompt

    def has(*lines: str) -> bool:
        found = httpx.get(f"{cramped.url}/metrics", timeout=180).text.splitlines()
        return set(lines) <= set(found)

    cramped.until(
        lambda: has(
            'exl_requests_total{finished_reason="length",model_name="a"} 3.0',
            'vllm:generation_tokens_total{model_name="a"} 9.0',
            'exl_request_generation_tokens_bucket{le="5.0",model_name="a"} 3.0',
            'exl_request_generation_tokens_bucket{le="2.0",model_name="a"} 0.0',
            'vllm:request_params_n_count{model_name="a"} 3.0',
            'exl_rejected_total{code="not_found"} 1.0',
            'exl_ignored_fields_total{field="keep_alive"} 1.0',
            'exl_ignored_fields_total{field="other"} 2.0',
            'exl_model_state{model_name="a",state="ready"} 1.0',
            "exl_ready 1.0",
        )
    )
