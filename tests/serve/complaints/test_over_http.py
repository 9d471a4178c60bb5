"""Troubles of other servers that no other test of this one covers, over HTTP. `test_table.py` lists all of them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from effort import trials
from held import Held
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lora_folder import write_adapter

from exl_generate import bundled
from exl_serve.api.limits import guarded
from exl_serve.api.text import FolderText
from exl_serve.config.model import Limits, ModelConfig, ServeConfig, ServerConfig
from exl_serve.super.registry import Metrics
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS, until

SCRIPTED = ModelConfig(
    id="scripted", path=str(bundled.default_model_dir()), device="cpu", max_batch_size=8, engine="free"
)


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=HANG_SECONDS) as client:
        yield client


def data(answer: str) -> list[str]:
    """The data of a stream's events."""
    return [line[6:] for line in answer.splitlines() if line.startswith("data: ")]


def chat(model: str = "scripted", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Tell me a story."}], **fields}


# ---- schemas, reasoning, errors, log-probabilities -------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_strict_schema_holds_at_the_highest_temperature(http: httpx.Client, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["fox", "crow"]},
            "ages": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 3},
            "name": {"type": "string", "maxLength": 5},
        },
        "required": ["kind", "ages", "name"],
        "additionalProperties": False,
    }
    strict = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    body = chat("fable", response_format=strict, temperature=2, seed=seed, max_tokens=300)
    (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    found = json.loads(choice["message"]["content"])
    assert found.keys() == {"kind", "ages", "name"}
    assert found["kind"] in ("fox", "crow")
    assert len(found["ages"]) <= 3
    assert set(found["ages"]) <= set(range(1, 10))
    assert len(found["name"]) <= 5


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("reasoning_content", {"reasoning_content"}),
        ("reasoning", {"reasoning"}),
        ("both", {"reasoning", "reasoning_content"}),
        ("none", set()),
    ],
)
def test_the_field_of_the_reasoning_has_the_configured_name(fable: EngineThread, field: Any, names: set[str]) -> None:
    model = ModelConfig(id="fable", path=fable.card.folder, device="cpu", max_batch_size=8)
    live = LiveServer({"fable": fable}, [model], ServeConfig(server=ServerConfig(reasoning_field=field)))
    try:
        body = chat("fable", max_tokens=30, seed=4, ignore_eos=True, continue_final_message=True, reasoning_budget=5)
        body["messages"].append({"role": "assistant", "content": "<think>Let me see: "})
        with httpx.Client(base_url=live.url, timeout=HANG_SECONDS) as http:
            message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
            stream = http.post("/v1/chat/completions", json=body | {"stream": True}).text
        known = {"reasoning", "reasoning_content"}
        assert message.keys() & known == names
        assert len({message[name] for name in names}) <= 1
        assert message["content"]
        deltas = [json.loads(one)["choices"][0]["delta"] for one in data(stream)[:-1]]
        for name in known:
            assert "".join(delta.get(name) or "" for delta in deltas) == (message[name] if name in names else "")
        assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
    finally:
        live.close()


