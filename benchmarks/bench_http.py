"""HTTP against the engine alone: the same requests, straight to the generator and through a server, on one machine.

    python benchmarks/bench_http.py [--shape 8b | --paced] [--streams 64] [--requests 192] [--new 128] [--workers 1 2]
        [--profile]
    python benchmarks/bench_http.py --host [--streams 64] [--new 128] [--rounds 3]

Random weights of true shapes on a GPU (gpu_model.py), or with --paced a scripted model whose rounds last as long as
those of an 8B model on an H200, on any machine. Processes as in `exl serve`: the engine here, API workers and the load
generator in processes of their own. One JSON line: tokens a second both ways and their ratio, time to the first token,
time between events as a client sees them. `added`: what they are more than in the engine process, from the arrival of a
request to the step that gives its first token, and between its steps. `more_than_alone`: more than with the generator
alone, to which requests come between steps and all at once. The requests that begin together at the start count in the
latter only. The tokens of both ways are compared. After the line, on standard error, the bars and whether each is met;
ends with 1 if one is missed.

With --host there is no HTTP: the engine process's thread alone, on a scripted model, all streams in nearly every round.
Microseconds of CPU time per token: `host_us` outside the generator, `generator_us` in it with its results, `encode_us`
the share of encoding, `decode_us` what a worker decodes. Medians of rounds. `events` is a digest of all that the
clients are told.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import cProfile
import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import pstats
import queue
import re
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CPU = time.thread_time
"""Seconds of CPU time of this thread, which other work on the machine hardly changes."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: "


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def work(count: int, vocab: int, new: int, longest: int, seed: int = 1) -> list[dict[str, Any]]:
    """The requests: prompts of random tokens, greedy, without an end of text. Their answers are of different lengths,
    `new` tokens in the mean, so that requests come one by one both ways: all prompts at once would flatter the engine.
    """
    import random

    draw = random.Random(seed)
    return [
        {
            "prompt": [draw.randrange(300, vocab) for _ in range(draw.randrange(min(64, longest - 1), longest))],
            "max_tokens": draw.randrange(new // 2, new * 3 // 2),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "seed": seed,
        }
        for seed in range(count)
    ]


def digest(answers: list[list[int]]) -> str:
    return hashlib.blake2b(json.dumps(answers).encode(), digest_size=8).hexdigest()


# ---- the engine alone ----------------------------------------------------------------------------------------------


def alone(generator: Any, requests: list[dict[str, Any]], streams: int, floor: Any) -> dict[str, Any]:
    """`streams` jobs at a time, the next when one has ended."""
    import torch

    from exl_generate import ExLlamaV2DynamicJob, ExLlamaV2Sampler

    settings = ExLlamaV2Sampler.Settings(temperature=0.0, top_k=0, top_p=0.0, token_repetition_penalty=1.0)
    waiting = list(enumerate(requests))[::-1]
    answers: list[list[int]] = [[] for _ in requests]
    stamps: list[list[float]] = [[] for _ in requests]
    sent = [0.0] * len(requests)
    numbers: dict[Any, int] = {}
    began = time.perf_counter()
    while waiting or numbers:
        while waiting and len(numbers) < streams:
            number, asked = waiting.pop()
            job = ExLlamaV2DynamicJob(
                torch.tensor([asked["prompt"]]), asked["max_tokens"], gen_settings=settings, seed=asked["seed"],
                max_rq_tokens=512,
            )  # fmt: skip
            generator.enqueue(job)
            numbers[job] = number
            sent[number] = time.perf_counter()
        round_began = time.monotonic()
        told = []
        jobs = len(numbers)
        for result in generator.iterate():
            ids = result.get("token_ids")
            if ids is not None:
                told.append(numbers[result["job"]])
                answers[told[-1]] += ids[0].tolist()
            if result["eos"]:
                del numbers[result["job"]]
        if floor is not None:
            time.sleep(max(0.0, round_began + floor(jobs) - time.monotonic()))
        now = time.perf_counter()
        for number in told:
            stamps[number].append(now)
    seconds = time.perf_counter() - began
    found = {"seconds": seconds, "tok_s": sum(map(len, answers)) / seconds, "digest": digest(answers)}
    return found | delays(sent, stamps)


def delays(sent: list[float], stamps: list[list[float]]) -> dict[str, float]:
    """Milliseconds to the first token of each request, and between its further events."""
    first = [(own[0] - asked) * 1e3 for asked, own in zip(sent, stamps, strict=True)]
    between = [(b - a) * 1e3 for own in stamps for a, b in itertools.pairwise(own)]
    return {
        "first_token_ms_p50": percentile(first, 0.5),
        "first_token_ms_p99": percentile(first, 0.99),
        "between_ms_p50": percentile(between, 0.5),
        "between_ms_p99": percentile(between, 0.99),
    }


DELAYS = {"first_token_ms_p50": 3.0, "first_token_ms_p99": 10.0, "between_ms_p50": 0.3, "between_ms_p99": 2.0}
"""Most milliseconds that HTTP may add."""


def bars(line: dict[str, Any], paced: bool) -> list[tuple[str, float, str, bool]]:
    """Return (name, figure, bar, met) of each bar."""
    least = 0.98 if paced else 0.95
    ratio = round(line["ratio_median"], 3)
    found = [("throughput through HTTP / alone", ratio, f"at least {least}", ratio >= least)]
    for name, most in DELAYS.items():
        added = round(line["added"][name], 2)
        found.append((f"{name}, added to the engine process's", added, f"at most {most}", added <= most))
    return found


class Rounds:
    """How long a generator's rounds take that compute no prompt, about: the median of all."""

    def __init__(self, generator: Any) -> None:
        self.took: list[float] = []
        for name in ("iterate", "iterate_columns"):
            setattr(generator, name, timed(getattr(generator, name), self.took))

    def median(self) -> float:
        found = percentile(self.took, 0.5) * 1e3
        self.took.clear()
        return found


def timed(call: Any, took: list[float], clock: Any = time.perf_counter) -> Any:
    """`call`, with the seconds of each call appended to `took`."""

    def timing(*given: Any) -> Any:
        began = clock()
        try:
            return call(*given)
        finally:
            took.append(clock() - began)

    return timing


# ---- the engine process's thread alone -----------------------------------------------------------------------------


def host_cost(folder: str, streams: int, new: int) -> dict[str, Any]:
    """The host's turns, called one by one here, with a client that reads between them."""
    import zmq

    from exl_serve.config.model import Limits, ModelConfig
    from exl_serve.engine import wire
    from exl_serve.engine.host import Host
    from exl_serve.engine.load import load as load_engine
    from exl_serve.engine.status import StatusWriter

    config = ModelConfig(id="bench", path=folder, max_batch_size=streams, engine="free", device="cpu")
    loaded = load_engine(config)
    generator, card = loaded.generator, loaded.card
    in_generator: list[float] = []
    for name in ("iterate", "iterate_columns"):
        setattr(generator, name, timed(getattr(generator, name), in_generator, CPU))
    encoding: list[float] = []
    with tempfile.TemporaryDirectory() as place, replaced(wire, "encode", timed(wire.encode, encoding, CPU)):
        address = f"ipc://{place}/engine"
        status = StatusWriter(Path(place) / "status", os.urandom(16))
        host = Host(generator, card, address, status, config=config, limits=Limits(max_queued_requests=4 * streams))
        client: Any = zmq.Context.instance().socket(zmq.DEALER)
        client.connect(address)
        client.send(wire.encode(wire.Hello(wire.VERSION, "bench")))
        for asked in host_work(streams, new):
            client.send(wire.encode(wire.Submit(*asked)))
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        heard = Heard()
        rows: list[dict[str, float]] = []
        while heard.open or not heard.tags:
            in_generator.clear()
            encoding.clear()
            began = CPU()
            host._run_once()
            took = CPU() - began
            encoded = sum(encoding)
            tokens, decoded = heard.read(client)
            if tokens >= 0.9 * streams and len(in_generator) == 1:  # the others begin, end or hold text back
                seconds = {"host": took - in_generator[0], "generator": in_generator[0], "turn": took}
                seconds |= {"encode": encoded, "decode": decoded}
                rows.append({name: value / tokens * 1e6 for name, value in seconds.items()})
        client.close(0)
        host._close()
    middle = {f"{name}_us": round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}
    return {"rounds": len(rows), **middle, "events": heard.digest()}


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def host_work(streams: int, new: int) -> Iterator[tuple[int, Any]]:
    """(tag, request): all of the same length, so that they decode together, with a stop string to be looked for."""
    import numpy as np

    from exl_serve.request.internal import EngineRequest, Sampling

    for number in range(1, streams + 1):
        prompt = (np.arange(20, 52, dtype="<i4") + number).tobytes()
        yield (
            number,
            EngineRequest(
                id=f"r{number}",
                prompt=prompt,
                sampling=Sampling(temperature=0.0),
                seeds=(number,),
                max_tokens=new,
                ignore_eos=True,
                stop_strings=("\n\nuser:",),
            ),
        )


class Heard:
    """Collect the events that the clients of `host_cost` received, by tag."""

    def __init__(self) -> None:
        self.tags: dict[int, list[Any]] = {}
        self.open = 0

    def read(self, client: Any) -> tuple[int, float]:
        """Everything that is there after a turn: tokens, and the seconds that their messages took to decode."""
        import zmq

        from exl_serve.engine import wire
        from exl_serve.engine.events import Failed, Finished, Tokens

        tokens, seconds = 0, 0.0
        while client.poll(2 if not tokens else 0):
            data = client.recv(zmq.NOBLOCK)
            began = CPU()
            message = wire.decode_to_worker(data)
            events = list(message.all()) if isinstance(message, wire.StepEvents) else []
            took = CPU() - began
            if isinstance(message, wire.Accepted):
                self.tags[message.tag] = []
                self.open += 1
            elif isinstance(message, wire.Rejected):
                raise RuntimeError(f"the engine refused a request: {message.message}")
            elif isinstance(message, wire.StepEvents):
                for tag, event in events:
                    self.tags[tag].append(event)
                    self.open -= isinstance(event, Finished | Failed)
                    tokens += len(event.ids) if isinstance(event, Tokens) else 0
                seconds += took
        return tokens, seconds

    def digest(self) -> str:
        """Of all events but the seconds in them."""
        import msgspec

        def plain(event: Any) -> Any:
            usage = getattr(event, "usage", None)
            if usage is None:
                return event
            none = {name: 0.0 for name in usage.__struct_fields__ if name.endswith("_seconds")}
            return msgspec.structs.replace(event, usage=msgspec.structs.replace(usage, **none))

        told = [(tag, [plain(event) for event in events]) for tag, events in sorted(self.tags.items())]
        return hashlib.blake2b(msgspec.msgpack.encode(told), digest_size=8).hexdigest()


# ---- processes -----------------------------------------------------------------------------------------------------


def worker(listener: socket.socket, address: str, folder: str, profile: str = "") -> None:
    """An API worker as in `exl serve`, with one model at `address`. Writes a profile to the file of that name."""
    import uvicorn

    from exl_serve.api.app import create_app
    from exl_serve.api.limits import guarded
    from exl_serve.api.state import AppState, Caller
    from exl_serve.api.text import FolderText
    from exl_serve.api.worker import find_model
    from exl_serve.config.model import Limits, ModelConfig, ServeConfig, ServerConfig
    from exl_serve.engine.local import LocalEngine
    from exl_serve.metrics import NoMeter
    from exl_serve.stream.channels import detect_family

    class Handle:
        config = ModelConfig(id="bench", path=folder)
        text = FolderText(folder)
        family = detect_family("none", None, text.special, text.piece)
        state = "ready"
        client: Any = None

        async def engine(self) -> Any:
            if self.client is None:
                self.client = asyncio.ensure_future(LocalEngine.connect(address))
            return await self.client

    class Models:
        handles = (Handle(),)

        def resolve(self, name: str, caller: Caller) -> Any:
            return find_model(self.handles, name, caller, accept_any=True)

        def list(self) -> Any:
            return self.handles

    limits = Limits(max_connections_per_address=4096)
    config = ServeConfig(server=ServerConfig(limits=limits))

    async def run() -> None:
        state = AppState(config, Models(), NoMeter(), lambda scope, needed: Caller())  # type: ignore[arg-type]
        settings = uvicorn.Config(
            create_app(state), log_level="warning", lifespan="off", access_log=False, http=guarded(limits)
        )
        await uvicorn.Server(settings).serve([listener])

    import uvloop

    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn sends it again once the server has ended
    taken = cProfile.Profile() if profile else contextlib.nullcontext()
    with taken:
        uvloop.run(run())  # until SIGTERM
    if isinstance(taken, cProfile.Profile):
        taken.dump_stats(profile)


def load(port: int, warm: list[dict[str, Any]], requests: list[dict[str, Any]], streams: int, out: Any) -> None:
    """Closed loop of `streams` connections, each event stamped as its bytes come. Puts a line into `out` after the
    warm-up, and the results at the end.
    """
    import uvloop

    uvloop.run(_load(port, warm, streams))
    out.put(None)
    out.put(uvloop.run(_load(port, requests, streams)))


class _Client(asyncio.Protocol):
    """One connection: sends a request, stamps what comes, and sends the next when it has ended."""

    def __init__(self, waiting: list[tuple[int, dict[str, Any]]], raw: Any, sent: list[float]) -> None:
        self._waiting, self._raw, self._sent = waiting, raw, sent
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._next()

    def _next(self) -> None:
        if not self._waiting:
            self._transport.close()
            self.done.set_result(None)
            return
        self._number, asked = self._waiting.pop()
        self._tail = b""
        body = json.dumps(asked).encode()
        self._sent[self._number] = time.perf_counter()
        self._transport.write(HEAD + str(len(body)).encode() + b"\r\n\r\n" + body)

    def data_received(self, data: bytes) -> None:
        own = self._raw[self._number]
        own.append((time.perf_counter(), data))
        if len(own) == 1 and not data.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(f"the server answered {data!r}"))
        self._tail = (self._tail + data)[-48:]
        if self._tail.endswith(b"0\r\n\r\n") and b"data: [DONE]" in self._tail:
            self._next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"the server has closed a connection: {error}"))


