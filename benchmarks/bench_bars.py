"""Bars of `exl serve` that need no GPU: each is printed with its figure and whether it is met.

    python benchmarks/bench_bars.py [wire] [streams] [start] [lag] [hostile] [health] [queue] [page] [cycles]
        [--cycles 100] [--servers 1] [--device cpu] [--share 1.0]

Without names all run but `cycles`. Test engines stand for a model: everything else is as in `exl serve`. Times count
only on a machine that does nothing else. One JSON line for each bar, and in words on standard error.

    wire     microseconds of the engine thread outside the generator, a step of 32 sequences. Each step wakes a thread
             that sends: a system call that takes longer if it wakes another core, most of all in a virtual machine. The
             second figure keeps all threads on one core, where no other has to be woken (Linux)
    streams  memory of an API worker: idle, and for each open stream
    start    seconds from the start of `exl serve` to /health/live, and to ready beyond loading the model
    lag      99th percentile of the lateness of a worker's event loop: images of 20 MB, long prompts, large schemas.
             Its second figure leaves out the time in which the loop's thread waited for a core, so it counts on a
             machine with few cores as well
    hostile  time between events of 16 streams during 100 slow readers, slow senders and large schemas, divided by that
             during 100 ordinary streams; `--hostile readers`, `senders` or `schemas` runs only those. Each of
             six runs (three pairs) lasts `--seconds` and some seconds more: two minutes in all
    health   99th percentile of /health/ready in a burst of 2,000 requests
    queue    time of a step with 10,000 queued requests over none, and its longest pause
    cycles   open files and memory after loads and unloads of a model, on `--device` (minutes; only where it is named)
    page     time of a frame of the chat page while an answer streams into 200 messages (needs chromium, chromedriver)
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bar_clients import CHAT, KINDS, ask, clients_in_background, completion, events, message, png, repeated, schema
from host_cost import host_cost
from http_load import HEAD, percentile
from loop_lag import lateness
from soak_serve import Server

OPEN_STREAMS = 512
BURST = 2000
QUEUED = 10_000
PAIRS = 3
"""Runs with ordinary and with hostile clients in turn: a single pair differs by a third from the next one."""


@dataclass(frozen=True)
class Given:
    """The command line: seconds of each measurement under load; for `cycles` their number, servers and device; kinds of
    hostile clients; share of all numbers of requests.
    """

    seconds: float
    cycles: int
    servers: int
    device: str
    hostile: tuple[str, ...]
    share: float

    def of(self, number: int) -> int:
        """Return the share of a number, which is at least 2."""
        return max(2, round(self.share * number))


@dataclass(frozen=True)
class Bar:
    """One figure and the most that it may be."""

    name: str
    figure: float
    most: float
    unit: str

    def tell(self) -> bool:
        """Print the bar. Return whether the figure meets it."""
        met = self.figure <= self.most
        line = {"bench": "bar", "name": self.name, "figure": round(self.figure, 4), "most": self.most}
        print(json.dumps(line | {"unit": self.unit, "met": met}), flush=True)
        verdict = "met" if met else "MISSED"
        print(f"{self.name}: {self.figure:.4g} {self.unit} (at most {self.most:g}): {verdict}", file=sys.stderr)
        return met


@contextmanager
def serving(
    engine: str = "paced", streams: int = 64, template: str = "", device: str = "cpu", **limits: int
) -> Iterator[Server]:
    """`exl serve` with a test engine."""
    server = Server(streams, 1, engine=engine, limits=limits, template=template, device=device)
    try:
        yield server
    finally:
        server.close()


# ---- bars ----------------------------------------------------------------------------------------------------------


def wire(given: Given) -> list[Bar]:
    """Host work of a step outside the generator."""
    from exl_generate import bundled

    folder, new = str(bundled.default_model_dir()), max(32, given.of(256))
    anywhere = host_cost(folder, 32, new)
    with on_one_core():
        one_core = host_cost(folder, 32, new)
    return [
        Bar("wire: engine thread outside the generator, 32 sequences", anywhere["host_us"] * 32, 30.0, "us a step"),
        Bar("wire: with all threads on one core", one_core["host_us"] * 32, 30.0, "us a step"),
    ]


@contextmanager
def on_one_core() -> Iterator[None]:
    """Run all threads of this process on one core."""
    cores = os.sched_getaffinity(0)

    def move(to: set[int]) -> None:
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), to)

    move({max(cores)})
    try:
        yield
    finally:
        move(cores)


def streams(given: Given) -> list[Bar]:
    """Memory of an API worker."""

    async def held(port: int, count: int) -> int:
        draw = random.Random(1)
        stamps: list[list[float]] = [[] for _ in range(count)]
        tasks = [asyncio.create_task(events(port, completion(draw, 900), own)) for own in stamps]
        while not all(stamps[: min(count, 64)]):
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        memory = server.measured()["worker.0"]["memory"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return memory

    with serving(max_queued_requests=4096, max_queued_prompt_tokens=1 << 20) as server:
        idle = server.measured()["worker.0"]["memory"]
        asyncio.run(held(server.port, 8))
        few = asyncio.run(held(server.port, 1))
        many = asyncio.run(held(server.port, given.of(OPEN_STREAMS)))
    each = (many - few) / (given.of(OPEN_STREAMS) - 1) / 1024
    return [
        Bar("streams: API worker, idle", idle / (1 << 20), 120.0, "MiB"),
        Bar("streams: API worker, an open stream", each, 48.0, "KiB"),
    ]


def start(given: Given) -> list[Bar]:
    """Start of a server with the bundled model, against loading it in a process alone."""
    from exl_generate import bundled

    program = (
        "import sys\nfrom exl_serve.config.model import ModelConfig\nfrom exl_serve.engine.load import load\n"
        "load(ModelConfig(id='m', path=sys.argv[1], device='cpu'))"
    )
    folder = str(bundled.default_model_dir())
    began = time.perf_counter()
    subprocess.run([sys.executable, "-P", "-c", program, folder], check=True)
    loading = time.perf_counter() - began
    # An installed package has its bytecode.
    subprocess.run([sys.executable, "-P", "-c", "import exl_serve.cli, exl_serve.api.__main__"], check=True)
    began = time.perf_counter()
    server = Server(16, 1, engine="model", wait=False)
    try:
        live = server.wait_for("/health/live", began)
        found = server.cpu_seconds()
        busy = found["supervisor"] + found["worker.0"]
        ready = server.wait_for("/health/ready", began)
    finally:
        server.close()
    return [
        Bar("start: to /health/live", live, 1.0, "s"),
        Bar("start: CPU time of supervisor and API worker until then", busy, 1.0, "s"),
        Bar("start: to ready, beyond loading the model", ready - loading, 3.0, "s"),
    ]


def lag(given: Given) -> list[Bar]:
    """Lateness of the event loop, by a task in the worker."""
    image = {"type": "image_url", "image_url": {"url": png(given.of(2600))}}
    picture = message(CHAT, {"messages": [{"role": "user", "content": [image]}], "max_tokens": 2})
    long_text = message(HEAD, {"prompt": "All the words of a long prompt. " * given.of(12_500), "max_tokens": 2})
    numbers = itertools.count()

    def hard() -> bytes:
        asked = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema(given.of(300), next(numbers))}}
        messages = [{"role": "user", "content": "a"}]
        return message(CHAT, {"messages": messages, "response_format": asked, "max_tokens": 2})

    async def mixed(port: int) -> None:
        draw, until = random.Random(1), time.perf_counter() + given.seconds
        await asyncio.gather(
            *(repeated(lambda: events(port, completion(draw), []), until) for _ in range(16)),
            repeated(lambda: ask(port, picture), until),
            repeated(lambda: ask(port, long_text), until),
            repeated(lambda: ask(port, hard()), until),
        )

    found = lateness(mixed)
    return [
        Bar("lag: event loop, 99th percentile", found["late"], 5.0, "ms"),
        Bar("lag: without the time in which its thread waited for a core", found["blocked"], 5.0, "ms"),
    ]


def hostile(given: Given) -> list[Bar]:
    """Time between events of well-behaved clients alongside hostile ones, divided by that alongside well-behaved ones.

    The other clients run in their own process, so that their work does not delay the clients that measure.
    """

    async def measured(port: int) -> float:
        await asyncio.sleep(1.0)
        draw, until = random.Random(1), time.perf_counter() + given.seconds
        own: list[list[float]] = []

        async def one() -> None:
            own.append([])
            await events(port, completion(draw, 400), own[-1], until)

        await asyncio.gather(*(repeated(one, until) for _ in range(16)))
        return percentile([b - a for stamps in own for a, b in itertools.pairwise(stamps)], 0.99)

    def near(port: int, kind: str) -> float:
        with clients_in_background(kind, port):
            return asyncio.run(measured(port))

    with serving(streams=128, max_queued_requests=1024) as server:
        port = server.port
        pairs = given.of(PAIRS)
        ordinary, ratios = [], {kind: list[float]() for kind in given.hostile}
        for pair in range(1, pairs + 1):
            ordinary.append(near(port, "ordinary"))
            for kind, found in ratios.items():
                found.append(near(port, kind) / ordinary[-1])
                print(f"hostile, {kind}, pair {pair} of {pairs}: {found[-1]:.3f}", file=sys.stderr, flush=True)
    name = f"99th percentile between events, over ordinary clients, median of {pairs} pairs"
    return [Bar(f"hostile: {kind}: {name}", statistics.median(found), 1.1, "times") for kind, found in ratios.items()]


def health(given: Given) -> list[Bar]:
    """Answers of /health/ready in a burst."""
    took: list[float] = []
    stop = threading.Event()

    def probe() -> None:
        while not stop.is_set():
            began = time.perf_counter()
            server.get("/health/ready")
            took.append(time.perf_counter() - began)
            time.sleep(0.02)

    async def burst(port: int) -> None:
        draw = random.Random(1)
        await asyncio.gather(*(events(port, completion(draw, 16), []) for _ in range(given.of(BURST))))

    with serving("free", max_queued_requests=4096, max_queued_prompt_tokens=1 << 20) as server:
        prober = threading.Thread(target=probe)
        prober.start()
        asyncio.run(burst(server.port))
        stop.set()
        prober.join()
    return [Bar(f"health: /health/ready, 99th percentile of {len(took)}", percentile(took, 0.99) * 1e3, 50.0, "ms")]


def queue(given: Given) -> list[Bar]:
    """Steps of the engine process with a long queue."""
    import zmq
    from host_cost import host_work

    from exl_generate import bundled
    from exl_serve.config.model import Limits, ModelConfig, Qos
    from exl_serve.engine import wire as protocol
    from exl_serve.engine.host import Host
    from exl_serve.engine.load import load
    from exl_serve.engine.status import StatusWriter

    config = ModelConfig(id="m", path=str(bundled.default_model_dir()), max_batch_size=32, engine="free", device="cpu")
    loaded = load(config)
    most = given.of(QUEUED)
    limits = Limits(max_queued_requests=2 * most, max_queued_prompt_tokens=1 << 30)
    rows: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        status = StatusWriter(Path(place) / "status", os.urandom(16))
        address = f"ipc://{place}/engine"
        host = Host(loaded.generator, loaded.card, address, status, config=config, limits=limits, qos=Qos())
        client: Any = zmq.Context.instance().socket(zmq.DEALER)
        client.setsockopt(zmq.RCVHWM, 0)
        client.setsockopt(zmq.SNDHWM, 0)
        client.connect(address)
        client.send(protocol.encode(protocol.Hello(protocol.VERSION, "bench")))
        requests = [request for _, request in host_work(32, 900)]
        sent = 0
        for queued in (0, most):
            for tag in range(sent + 1, 32 + queued + 1):
                client.send(protocol.encode(protocol.Submit(tag, requests[tag % 32])))
            sent = 32 + queued
            # Without steps in between, in which the first ones would end.
            while len(host._groups) < sent:
                for worker, data in host._inbox.receive(1.0):
                    host._take(worker, data)
            client.send(protocol.encode(protocol.Ping()))
            while len(host._running) < 32:
                host._run_once()
            gc.collect()
            gc.freeze()
            gc.set_threshold(50_000, 20, 100)
            for _ in range(20):
                host._run_once()
            rows[queued] = []
            for _ in range(200):
                client.send(protocol.encode(protocol.Ping()))
                began = time.thread_time()
                host._run_once()
                rows[queued].append(time.thread_time() - began)
        client.close(0)
        host._close()
    ratio = statistics.median(rows[most]) / statistics.median(rows[0])
    pause = max(rows[most]) - statistics.median(rows[most])
    return [
        Bar(f"queue: a step with {most:,} queued requests, over none", ratio, 1.05, "times"),
        Bar("queue: longest pause in a step", pause * 1e3, 20.0, "ms"),
    ]


def cycles(given: Given) -> list[Bar]:
    """Load and unload a model in several servers at once; return the bars on memory and files that are left."""

    def post(server: Server, what: str) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/v1/models/test/{what}",
            data=b"{}",
            headers={"content-type": "application/json"},
        )
        try:
            urllib.request.urlopen(request, timeout=120).close()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{what}: {error.read().decode()}") from None

    def unload(server: Server) -> None:
        post(server, "unload")
        while any(name.startswith("engine") for name in server.processes()):
            time.sleep(0.05)

    def cycle(server: Server, count: int) -> None:
        for _ in range(count):
            post(server, "load")
            server.wait_for("/health/ready", 0.0)
            unload(server)

    def left(servers: list[Server]) -> tuple[int, int, int]:
        """Open files and bytes of the processes without an engine, and bytes in use on the GPUs."""
        found = [one for server in servers for one in server.measured().values()]
        return sum(one["files"] for one in found), sum(one["memory"] for one in found), gpu_bytes()

    def close(made: Future[Server]) -> None:
        if made.exception() is None:
            made.result().close()

    shares = [given.cycles // given.servers + (i < given.cycles % given.servers) for i in range(given.servers)]
    with ExitStack() as stack, ThreadPoolExecutor(given.servers) as pool:
        made = [pool.submit(Server, 16, 1, engine="model", device=given.device) for _ in shares]
        for one in made:
            stack.callback(close, one)
        servers = [one.result() for one in made]
        list(pool.map(unload, servers))
        first = left(servers)
        list(pool.map(cycle, servers, shares))
        last = left(servers)
    files, memory, gpu = (after - before for before, after in zip(first, last, strict=True))
    return [
        Bar(f"cycles: open files left by {given.cycles} loads", files, 0, "files"),
        Bar("cycles: GPU memory left", gpu, 0, "bytes"),
        Bar("cycles: memory left in supervisor and worker by a load", memory / given.cycles / 1024, 64.0, "KiB"),
    ]


def gpu_bytes() -> int:
    """Return the bytes in use on all GPUs; 0 without one."""
    if shutil.which("nvidia-smi") is None:
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(int(line) << 20 for line in subprocess.run(command, capture_output=True, check=True).stdout.split())


def page(given: Given) -> list[Bar]:
    """Frames of the chat page while an answer streams into a chat of 200 messages, in a headless Chromium."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"Message **{i}**, of a few words."} for i in range(200)
    ]
    with serving(template="{{ messages[-1]['content'] }}") as server:
        browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            browser.set_script_timeout(120)
            browser.get(f"http://127.0.0.1:{server.port}/")
            saved = {"messages": messages, "max_tokens": "900", "temperature": "0"}
            browser.execute_script("localStorage.setItem('exl-chat', JSON.stringify(arguments[0]))", saved)
            browser.refresh()
            frames, took = browser.execute_async_script(FRAMES)
        finally:
            browser.quit()
    return [Bar(f"page: a frame in a chat of 200 messages, mean of {frames}", took / max(frames, 1), 1000 / 30, "ms")]


