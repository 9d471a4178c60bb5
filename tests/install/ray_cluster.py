"""The server on Ray, on loopback: three engine replicas for each of two models. Run by ray_on_loopback.py."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import ray
from ray import serve

from exl_generate import bundled
from exl_serve.config.load import ConfigError
from exl_serve.config.model import ModelConfig, RayConfig, ServeConfig, ServerConfig
from exl_serve.ray import app
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import until

REPLICAS = 3
PATH = str(bundled.default_model_dir())
FABLE = ModelConfig(id="fable", path=PATH, device="cpu", max_batch_size=8, cache_tokens=8192, family="hermes")
PACED = ModelConfig(
    id="paced", path=PATH, device="cpu", max_batch_size=32, cache_tokens=32768, engine="paced", family="hermes"
)
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]
#: Seconds that only a hang takes, also for three engines that start beside others on two cores.
WAIT = 600.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def config(port: int, **changes: Any) -> ServeConfig:
    replicas = RayConfig(
        ingress_replicas=1,
        ingress_cpus=0.1,
        min_replicas=REPLICAS,
        max_replicas=REPLICAS,
        engine_cpus=0.1,
        health_seconds=90.0,
    )
    return ServeConfig(server=ServerConfig(port=port), model=(FABLE, PACED), **{"ray": replicas, **changes})


@dataclass
class Cluster:
    url: str
    local: str
    port: int

    def replicas(self, model: str, want: int | None = REPLICAS) -> dict[str, dict[str, Any]]:
        """Return what each replica says of itself, by name, once there are as many."""
        handle = serve.get_deployment_handle(f"engine-{model}", app.APP)

        def look() -> dict[str, dict[str, Any]]:
            names = [r["replica_id"] for r in _running(model)]
            found = {}
            for name in names:
                try:
                    said = handle.describe.remote(to=name).result(timeout_s=10)
                except Exception:  # it has just ended
                    continue
                found[said["replica"]] = said | {"status": msgspec.json.decode(said["status"])}
            return found if want is None or len(found) == len(names) == want else {}

        found: dict[str, dict[str, Any]] = until(look, seconds=WAIT)
        return found

    def busy(self, model: str) -> dict[str, Any]:
        """The replica that is decoding."""
        return until(lambda: [r for r in self.replicas(model, None).values() if r["status"]["decoding"]], seconds=WAIT)[
            0
        ]


def _running(model: str) -> list[dict[str, Any]]:
    deployment = serve.status().applications[app.APP].deployments[f"engine-{model}"]
    count = deployment.replica_states.get("RUNNING", 0)
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    details = ray.get(controller.get_serve_instance_details.remote())
    listed = details["applications"][app.APP]["deployments"][f"engine-{model}"]["replicas"]
    found = [one for one in listed if str(one["state"]).rpartition(".")[2] == "RUNNING"]
    return found if len(found) == count else []


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Ray starts a worker for each CPU at once; the replicas ask for tenths.
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, _node_ip_address="127.0.0.1")
    made = config(free_port())
    app.start(made)
    threads = {one.id: EngineThread(one) for one in made.model}
    live = LiveServer(threads, made.model)
    yield Cluster(f"http://127.0.0.1:{made.server.port}", live.url, made.server.port)
    live.close()
    for thread in threads.values():
        thread.close()
    serve.shutdown()
    ray.shutdown()


def post(url: str, path: str, body: Any) -> Any:
    answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=WAIT)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stripped(value: Any) -> Any:
    """Without what differs from run to run."""
    gone = ("id", "created", "created_at", "cached_tokens", "prompt_tokens_details", "input_tokens_details", "call_id")
    if isinstance(value, dict):
        return {key: stripped(one) for key, one in value.items() if key not in gone}
    return [stripped(one) for one in value] if isinstance(value, list) else value


def stream(url: str, body: Any, seen: Callable[[int], None] = lambda tokens: None) -> dict[str, Any]:
    """A chat stream, joined: texts, calls and ends by choice, and the error that it told."""
    joined: dict[str, Any] = {"texts": {}, "calls": {}, "ends": {}, "error": None, "done": False}
    events = 0
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body | {"stream": True}, timeout=WAIT) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                joined["done"] = True
            elif line.startswith("data: "):
                chunk = json.loads(line[6:])
                joined["error"] = chunk.get("error", joined["error"])
                for choice in chunk.get("choices", []):
                    index, delta = choice["index"], choice["delta"]
                    joined["texts"][index] = joined["texts"].get(index, "") + (delta.get("content") or "")
                    for call in delta.get("tool_calls") or []:
                        said = call["function"]
                        told = (said.get("name") or "") + (said.get("arguments") or "")
                        joined["calls"][index] = joined["calls"].get(index, "") + told
                    joined["ends"][index] = choice["finish_reason"] or joined["ends"].get(index)
                events += 1
                seen(events)
    return joined


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "note",
            "parameters": {
                "type": "object",
                # Long enough for the test to find the replica that decodes it, also on a busy machine.
                "properties": {"lines": {"type": "array", "items": {"type": "string"}, "minItems": 60, "maxItems": 90}},
                "required": ["lines"],
                "additionalProperties": False,
            },
        },
    }
]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "list",
        "schema": {
            "type": "object",
            "properties": {"items": {"type": "array", "items": {"type": "string"}, "minItems": 30, "maxItems": 60}},
            "required": ["items"],
            "additionalProperties": False,
        },
    },
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "three": {"n": 3},
    "schema": {"response_format": SCHEMA},
    "tools": {"tools": TOOLS, "tool_choice": "required"},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "stop": {"stop": ["the ", "a "]},
}


def test_the_command_of_the_guide(tmp_path: Path) -> None:
    """`exl serve ray serve.toml` starts a cluster of its own, answers, and ends with Ctrl-C."""
    port, file, log = free_port(), tmp_path / "serve.toml", tmp_path / "log"
    file.write_text(
        f'[server]\nport = {port}\n[[model]]\nid = "fable"\npath = "{PATH}"\ndevice = "cpu"\n'
        "[ray]\ningress_cpus = 0.1\nengine_cpus = 0.1\n"
    )
    with open(log, "w") as told:
        process = subprocess.Popen([sys.executable, "-m", "exl_serve", "ray", str(file)], stderr=told)
    try:
        until(lambda: "serving at" in log.read_text() or process.poll() is not None, seconds=WAIT)
        assert process.poll() is None, log.read_text()
        body = {"model": "fable", "messages": STORY, "max_tokens": 4}
        answer = until(lambda: _answered(f"http://127.0.0.1:{port}", body), seconds=WAIT)
        assert answer["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def _answered(url: str, body: Any) -> Any:
    """Return a chat answer; None from a server whose engine is being loaded."""
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT)
    return answer.json() if answer.status_code == 200 else None


def test_answers_are_those_of_one_machine(cluster: Cluster) -> None:
    asked: list[tuple[str, Any]] = []
    for seed in range(6):
        asked += [
            ("chat/completions", {"model": "fable", "messages": STORY, "max_tokens": 40, "seed": seed} | case)
            for case in CASES.values()
        ]
        asked.append(("completions", {"model": "fable", "prompt": ["One day", "Once"], "max_tokens": 30, "seed": seed}))
        asked.append(("responses", {"model": "fable", "input": "A story.", "max_output_tokens": 30, "seed": seed}))
    with ThreadPoolExecutor(8) as pool:
        local = list(pool.map(lambda one: post(cluster.local, *one), asked))
        there = list(pool.map(lambda one: post(cluster.url, *one), asked))
    for (_, body), ours, theirs in zip(asked, local, there, strict=True):
        assert stripped(theirs) == stripped(ours), body
    for case in CASES.values():
        body = {"model": "fable", "messages": STORY, "max_tokens": 40, "seed": 1} | case
        ours, theirs = stream(cluster.local, body), stream(cluster.url, body)
        assert theirs == ours
        assert theirs["done"]


def test_sessions_find_their_pages(cluster: Cluster) -> None:
    """Later turns go to the replica that has the earlier ones."""
    prefixes = [f"You are number {i}. " + f"Rule {i}: be brief and kind. " * 45 for i in range(3)]
    hits, prompts = 0, 0

    def session(number: int) -> tuple[int, int]:
        messages: list[Any] = [{"role": "user", "content": prefixes[number % 3]}]
        found = [0, 0]
        for turn in range(4):
            body = {"model": "paced", "messages": messages, "max_tokens": 8, "seed": number}
            answer = post(cluster.url, "chat/completions", body)
            if turn:
                found[0] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                found[1] += answer["usage"]["prompt_tokens"]
            messages += [answer["choices"][0]["message"] | {"refusal": None}, {"role": "user", "content": "go on"}]
        return found[0], found[1]

    for number in range(12):
        cached, tokens = session(number)
        hits, prompts = hits + cached, prompts + tokens
    assert hits / prompts > 0.9, f"{hits} of {prompts} tokens"


def test_a_hot_prefix_does_not_stay_on_one_replica(cluster: Cluster) -> None:
    """Where the holder is busy, others compute the prefix and become holders.

    The answers are long, so that the requests run at the same time also where a busy machine sends them slowly.
    """
    before = {name: one["taken"] for name, one in cluster.replicas("paced").items()}
    prefix = "The same beginning for all. " * 60
    body = {"model": "paced", "max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(120) as pool:
        asked = [body | {"messages": [{"role": "user", "content": f"{prefix}{i}"}]} for i in range(120)]
        list(pool.map(lambda one: post(cluster.url, "chat/completions", one), asked))
    taken = [one["taken"] - before[name] for name, one in cluster.replicas("paced").items()]
    assert sum(taken) == 120
    assert min(taken) >= 10


@pytest.mark.parametrize("what", ["engine", "actor"])
@pytest.mark.parametrize("case", ["plain", "three", "schema", "tools"])
def test_a_stream_goes_on_when_its_replica_dies(cluster: Cluster, case: str, what: str) -> None:
    """The client sees a pause, and the answer that it would have had."""
    body = {"model": "paced", "messages": STORY, "max_tokens": 800, "seed": 5, "temperature": 1} | CASES[case]
    if case in ("plain", "three"):
        body["ignore_eos"] = True
    whole = stream(cluster.local, body)
    killed: list[int] = []

    def seen(events: int) -> None:
        if events == 4:
            pid = cluster.busy("paced")["pid"]
            if what == "actor":
                with open(f"/proc/{pid}/stat") as file:
                    pid = int(file.read().rpartition(")")[2].split()[1])
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    cluster.replicas("paced")
    broken = stream(cluster.url, body, seen)
    assert killed
    assert broken == whole
    assert broken["error"] is None
    cluster.replicas("paced")


def test_a_request_that_kills_two_replicas_is_given_up(cluster: Cluster) -> None:
    """It ends with an error and [DONE]; others go on."""
    body = {"model": "paced", "messages": STORY, "max_tokens": 1000, "ignore_eos": True, "seed": 6, "n": 8}

    def killer() -> None:
        killed: set[int] = set()
        while len(killed) < 2:
            pid = cluster.busy("paced")["pid"]
            if pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)

    thread = threading.Thread(target=killer)
    thread.start()
    told = stream(cluster.url, body)
    thread.join()
    assert told["error"] is not None
    assert "two replicas" in told["error"]["message"]
    assert told["done"]
    assert post(cluster.url, "chat/completions", body | {"max_tokens": 5})["choices"]


def test_clients_that_leave_hold_nothing(cluster: Cluster) -> None:

    async def storm() -> None:
        async with httpx.AsyncClient(timeout=WAIT, limits=httpx.Limits(max_connections=64)) as client:

            async def one(number: int) -> None:
                body = {"model": "paced", "messages": STORY, "max_tokens": 500, "ignore_eos": True, "stream": True}
                async with client.stream("POST", f"{cluster.url}/v1/chat/completions", json=body) as answer:
                    count = 0
                    async for _ in answer.aiter_bytes():
                        count += 1
                        if count > number % 4:
                            break

            await asyncio.gather(*(one(number) for number in range(200)))

    asyncio.run(storm())

    def idle() -> bool:
        states = [one["status"] for one in cluster.replicas("paced").values()]
        return all(s["decoding"] == s["prefilling"] == s["queued"] == s["pages_pinned"] == 0 for s in states)

    until(idle, seconds=WAIT)


def test_a_second_start_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="serves exl already"):
        app.start(config(cluster.port))


def test_a_cluster_that_others_reach_needs_a_token(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(cluster.port)
    for address in ("10.0.0.5:6379", "ray://head.example:10001", "auto", "127.0.0.1:6379"):
        with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"):
            app.check(made, address, {"RAY_AUTH_MODE": "disabled"})
        app.check(made, address, {"RAY_AUTH_MODE": "token"})
    app.check(made, None, {})
    monkeypatch.setattr(ray, "__version__", "2.41.0")
    with pytest.raises(ConfigError, match=r"2\.41\.0 is not supported"):
        app.check(made, None)


def test_a_node_with_other_versions_is_refused() -> None:
    """An ingress checks versions when it starts."""
    app.check_versions(app.versions())
    with pytest.raises(RuntimeError, match="this node has"):
        app.check_versions(app.versions() | {"exl-serve": "0.0.0"})


def replace(made: ServeConfig) -> None:
    """As `exl serve ray --replace` after its check of the token, in another process."""
    program = (
        "import sys, msgspec, ray\nfrom exl_serve.config.model import ServeConfig\nfrom exl_serve.ray import app\n"
        "ray.init(address='auto', configure_logging=False)\n"
        "app.start(msgspec.json.decode(sys.argv[1], type=ServeConfig), replace=True)"
    )
    data = msgspec.json.encode(made).decode()
    subprocess.run([sys.executable, "-c", program, data], check=True)


def test_a_new_version_takes_over_without_errors(cluster: Cluster) -> None:
    """Clients that try again at 503 see no other error."""
    ended, errors, done = threading.Event(), [], [0]

    def client(number: int) -> None:
        while not ended.is_set():
            body = {"model": "paced", "messages": STORY, "max_tokens": 40, "seed": number}
            answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=WAIT)
            if answer.status_code not in (200, 503):
                errors.append(answer.text)
            done[0] += answer.status_code == 200
            time.sleep(0.05)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    made = config(cluster.port)
    changed = msgspec.structs.replace(made, model=(FABLE, msgspec.structs.replace(PACED, max_batch_size=16)))
    replace(changed)
    before = done[0]
    until(lambda: done[0] > before + 8, seconds=WAIT)
    ended.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert {json.loads(one["card"])["max_batch_size"] for one in cluster.replicas("paced").values()} == {16}


def test_replicas_come_with_the_load(cluster: Cluster) -> None:
    """No request fails while replicas are added. (That they go again is tested with the policy alone.)"""
    few = RayConfig(ingress_replicas=1, ingress_cpus=0.1, min_replicas=1, max_replicas=REPLICAS, engine_cpus=0.1)
    small = msgspec.structs.replace(PACED, max_batch_size=4)
    made = msgspec.structs.replace(config(cluster.port), ray=few, model=(small,))
    replace(made)
    cluster.replicas("paced", 1)
    ended = threading.Event()
    failed: list[str] = []

    def client(number: int) -> None:
        while not ended.is_set():
            body = {"model": "paced", "messages": STORY, "max_tokens": 200, "ignore_eos": True, "seed": number}
            answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=WAIT)
            if answer.status_code != 200:
                failed.append(answer.text)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    try:
        cluster.replicas("paced", REPLICAS)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not failed