async def _load(port: int, requests: list[dict[str, Any]], streams: int) -> dict[str, Any]:
    waiting = list(enumerate(requests))[::-1]
    raw: list[list[tuple[float, bytes]]] = [[] for _ in requests]
    sent = [0.0] * len(requests)
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    clients = [
        (await loop.create_connection(lambda: _Client(waiting, raw, sent), "127.0.0.1", port))[1]
        for _ in range(streams)
    ]
    await asyncio.gather(*(client.done for client in clients))
    seconds = time.perf_counter() - began
    answers, all_stamps = [], []
    for pieces in raw:
        ids: list[int] = []
        stamps: list[float] = []
        ends = list(itertools.accumulate(len(data) for _, data in pieces))
        for event in re.finditer(rb"data: (\{.*?\})\n\n", b"".join(data for _, data in pieces)):
            choice = json.loads(event[1])["choices"][0]
            if choice.get("token_ids"):
                ids += choice["token_ids"]
                stamps.append(pieces[bisect.bisect_left(ends, event.end())][0])
        answers.append(ids)
        all_stamps.append(stamps)
    made = sum(map(len, answers))
    return {
        "seconds": seconds,
        "tok_s": made / seconds,
        "digest": digest(answers),
        **delays(sent, all_stamps),
        "tokens_per_event": made / max(1, sum(map(len, all_stamps))),
        "first": [own[0] - asked for asked, own in zip(sent, all_stamps, strict=True)],
    }