FRAMES = """
const done = arguments[0];
const wait = setInterval(() => {
  if (!document.querySelector("#model option")) return;
  clearInterval(wait);
  document.getElementById("input").value = "Tell me a story.";
  document.getElementById("form").requestSubmit();
  let frames = 0, began = 0;
  const count = (now) => {
    const text = document.querySelector("#messages > li:last-child .body").textContent;
    if (text && !began) began = now; else if (began) frames += 1;
    if (began && document.getElementById("stop").hidden) done([frames, now - began]);
    else requestAnimationFrame(count);
  };
  requestAnimationFrame(count);
}, 50);
"""


BARS: dict[str, Callable[[Given], list[Bar]]] = {
    one.__name__: one for one in (wire, streams, start, lag, hostile, health, queue, page, cycles)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BARS)}")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement under load")
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--servers", type=int, default=1, help="for cycles: that many share them")
    parser.add_argument("--device", default="cpu", help="for cycles")
    parser.add_argument("--hostile", nargs="+", default=["all"], choices=KINDS, help="kinds of hostile clients")
    parser.add_argument("--share", type=float, default=1.0, help="of all numbers of requests: less for a trial")
    args = parser.parse_args()
    given = Given(args.seconds, args.cycles, args.servers, args.device, tuple(args.hostile), args.share)
    unknown = set(args.names) - set(BARS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there is {', '.join(BARS)}")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    missed = 0
    for name in args.names or [name for name in BARS if name != "cycles"]:
        missed += sum(not bar.tell() for bar in BARS[name](given))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
