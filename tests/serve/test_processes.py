"""`exl serve` as people run it: processes that watch one another, drain, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from served import SECONDS, Served, gone

from exl_serve.testing.waiting import until


def test_it_serves_restarts_what_dies_and_nothing_outlives_it(served: Callable[..., Served]) -> None:
    server = served().up()
    assert server.log.count("model fable-10m: loading") == 1
    first = server.complete()
    assert first.status_code == 200
    measured = {
        'exl_requests_total{finished_reason="length",model_name="fable-10m"} 1.0',
        'vllm:generation_tokens_total{model_name="fable-10m"} 4.0',
        'exl_request_generation_tokens_bucket{le="5.0",model_name="fable-10m"} 1.0',
        'exl_request_generation_tokens_bucket{le="2.0",model_name="fable-10m"} 0.0',
        'exl_model_state{model_name="fable-10m",state="ready"} 1.0',
        'exl_inter_token_seconds_count{model_name="fable-10m"} 3.0',
        'vllm:time_per_output_token_seconds_count{model_name="fable-10m"} 3.0',
        'vllm:request_inference_time_seconds_count{model_name="fable-10m"} 1.0',
        'exl_tokenize_seconds_count{model_name="fable-10m"} 1.0',
        "exl_ready 1.0",
    }

    def metrics() -> str:
        return httpx.get(f"{server.url}/metrics", timeout=SECONDS).text

    until(lambda: measured <= set(metrics().splitlines()), metrics)
    engine, worker = server.children("exl_serve.engine"), server.children("exl_serve.api")
    assert (len(engine), len(worker)) == (1, 1)

    os.kill(engine[0], signal.SIGKILL)
    until(lambda: server.children("exl_serve.engine") not in ([], engine), lambda: server.log)
    until(lambda: server.get("/health/ready") == 200, lambda: server.log)
    again = server.complete()
    assert again.json()["choices"] == first.json()["choices"]

    os.kill(worker[0], signal.SIGKILL)
    until(lambda: server.get("/health/live") == 200, lambda: server.log)
    until(lambda: server.get("/health/ready") == 200, lambda: server.log)
    assert server.complete().json()["choices"] == first.json()["choices"]

    text = httpx.get(f"{server.url}/metrics").text
    assert 'exl_engine_restarts_total{model_name="fable-10m"} 1.0' in text
    assert "exl_worker_restarts_total 1.0" in text
    assert 'vllm:request_success_total{finished_reason="length",model_name="fable-10m"}' in text

    everything = server.children("exl_serve.engine") + server.children("exl_serve.api")
    assert len(everything) == 2
    server.process.kill()
    until(lambda: gone(everything))
    server.reader.join(SECONDS)
    requests = [json.loads(line) for line in server.lines if line.startswith('{"time"')]
    assert {one["status"] for one in requests} == {200}
    assert all(one["generate_seconds"] > 0 for one in requests)
    assert "Once upon" not in server.log


@pytest.mark.full
def test_an_engine_that_dies_ends_its_streams_with_an_error(served: Callable[..., Served]) -> None:
    server = served().up()
    body = {"prompt": "x", "max_tokens": 900, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=SECONDS) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        os.kill(server.children("exl_serve.engine")[0], signal.SIGKILL)
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["error"]["code"] == "engine_restarting"


@pytest.mark.full  # tests/serve/ops/test_chaos.py drains a server too
def test_a_drain_lets_streams_finish(served: Callable[..., Served], tmp_path: Path) -> None:
    from exl_generate import bundled

    file = tmp_path / "serve.toml"
    folder = bundled.default_model_dir()
    file.write_text(
        f'[drain]\ndelay = 1.0\n[[model]]\nid = "fable"\npath = "{folder}"\nengine = "paced"\ndevice = "cpu"\n'
    )
    server = served("--config", str(file)).up()
    body = {"prompt": "x", "max_tokens": 900, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=SECONDS) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/health/ready") in (503, 0))
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(SECONDS) == 0


@pytest.mark.full
def test_keys(served: Callable[..., Served], tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "exl_serve", "key", "new", "someone"], capture_output=True, text=True, check=True
    )
    key = made.stderr.removeprefix("key: ").strip()
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    file.write_text(made.stdout)
    server = served("--key-file", str(file)).up()
    assert server.complete().status_code == 401
    headers = {"authorization": f"Bearer {key}"}
    assert server.get("/v1/models", headers=headers) == 200
    assert server.get("/v1/requests", headers=headers) == 200
    assert server.get("/metrics", headers=headers) == 403
    assert server.get("/v1/models", headers={"x-api-key": key + "x"}) == 401
    server.process.send_signal(signal.SIGINT)
    server.process.wait(SECONDS)
    assert key not in server.log


def test_a_json_log_has_json_about_bytes_that_are_no_request(served: Callable[..., Served]) -> None:
    """uvicorn logs them."""
    server = served("--set", "log.format=json").up()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), SECONDS) as client:
        client.sendall(b"nonsense\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 400")
    until(lambda: any("Invalid HTTP request" in line for line in server.lines))
    (line,) = (line for line in server.lines if "Invalid HTTP request" in line)
    assert json.loads(line)["level"] == "warning"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--host", "0.0.0.0"], "no keys"),
        (["-m", "/no/such/folder"], "Can't find model directory"),
        (["--cache", "q3"], "q3"),
        (["--config", "/no/such/file.toml"], "file.toml"),
        (["--lora", "x"], "NAME=DIR"),
        (["--key-file", "/no/such/keys"], "key file"),
    ],
)
def test_a_wrong_configuration_is_reported_at_once(
    served: Callable[..., Served], options: list[str], says: str
) -> None:
    server = served(*options)
    assert server.process.wait(SECONDS) == 1
    server.reader.join(SECONDS)
    assert says in server.log
    assert "Traceback" not in server.log


@pytest.mark.full  # tests/serve/ops/test_watch.py starts one too
def test_a_model_that_cannot_be_loaded_is_reported(served: Callable[..., Served], tmp_path: Path) -> None:
    from exl_generate import bundled

    for file in Path(bundled.default_model_dir()).iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    server = served("-m", str(tmp_path))
    until(lambda: "failed" in server.log or server.process.poll() is not None, lambda: server.log)
    assert "safetensors" in server.log