# ---- engines -------------------------------------------------------------------------------------------------------


def scripted(folder: str, streams: int) -> tuple[Any, Any]:
    from exl_serve.config.model import ModelConfig
    from exl_serve.engine.load import load as load_engine

    config = ModelConfig(id="bench", path=folder, max_batch_size=streams, engine="paced", device="cpu")
    loaded = load_engine(config)
    return loaded.generator, loaded.floor


def random_weights(shape: str, streams: int, new: int, longest: int) -> tuple[Any, Any]:
    from gpu_model import build

    from exl_core import ExLlamaV2Cache, ExLlamaV2Tokenizer
    from exl_generate import ExLlamaV2DynamicGenerator

    model = build(shape, "4.0", 32768)
    pages = -(-(longest + new * 3 // 2) // 256)
    cache = ExLlamaV2Cache(model, max_seq_len=streams * pages * 256)
    generator = ExLlamaV2DynamicGenerator(model, cache, ExLlamaV2Tokenizer(model.config), max_batch_size=streams)
    generator.warmup()
    return generator, None


def card_of(generator: Any, folder: str) -> Any:
    from exl_serve.engine.client import ModelCard

    return ModelCard(
        id="bench",
        folder=folder,
        max_seq_len=generator.max_seq_len,
        max_batch_size=generator.max_batch_size,
        cache_tokens=generator.max_total_tokens,
        vocab_size=generator.model.config.vocab_size,
        eos_ids=(2,),
        digest="0" * 32,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--paced", action="store_true", help="a scripted model in place of weights")
    parser.add_argument("--host", action="store_true", help="the engine process's thread alone, on a scripted model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=513, help="prompts are shorter than this")
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument("--profile", action="store_true", help="one more run, with profiles on standard error")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    from exl_generate import bundled

    folder = str(bundled.default_model_dir())
    if args.host:
        for _ in range(args.rounds):
            line = {"bench": "engine host", "streams": args.streams, **host_cost(folder, args.streams, args.new)}
            print(json.dumps(line), flush=True)
        return
    if not args.paced:
        from exl_kernels.device import set_row_invariant

        set_row_invariant(True)  # prompts that are cut otherwise give the same tokens
    generator, floor = (
        scripted(folder, args.streams)
        if args.paced
        else random_weights(args.shape, args.streams, args.new, args.prompt)
    )
    vocab = min(generator.model.config.vocab_size, 3000)
    requests = work(args.requests, vocab, args.new, args.prompt)
    rounds = Rounds(generator)
    alone(generator, requests[: args.streams], args.streams, floor)  # warm
    # As an engine process does.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    met = [compare(generator, floor, rounds, requests, workers, folder, args) for workers in args.workers]
    sys.exit(0 if all(met) else 1)


def compare(generator: Any, floor: Any, rounds: Rounds, requests: Any, workers: int, folder: str, args: Any) -> bool:
    """Both ways a few times; prints one line of figures, then the bars. Returns whether all are met."""
    measured = []
    with tempfile.TemporaryDirectory() as place:
        for _ in range(args.rounds):
            generator.reset_page_table()
            by_itself = alone(generator, requests, args.streams, floor) | {"round_ms": rounds.median()}
            generator.reset_page_table()
            through = served(generator, floor, folder, place, requests, workers, rounds, args.streams)
            measured.append((by_itself, through | {"round_ms_p50": rounds.median()}))
        if args.profile and workers == args.workers[0]:
            generator.reset_page_table()
            served(generator, floor, folder, place, requests, workers, rounds, args.streams, profile=True)
            rounds.median()
    best = max(pair[1]["tok_s"] / pair[0]["tok_s"] for pair in measured)
    by_itself, through = measured[-1]
    line = {
        "bench": "http",
        "engine": "paced" if args.paced else args.shape,
        "streams": args.streams,
        "requests": args.requests,
        "new_tokens": args.new,
        "workers": workers,
        "cpus": os.cpu_count(),
        "alone_tok_s": by_itself["tok_s"],
        "alone_round_ms_p50": by_itself["round_ms"],
        "ratio_median": statistics.median(pair[1]["tok_s"] / pair[0]["tok_s"] for pair in measured),
        "ratio_best": best,
        "same_tokens": all(a["digest"] == b["digest"] for a, b in measured),
        **through,
        "more_than_alone": {name: through[name] - by_itself[name] for name in DELAYS},
    }
    if not args.paced:
        from gpu_timing import environment

        line = {**environment(), **line}
    print(json.dumps(line), flush=True)
    found = bars(line, args.paced)
    for name, figure, bar, met in found:
        print(f"{name}: {figure} ({bar}): {'met' if met else 'MISSED'}", file=sys.stderr)
    return bool(line["same_tokens"]) and all(met for *_, met in found)


def served(
    generator: Any,
    floor: Any,
    folder: str,
    place: str,
    requests: Any,
    workers: int,
    rounds: Rounds,
    streams: int,
    *,
    profile: bool = False,
) -> dict[str, Any]:
    """The requests through HTTP. The engine runs in this process's main thread, as in an engine process.

    `host_ms_p50`: of a step, outside the generator. `worker_cores`: CPU seconds of the API workers a second.
    """
    from exl_serve.config.model import Limits, ModelConfig
    from exl_serve.engine.host import Host
    from exl_serve.engine.status import StatusWriter

    address = f"ipc://{place}/engine-{time.monotonic_ns()}"
    status = StatusWriter(Path(place) / f"status-{time.monotonic_ns()}", os.urandom(16))
    config = ModelConfig(id="bench", path=folder)
    limits = Limits(max_queued_requests=4096)
    host: Any = Host(
        generator, card_of(generator, folder), address, status, config=config, limits=limits, step_floor=floor
    )
    outside: list[float] = []
    host._run_once = besides(host._run_once, rounds.took, outside)
    stamps = HostStamps(host)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    out: Any = multiprocessing.Queue()
    files = [f"{place}/profile-{i}" if profile else "" for i in range(workers)]
    running = [
        multiprocessing.Process(target=worker, args=(listener, address, folder, file), daemon=True) for file in files
    ]
    warm = work(streams, 3000, 4, 66, seed=2)
    client = multiprocessing.Process(target=load, args=(port, warm, requests, streams, out), daemon=True)
    found: dict[str, Any] = {}

    def watch() -> None:
        try:
            client.start()
            received(out, client)  # all have been asked once
            rounds.took.clear()
            outside.clear()
            stamps.clear()
            before = sum(cpu_seconds(one.pid) for one in running)
            found.update(received(out, client))
            cores = (sum(cpu_seconds(one.pid) for one in running) - before) / found["seconds"]
            found.update(worker_cores=cores, host_ms_p50=percentile(outside, 0.5) * 1e3)
            found.update(added=stamps.added(found.pop("first"), streams, found))
        finally:
            host.stop()

    for one in running:
        one.start()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with cProfile.Profile() if profile else contextlib.nullcontext() as taken:
        host.run()
    watcher.join()
    for one in running:
        one.terminate()
        one.join()
    listener.close()
    if not found:
        raise RuntimeError("the load generator has failed")
    if profile:
        pstats.Stats(taken, stream=sys.stderr).sort_stats("tottime").print_stats(30)
        pstats.Stats(files[0], stream=sys.stderr).sort_stats("tottime").print_stats(30)
    return found


def received(out: Any, sender: Any) -> Any:
    """Return what a process has put into a queue. Raises RuntimeError if it has ended without."""
    while True:
        try:
            return out.get(timeout=0.5)
        except queue.Empty:
            if not sender.is_alive():
                raise RuntimeError("the load generator has failed") from None


class HostStamps:
    """When requests arrive in the engine process, and when their steps end. The clock is that of the clients."""

    def __init__(self, host: Any) -> None:
        self._asked: dict[int, float] = {}
        self._first: dict[int, float] = {}
        self._steps: list[tuple[float, list[int]]] = []
        submit, deliver_more, deliver = host._submit, host._deliver_more, host._deliver

        def submitting(worker: bytes, message: Any) -> None:
            self._asked[message.request.seeds[0]] = time.perf_counter()
            submit(worker, message)

        def delivering_more(entry: Any) -> None:
            if entry.ids or entry.text:
                self._first.setdefault(entry.running.group.request.seeds[0], time.perf_counter())
            deliver_more(entry)

        def delivering(columns: Any) -> Any:
            told = [serial for serial, count in zip(columns.serials, columns.counts, strict=True) if count]
            self._steps.append((time.perf_counter(), told))
            return deliver(columns)

        host._submit, host._deliver_more, host._deliver = submitting, delivering_more, delivering

    def clear(self) -> None:
        """Forget the warm-up."""
        self._asked.clear()
        self._first.clear()
        self._steps.clear()

    def added(self, first: list[float], streams: int, seen: dict[str, float]) -> dict[str, float]:
        """Return the milliseconds that clients waited longer than the engine process. `first`: seconds of each request
        as its client saw them, by seed, of which `streams` began together; `seen`: the client's percentiles.
        """
        more = [
            (took - (self._first[seed] - self._asked[seed])) * 1e3
            for seed, took in enumerate(first)
            if seed >= streams and seed in self._first
        ]
        last: dict[int, float] = {}
        between = []
        for at, serials in self._steps:
            for serial in serials:
                if serial in last:
                    between.append((at - last[serial]) * 1e3)
                last[serial] = at
        return {
            "first_token_ms_p50": percentile(more, 0.5),
            "first_token_ms_p99": percentile(more, 0.99),
            "between_ms_p50": seen["between_ms_p50"] - percentile(between, 0.5),
            "between_ms_p99": seen["between_ms_p99"] - percentile(between, 0.99),
        }


def besides(call: Any, inner: list[float], outside: list[float]) -> Any:
    """`call`, with the seconds of each call appended to `outside` without those that it adds to `inner`."""

    def timing() -> None:
        calls, began = len(inner), time.perf_counter()
        call()
        if len(inner) == calls + 1:
            outside.append(time.perf_counter() - began - inner[-1])

    return timing


def cpu_seconds(pid: int | None) -> float:
    """Return the CPU time of a process."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