@pytest.mark.parametrize("n", [1, 2])
def test_an_error_at_any_step_ends_a_stream_with_an_error(
    http: httpx.Client, scripted: EngineThread, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    iterate = scripted.generator.iterate_columns
    steps = 0

    def failing() -> Any:
        nonlocal steps
        steps -= 1
        if steps < 0:
            raise RuntimeError("a device error, say")
        return iterate()

    monkeypatch.setattr(scripted.generator, "iterate_columns", failing)
    statuses = []
    for at in range(10):
        steps = at
        body = chat(max_tokens=200, n=n, ignore_eos=True, stream=True, stream_options={"include_usage": True})
        answer = http.post("/v1/chat/completions", json=body)
        statuses.append(answer.status_code)
        if answer.status_code != 200:
            assert answer.json()["error"]["code"] == "engine_error"
            continue
        *events, error, done = data(answer.text)
        assert done == "[DONE]"
        assert json.loads(error)["error"]["code"] == "engine_error"
        chunks = [json.loads(event) for event in events]
        assert all(chunk["choices"] and not chunk["usage"] for chunk in chunks)
        assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
        steps = at
        whole = http.post("/v1/chat/completions", json=chat(max_tokens=200, n=n, ignore_eos=True))
        assert (whole.status_code, whole.json()["error"]["code"]) == (500, "engine_error")
    assert statuses[0] == 500
    assert statuses[-1] == 200
    assert statuses == sorted(statuses, reverse=True)
    steps = 10**9
    assert http.post("/v1/chat/completions", json=chat(max_tokens=2)).status_code == 200


def test_log_probabilities_are_finite_numbers(http: httpx.Client) -> None:
    body: dict[str, Any] = {
        "logprobs": True,
        "top_logprobs": 20,
        "logit_bias": {str(id): -100 for id in range(300, 900)},
        "guided_regex": "[a-z]{30}",
        "temperature": 0,
        "max_tokens": 40,
    }
    text = http.post("/v1/chat/completions", json=chat("fable", **body)).text

    def no_number(name: str) -> None:
        raise AssertionError(name)

    (choice,) = json.loads(text, parse_constant=no_number)["choices"]
    tokens = choice["logprobs"]["content"]
    assert tokens
    for token in tokens:
        assert -9999 <= token["logprob"] <= 0
        assert len(token["top_logprobs"]) == 20
        assert all(-9999 <= one["logprob"] <= 0 for one in token["top_logprobs"])
    assert "".join(token["token"] for token in tokens) == choice["message"]["content"]


@settings(max_examples=trials(60, 4), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 99), at=st.integers(0, 60), more=st.integers(0, 80), length=st.integers(1, 8))
def test_an_answer_ends_before_the_first_stop_string(
    http: httpx.Client, seed: int, at: int, more: int, length: int
) -> None:
    """Two stop strings that occur in the answer, at any places of its tokens."""
    body = {"model": "fable", "prompt": "Once upon a time", "max_tokens": 30, "seed": seed, "ignore_eos": True}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stops = [stop for start in (at, more) if (stop := whole[start : start + length])] or [whole[:1]]
    end = min(whole.find(stop) + len(stop) for stop in stops)
    body |= {"stop": stops}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert whole.startswith(choice["text"])
    assert not any(stop in choice["text"] for stop in stops)
    assert whole[len(choice["text"]) : end] in stops
    chunks = [json.loads(one) for one in data(http.post("/v1/completions", json=body | {"stream": True}).text)[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert all(chunk["choices"][0]["text"] or chunk["choices"][0]["finish_reason"] for chunk in chunks)


# ---- load ------------------------------------------------------------------------------------------------------------


def test_a_long_text_is_encoded_outside_the_loop(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request is answered before the text is encoded."""
    answered = threading.Event()
    encode: Callable[..., list[int]] = FolderText.encode

    def slowly(self: FolderText, text: str, **options: Any) -> list[int]:
        assert answered.wait(HANG_SECONDS)
        return encode(self, text, **options)

    monkeypatch.setattr(FolderText, "encode", slowly)
    body = {"model": "fable", "prompt": "The fox and the crow. " * 1000}
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(httpx.post, f"{server.url}/tokenize", json=body, timeout=HANG_SECONDS)
        assert httpx.get(f"{server.url}/health/live", timeout=HANG_SECONDS).status_code == 200
        answered.set()
        assert long.result().json()["count"] > 1000


def test_too_many_requests_are_refused_at_once_and_the_others_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(id="scripted", path=SCRIPTED.path, device="cpu", max_batch_size=1, engine="free")
    engine = EngineThread(model, Limits(max_queued_requests=3))
    live = LiveServer({"scripted": engine}, [model])
    gate = Held(engine, monkeypatch)
    answers: list[httpx.Response] = []
    body = {"model": "scripted", "prompt": "x", "max_tokens": 3, "ignore_eos": True}
    try:
        with httpx.Client(base_url=live.url, timeout=HANG_SECONDS) as http, ThreadPoolExecutor(40) as pool:
            try:
                for _ in range(40):
                    pool.submit(lambda: answers.append(http.post("/v1/completions", json=body)))
                # No step is made meanwhile: refusals wait for no other request.
                until(lambda: len(answers) >= 25)
                assert {one.status_code for one in answers} == {429}
            finally:
                gate.release()
    finally:
        live.close()
        engine.close()
    assert Counter(one.status_code for one in answers).keys() == {200, 429}
    assert len(answers) == 40
    for one in answers:
        if one.status_code == 429:
            assert one.json()["error"]["code"] == "queue_full"
            assert int(one.headers["retry-after"]) >= 1


def test_an_engine_that_computes_silences_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineThread(SCRIPTED)
    config = ServeConfig(server=ServerConfig(ping_seconds=0.1, first_byte_seconds=0.1))
    live = LiveServer({"scripted": engine}, [SCRIPTED], config)
    gate, pings = Held(engine, monkeypatch), 0
    events: list[str] = []
    try:
        body = chat(max_tokens=3, ignore_eos=True, stream=True)
        with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=body, timeout=HANG_SECONDS) as answer:
            for line in answer.iter_lines():
                if line == ": ping":
                    assert not events, "before the first token"
                    pings += 1
                elif line:
                    events.append(line)
                if pings == 3:
                    gate.release()
        assert pings >= 3
        assert events[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in events[-2]
    finally:
        gate.release()
        live.close()
        engine.close()


def test_health_is_answered_in_a_burst(
    server: LiveServer, scripted: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is asked nothing: here it makes no step."""
    gate = Held(scripted, monkeypatch)
    body = json.dumps({"model": "scripted", "prompt": "x", "max_tokens": 2, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    burst = [socket.create_connection(address, timeout=HANG_SECONDS) for _ in range(200)]
    try:
        for one in burst:
            one.sendall(head % len(body) + body)
        for path in ("/health/live", "/health/ready", "/health", "/ping") * 5:
            assert httpx.get(server.url + path, timeout=HANG_SECONDS).status_code == 200
    finally:
        gate.release()
    for one in burst:
        assert one.recv(12)[9:] in (b"200", b"429")
        one.close()


# ---- models, adapters, metrics, sockets ------------------------------------------------------------------------------


def test_a_wrong_name_is_answered_by_no_model_unless_configured(fable: EngineThread, http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    wrong = http.post("/v1/completions", json=body | {"model": "gpt-4o"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
    assert "fable, scripted" in wrong.json()["error"]["message"]
    model = ModelConfig(id="fable", path=fable.card.folder, device="cpu", max_batch_size=8)
    live = LiveServer({"fable": fable}, [model], ServeConfig(server=ServerConfig(accept_any_model=True)))
    try:
        answer = httpx.post(f"{live.url}/v1/completions", json=body | {"model": "gpt-4o"}, timeout=HANG_SECONDS)
        assert (answer.status_code, answer.json()["model"]) == (200, "fable")
    finally:
        live.close()


def test_adapters_come_and_go_while_they_are_used(fable: EngineThread, tmp_path: Path) -> None:
    write_adapter(tmp_path / "one", fable)
    model = ModelConfig(id="fable", path=fable.card.folder, device="cpu", adapter_roots=(str(tmp_path),))
    engine = EngineThread(model)
    live = LiveServer({"fable": engine}, [model])
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    found: dict[str, set[Any]] = {"load": set(), "unload": set(), "fable:one": set(), "fable": set()}

    def load(http: httpx.Client) -> None:
        told = {"lora_name": "one", "lora_path": str(tmp_path / "one")}
        found["load"].add(http.post("/v1/load_lora_adapter", json=told).status_code)

    def unload(http: httpx.Client) -> None:
        found["unload"].add(http.post("/v1/unload_lora_adapter", json={"lora_name": "one"}).status_code)

    def use(http: httpx.Client, name: str) -> None:
        answer = http.post("/v1/completions", json=body | {"model": name})
        found[name].add(answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.status_code)

    try:
        with httpx.Client(base_url=live.url, timeout=HANG_SECONDS) as http, ThreadPoolExecutor(6) as pool:
            load(http)
            use(http, "fable:one")
            unload(http)
            for _ in range(trials(15, 6)):
                for act in (load, unload):
                    pool.submit(act, http)
                for name in ("fable:one", "fable", "fable:one"):
                    pool.submit(use, http, name)
            pool.shutdown()
            assert http.get("/load").json()["models"]["fable"]["running"] == 0
    finally:
        live.close()
        engine.close()
    assert found["load"] <= {200, 409}
    assert found["unload"] <= {200, 404, 409}
    (plain,) = found["fable"]
    (under,) = found["fable:one"] - {404}
    assert isinstance(under, str), "the tokens under the adapter, or no adapter"
    assert under != plain


def test_counts_of_several_workers_are_one_sum() -> None:
    metrics = Metrics()
    labels = {"model_name": "m", "finished_reason": "stop"}
    for _ in range(3):
        for worker in range(2):
            metrics.take([(True, "exl_requests_total", labels, 1.0 + worker)])
            metrics.take([(False, "exl_request_params_n", {"model_name": "m"}, 1.0)])
    lines = metrics.text().splitlines()
    for name in ("exl_requests_total", "vllm:request_success_total"):
        assert f'{name}{{finished_reason="stop",model_name="m"}} 9.0' in lines
    assert 'exl_request_params_n_count{model_name="m"} 6.0' in lines


def test_packets_are_not_delayed() -> None:
    """Nagle's algorithm would hold a token back until the client has acknowledged the one before."""
    options: list[int] = []

    class Noting(guarded(Limits())):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            options.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def main() -> None:
        running = uvicorn.Server(uvicorn.Config(app, port=0, http=Noting, lifespan="off", log_level="critical"))
        task = asyncio.create_task(running.serve())
        while not running.started:
            await asyncio.sleep(0.01)
        port = running.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"http://127.0.0.1:{port}/", timeout=HANG_SECONDS)).status_code == 204
        running.should_exit = running.force_exit = True
        await task

    runners = [asyncio.run]
    try:
        import uvloop
    except ImportError:
        pass
    else:
        runners.append(uvloop.run)
    for run in runners:
        run(main())
    assert len(options) == len(runners)
    assert all(options)
