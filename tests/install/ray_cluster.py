"""The server on Ray, on loopback: three engine replicas for each of two models. Run by ray_on_loopback.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import ray
from chat_streams import joined, list_schema, note_tool
from ray import cluster_utils, serve
from ray._private import internal_api, state

from exl_generate import bundled
from exl_serve.config.load import ConfigError
from exl_serve.config.model import ModelConfig, RayConfig, ServeConfig, ServerConfig
from exl_serve.ray import app, deploy
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
#: Seconds that only a hang takes, also for engines that start with others on two cores.
WAIT = 600.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def config(port: int, *models: ModelConfig, **scale: Any) -> ServeConfig:
    """Three replicas of each model (without any: PACED), or as `scale` says."""
    fixed = {"min_replicas": REPLICAS, "max_replicas": REPLICAS, "engine_cpus": 0.1}
    made = RayConfig(**({"ingress_replicas": 1, "ingress_cpus": 0.1, "health_seconds": 90.0} | fixed | scale))
    return ServeConfig(server=ServerConfig(port=port), model=models or (PACED,), ray=made)


@dataclass
class Cluster:
    url: str
    local: str
    port: int
    nodes: Any

    def replicas(self, want: int | None = REPLICAS) -> dict[str, dict[str, Any]]:
        """Return what each replica says of itself, by name, once there are as many; without `want` once there are two,
        so that one of them may end."""
        handle = serve.get_deployment_handle("engine-paced", app.APP)

        def look() -> dict[str, dict[str, Any]]:
            running = _running("engine-paced")
            found = {}
            for one in running:
                try:
                    said = handle.describe.remote(to=one["replica_id"]).result(timeout_s=60)
                except Exception:  # it has just ended
                    continue
                status = msgspec.json.decode(said["status"])
                found[said["replica"]] = said | {"status": status, "actor": one["pid"], "node": one["node_id"]}
            enough = len(found) >= 2 if want is None else len(found) == len(running) == want
            return found if enough else {}

        found: dict[str, dict[str, Any]] = until(look, seconds=WAIT)
        return found

    def busy(self, seconds: float = WAIT) -> dict[str, Any]:
        """The replica that is decoding. TimeoutError: there was none for so many seconds."""

        def look() -> list[dict[str, Any]]:
            return [one for one in self.replicas(None).values() if one["status"]["decoding"]]

        return until(look, seconds=seconds)[0]


def _running(deployment: str) -> list[dict[str, Any]]:
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    details = ray.get(controller.get_serve_instance_details.remote())
    deployments = details["applications"][app.APP]["deployments"]  # none while the application is built
    listed = deployments[deployment]["replicas"] if deployment in deployments else []
    return [one for one in listed if str(one["state"]).rpartition(".")[2] == "RUNNING"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Ray starts a worker for each CPU at once; the replicas ask for tenths.
    head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}
    nodes = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=nodes.address, log_to_driver=False)
    assert ray.util.get_node_ip_address() == "127.0.0.1"
    made = config(free_port(), FABLE, PACED)
    app.start(made)
    threads = {one.id: EngineThread(one) for one in made.model}
    live = LiveServer(threads, made.model)
    yield Cluster(f"http://127.0.0.1:{made.server.port}", live.url, made.server.port, nodes)
    live.close()
    for thread in threads.values():
        thread.close()
    serve.shutdown()
    ray.shutdown()
    nodes.shutdown()


def post(url: str, path: str, body: Any) -> Any:
    answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=WAIT)
    assert answer.status_code == 200, answer.text
    return answer.json()


#: What differs from run to run: names, times, and what a cache had.
OWN = re.compile(r'"(id|call_id|item_id|created|created_at|completed_at|cached_tokens)":\s*("[^"]*"|[0-9.]+|null)')


def raw(url: str, path: str, body: Any) -> str:
    """The bytes of an answer, without what differs from run to run."""
    answer = httpx.post(f"{url}/{path}", json=body, timeout=WAIT)
    assert answer.status_code == 200, answer.text
    return OWN.sub(r'"\1":', answer.text)


def parts(url: str, path: str, body: Any) -> tuple[dict[int, str], list[Any]]:
    """The texts by choice of a stream of completions or of a response, and its ends."""
    texts: dict[int, str] = {}
    ends = []
    with httpx.stream("POST", f"{url}/{path}", json=body | {"stream": True}, timeout=WAIT) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert not event.get("error"), event
                kind = event.get("type", "")
                new = [(0, event["delta"])] if kind == "response.output_text.delta" else []
                for choice in event.get("choices", []):
                    new.append((choice["index"], choice["text"]))
                    ends += [(choice["index"], choice["finish_reason"])] if choice["finish_reason"] else []
                for index, text in new:
                    texts[index] = texts.get(index, "") + text
                ends += [kind] if kind in ("response.completed", "response.incomplete") else []
    return texts, sorted(ends, key=str)


# Long enough for a test to find the replica that decodes them, also on a busy machine.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "three": {"n": 3},
    "schema": list_schema(60, 90),
    "tools": note_tool(60, 90),
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "stop": {"stop": ["the ", "a "]},
}


def test_the_command_of_the_guide(tmp_path: Path) -> None:
    """`exl serve ray serve.toml` starts a cluster on the loopback address, answers, and ends with Ctrl-C."""
    port, file, log = free_port(), tmp_path / "serve.toml", tmp_path / "log"
    models = "".join(f'[[model]]\nid = "{name}"\npath = "{PATH}"\ndevice = "cpu"\n' for name in ("fable", "another"))
    file.write_text(f"[server]\nport = {port}\n{models}[ray]\ningress_cpus = 0.1\nengine_cpus = 0.1\n")
    environment = {name: value for name, value in os.environ.items() if name not in {*app.LOOPBACK, *app.DEFAULTS}}
    with open(log, "w") as told:
        command = [sys.executable, "-m", "exl_serve", "ray", str(file)]
        process = subprocess.Popen(command, stderr=told, env=environment)
    try:
        until(lambda: "serving at" in log.read_text() or process.poll() is not None, seconds=WAIT)
        assert process.poll() is None, log.read_text()
        for name in ("fable", "another"):
            body = {"model": name, "messages": STORY, "max_tokens": 4}
            answer = until(partial(_answered, f"http://127.0.0.1:{port}", body), seconds=WAIT)
            assert answer["usage"]["completion_tokens"] == 4
        assert not elsewhere(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def elsewhere(pid: int) -> list[str]:
    """The addresses that are not loopback on which a process or a descendant listens.

    Ray Serve's replicas are left out: they listen on all addresses, and ask for the token there.
    """
    parents: dict[int, int] = {}
    sockets: set[str] = set()
    for one in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(one.name)] = int((one / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
    own = {pid}
    while more := {one for one, parent in parents.items() if parent in own} - own:
        own |= more
    for process in own:
        for file in Path(f"/proc/{process}/fd").glob("*"):
            try:
                title = Path(f"/proc/{process}/cmdline").read_bytes().lower()
                if not title.startswith((b"ray::servereplica", b"ray::serve_replica")):
                    sockets.add(os.readlink(file))
            except OSError:  # closed, or ended
                continue
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            loopback = local.startswith(
                ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
            )
            if state == "0A" and f"socket:[{rest[5]}]" in sockets and not loopback:
                found.append(local)
    return found


def _answered(url: str, body: Any) -> Any:
    """Return a chat answer; None from a server whose engine is being loaded."""
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT)
    return answer.json() if answer.status_code == 200 else None


def test_answers_are_those_of_one_machine(cluster: Cluster) -> None:
    """R1: 200 requests of all shapes, byte for byte, and streams of all shapes."""
    asked: list[tuple[str, Any]] = []
    for seed in range(20):
        drawn = {"model": "fable", "seed": seed}
        asked += [
            ("v1/chat/completions", drawn | {"messages": STORY, "max_tokens": 40} | case) for case in CASES.values()
        ]
        asked.append(("v1/completions", drawn | {"prompt": ["One day", "Once"], "max_tokens": 30}))
        asked.append(("v1/completions", drawn | {"prompt": "One", "max_tokens": 9, "echo": True, "logprobs": 2}))
        asked.append(("v1/responses", drawn | {"input": "A story.", "max_output_tokens": 30}))
    text = {"model": "fable", "prompt": "Once upon a time"}
    asked += [
        ("tokenize", text | {"return_token_strs": True}),
        ("v1/tokenize", {"model": "fable", "messages": STORY}),
    ] * 4
    asked += [("detokenize", {"model": "fable", "tokens": list(range(40, 60))})] * 4
    asked += [("apply-template", {"model": "fable", "messages": STORY})] * 4
    asked += [("v1/responses/input_tokens", {"model": "fable", "input": "A story."})] * 4
    assert len(asked) == 200
    with ThreadPoolExecutor(8) as pool:
        ours = list(pool.map(lambda one: raw(cluster.local, *one), asked))
        theirs = list(pool.map(lambda one: raw(cluster.url, *one), asked))
    for (_, body), here, there in zip(asked, ours, theirs, strict=True):
        assert there == here, body
    for case in CASES.values():
        body = {"model": "fable", "messages": STORY, "max_tokens": 40, "seed": 1} | case
        told = joined(cluster.url, body)
        assert told == joined(cluster.local, body)
        assert told["done"]
        assert told["error"] is None
    for path, body in (asked[6], asked[8]):
        texts, ends = parts(cluster.url, path, body)
        assert (texts, ends) == parts(cluster.local, path, body)
        assert ends


def test_sessions_find_their_pages(cluster: Cluster) -> None:
    """R2: later turns go to the replica that has the earlier ones."""
    prefixes = [f"You are number {i}. " + f"Rule {i}: be brief and kind. " * 45 for i in range(3)]
    hits, prompts = 0, 0

    def session(number: int) -> tuple[int, int]:
        messages: list[Any] = [{"role": "user", "content": prefixes[number % 3]}]
        found = [0, 0]
        for turn in range(5):
            body = {"model": "paced", "messages": messages, "max_tokens": 8, "seed": number}
            answer = post(cluster.url, "chat/completions", body)
            if turn:
                found[0] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                found[1] += answer["usage"]["prompt_tokens"]
            messages += [answer["choices"][0]["message"] | {"refusal": None}, {"role": "user", "content": "go on"}]
        return found[0], found[1]

    with ThreadPoolExecutor(3) as pool:
        for cached, tokens in pool.map(session, range(30)):
            hits, prompts = hits + cached, prompts + tokens
    assert hits / prompts > 0.9, f"{hits} of {prompts} tokens"


def test_a_hot_prefix_does_not_stay_on_one_replica(cluster: Cluster) -> None:
    """R3: where the holder is busy, others compute the prefix and become holders.

    The answers are long, so that the requests run at the same time also where a busy machine sends them slowly. One of
    three bursts has to be shared evenly: on two cores the replicas' measured speeds may differ by more.
    """

    def burst(number: int) -> list[int]:
        before = {name: one["taken"] for name, one in cluster.replicas().items()}
        prefix = f"The same beginning of burst {number} for all. " * 38
        body = {"model": "paced", "max_tokens": 400, "ignore_eos": True}
        with ThreadPoolExecutor(120) as pool:
            asked = [body | {"messages": [{"role": "user", "content": f"{prefix}{i}"}]} for i in range(120)]
            list(pool.map(lambda one: post(cluster.url, "chat/completions", one), asked))
        taken = [one["taken"] - before[name] for name, one in cluster.replicas().items()]
        assert sum(taken) == 120
        assert min(taken) >= 10, taken
        return taken

    bursts: list[list[int]] = []
    while not bursts or max(bursts[-1]) > 1.5 * min(bursts[-1]):
        assert len(bursts) < 3, bursts
        bursts.append(burst(len(bursts)))


@pytest.mark.parametrize("what", ["engine", "actor"])
@pytest.mark.parametrize("case", ["plain", "three", "schema", "tools"])
def test_a_stream_goes_on_when_its_replica_dies(cluster: Cluster, case: str, what: str) -> None:
    """R4: the client sees a pause, and the answer that it would have had. tests/serve/test_ray_kills.py has the cuts at
    every 7th token."""
    body = long(case)
    whole = joined(cluster.local, body)
    assert whole["error"] is None
    killed: list[int] = []

    def seen(events: int) -> None:
        if events == (4 if what == "engine" else 7):
            with contextlib.suppress(TimeoutError):  # where replicas start, the answer may end before one is found busy
                killed.append(kill("pid" if what == "engine" else "actor"))

    def kill(which: str) -> int:
        for _ in range(100):  # one that the case before has killed may still be listed
            pid = int(cluster.busy(seconds=10.0)[which])
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return pid
            time.sleep(0.05)
        raise AssertionError("no listed replica is alive")

    for _ in range(5):
        cluster.replicas(None)
        broken = joined(cluster.url, body, seen)
        assert broken == whole
        if killed:
            return
    raise AssertionError("every answer ended before its replica was found")


def long(case: str) -> dict[str, Any]:
    """A request whose answer takes seconds."""
    body = {"model": "paced", "messages": STORY, "max_tokens": 800, "seed": 5, "temperature": 1} | CASES[case]
    return body | {"ignore_eos": True} if case in ("plain", "three") else body


def test_a_request_that_kills_two_replicas_is_given_up(cluster: Cluster) -> None:
    """R11: it ends with an error and [DONE], and is refused when it comes again; others go on."""
    poison = [{"role": "user", "content": "Tell me a story that ends you."}]
    body = {"model": "paced", "messages": poison, "max_tokens": 1000, "ignore_eos": True, "seed": 6, "n": 8}

    def killer() -> None:
        killed: set[int] = set()
        while len(killed) < 2:
            pid = cluster.busy()["pid"]
            if pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)

    cluster.replicas()
    thread = threading.Thread(target=killer)
    thread.start()
    told = joined(cluster.url, body)
    thread.join()
    assert told["error"] is not None
    assert "two replicas" in told["error"]["message"]
    assert told["done"]
    again = httpx.post(f"{cluster.url}/v1/chat/completions", json=body | {"max_tokens": 5}, timeout=WAIT)
    assert again.status_code == 500
    assert "rejected for another" in again.json()["error"]["message"]
    assert post(cluster.url, "chat/completions", body | {"messages": STORY, "max_tokens": 5})["choices"]


def test_clients_that_leave_hold_nothing(cluster: Cluster) -> None:
    """R5: 500 requests of which the client reads the first events."""

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

            await asyncio.gather(*(one(number) for number in range(500)))

    asyncio.run(storm())

    def idle() -> bool:
        states = [one["status"] for one in cluster.replicas().values()]
        return all(s["decoding"] == s["prefilling"] == s["queued"] == s["pages_pinned"] == 0 for s in states)

    until(idle, seconds=WAIT)


def test_many_requests_leave_nothing(cluster: Cluster) -> None:
    """R10, with 500 requests: files, actors and objects are as many after them as before."""
    body = {"model": "paced", "messages": STORY, "max_tokens": 2}
    cluster.replicas()

    def files() -> int:
        pids = [one["pid"] for name in ("ingress", "engine-paced") for one in _running(name)]
        pids += [one["pid"] for one in cluster.replicas().values()]
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)

    def objects() -> int:
        told = internal_api.memory_summary(cluster.nodes.address, stats_only=True)
        return int(told.partition(" objects")[0].rpartition(" ")[2])

    def actors() -> int:
        return sum(one["State"] == "ALIVE" for one in state.actors().values())

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: post(cluster.url, "chat/completions", body), range(100)))
        before = files(), objects(), actors()
        list(pool.map(lambda _: post(cluster.url, "chat/completions", body), range(500)))
    # Connections that Ray keeps for later calls come and go.
    until(lambda: files() <= before[0] + 16, seconds=WAIT)
    until(lambda: objects() <= before[1] + 16, seconds=WAIT)
    assert actors() == before[2]


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
    monkeypatch.setattr("exl_serve.ray.app.version", lambda name: "2.41.0")
    with pytest.raises(ConfigError, match=r"2\.41\.0 is not supported"):
        app.check(made, None)


def test_a_node_with_other_versions_is_refused() -> None:
    """An ingress checks versions when it starts."""
    app.check_versions(app.versions())
    with pytest.raises(RuntimeError, match="this node has"):
        app.check_versions(app.versions() | {"exl-serve": "0.0.0"})


def replace(cluster: Cluster, made: ServeConfig) -> None:
    """Do what `exl serve ray --replace` does after its check of the token, in another process."""
    program = (
        "import sys, msgspec, ray\nfrom exl_serve.config.model import ServeConfig\nfrom exl_serve.ray import app\n"
        "ray.init(address=sys.argv[1], configure_logging=False)\n"
        "app.start(msgspec.json.decode(sys.argv[2], type=ServeConfig), replace=True)"
    )
    data = msgspec.json.encode(made).decode()
    subprocess.run([sys.executable, "-c", program, cluster.nodes.address, data], check=True)


def test_a_new_version_takes_over_without_errors(cluster: Cluster) -> None:
    """R7: clients that try again at 503 see no other error."""
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
    replace(cluster, config(cluster.port, msgspec.structs.replace(PACED, max_batch_size=16)))
    before = done[0]
    until(lambda: done[0] > before + 8, seconds=WAIT)
    ended.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert {json.loads(one["card"])["max_batch_size"] for one in cluster.replicas().values()} == {16}


def test_a_serve_file_is_deployed(cluster: Cluster, tmp_path: Path) -> None:
    """`serve run` with what `exl serve ray --yaml` prints, as KubeRay deploys it."""
    file = tmp_path / "serve.yaml"
    file.write_text(deploy.serve_file(config(cluster.port, msgspec.structs.replace(PACED, max_batch_size=8))))
    command = [sys.executable, "-m", "ray.serve.scripts", "run", str(file), "--address", cluster.nodes.address]
    subprocess.run([*command, "--non-blocking"], check=True, timeout=WAIT)

    def sizes() -> set[int]:
        return {json.loads(one["card"])["max_batch_size"] for one in cluster.replicas().values()}

    until(lambda: sizes() == {8}, seconds=WAIT)
    body = {"model": "paced", "messages": STORY, "max_tokens": 4}
    assert post(cluster.url, "chat/completions", body)["usage"]["completion_tokens"] == 4


def test_replicas_come_and_go_with_the_load(cluster: Cluster) -> None:
    """R6: 1 to 3 to 1, and no request fails or differs from one without a change."""
    small = msgspec.structs.replace(PACED, max_batch_size=4)
    replace(cluster, config(cluster.port, small, min_replicas=1, calm_seconds=4.0))
    cluster.replicas(1)
    body = {"model": "paced", "messages": STORY, "max_tokens": 200, "ignore_eos": True, "seed": 1}
    whole = joined(cluster.local, body)
    assert whole["error"] is None
    many, any_left = threading.Event(), threading.Event()
    wrong: list[Any] = []

    def client(stop: threading.Event) -> None:
        while not stop.is_set():
            told = joined(cluster.url, body)
            if told != whole:
                wrong.append(told)

    # Eight take 8 / (0.75 * 4) = 2.7 replicas; one is less than half of what two could take.
    threads = [threading.Thread(target=client, args=(any_left if number == 0 else many,)) for number in range(8)]
    for thread in threads:
        thread.start()
    try:
        cluster.replicas(REPLICAS)
        many.set()
        cluster.replicas(1)
    finally:
        many.set()
        any_left.set()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_stream_goes_on_when_its_node_dies(cluster: Cluster) -> None:
    """R4: and the engine process of the node ends with it."""
    nodes = [cluster.nodes.add_node(num_cpus=0, num_gpus=1, object_store_memory=80 << 20) for _ in range(2)]
    # More than half of a node's share each: the replicas are on one node each, and the ingress stays on the head.
    replace(cluster, config(cluster.port, min_replicas=2, max_replicas=2, engine_cpus=0.0, engine_gpus=0.6))
    assert {one["node"] for one in cluster.replicas(2).values()} == {node.node_id for node in nodes}
    body = long("tools")
    whole = joined(cluster.local, body)
    assert whole["error"] is None
    killed: list[dict[str, Any]] = []

    def seen(events: int) -> None:
        if events == 4:
            killed.append(cluster.busy())
            node = next(node for node in nodes if node.node_id == killed[0]["node"])
            node.kill_raylet()

    broken = joined(cluster.url, body, seen)
    assert killed
    assert broken == whole
    until(lambda: not Path(f"/proc/{killed[0]['pid']}").exists(), seconds=WAIT)
