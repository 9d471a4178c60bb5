"""CPU time of an API worker per token: real HTTP on loopback, an engine that only sends events.

    python benchmarks/bench_worker.py [--streams 64] [--tokens 256] [--rounds 3] [--api chat] [--profile]

The engine's messages are encoded beforehand and decoded as they would be from a socket. Clients read in a process of
their own. One JSON line: microseconds of CPU per token of the worker's process, whose wall time others on the machine
do not change. `--profile` prints where a profiler sees the time.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import os
import pstats
import socket
import statistics
import struct
import time
from typing import Any

import uvicorn
import uvloop
from http_worker import models_of

from exl_generate import bundled
from exl_serve.api.app import create_app
from exl_serve.api.limits import guarded
from exl_serve.api.state import AppState, Caller
from exl_serve.config.model import Limits, ServeConfig, ServerConfig
from exl_serve.engine import wire
from exl_serve.engine.client import ModelCard
from exl_serve.engine.events import Finished, Started, Usage
from exl_serve.engine.local import LocalEngine
from exl_serve.metrics import NoMeter

STEP_SECONDS = 0.004


class Engine(LocalEngine):
    """Accepts requests, and sends each stream a token per step once all are there."""

    def __init__(self, folder: str, streams: int, tokens: int) -> None:
        self.card_ = ModelCard(
            id="bench", folder=folder, max_seq_len=4096, max_batch_size=streams, cache_tokens=1 << 20, vocab_size=3000,
            eos_ids=(2,), digest="0" * 32,
        )  # fmt: skip
        self._running = {}
        self._unheard = set()
        self._streams, self._tokens, self._last_tag = streams, tokens, 0
        self.seconds = 0.0
        self.wall = 0.0
        self.profile: cProfile.Profile | None = None

    @property
    def card(self) -> ModelCard:
        return self.card_

    async def submit(self, request: Any, sink: Any) -> Any:
        from exl_serve.engine.local import _Running

        self._last_tag += 1
        one = _Running(self, self._last_tag, sink, (0,))
        self._running[self._last_tag] = one
        self._unheard.add(self._last_tag)
        if len(self._running) == self._streams:
            asyncio.get_running_loop().call_later(0.2, self._begin)
        return one

    def _send(self, message: Any) -> None:
        pass

    def check_room(self, most: int | None) -> None:
        """Take every request: this engine reports no queue."""

    def _begin(self) -> None:
        tags = list(self._running)
        usage = Usage(prompt_tokens=4, completion_tokens=self._tokens)
        first = wire.encode(wire.StepEvents([(tag, Started(0, 4, 0)) for tag in tags]))
        to, counts = b"".join([wire.address_of(tag, 0) for tag in tags]), b"\1\0" * len(tags)
        texts = [" word"] * len(tags)
        steps = [
            wire.encode(
                wire.StepEvents([], wire.TokenColumns(to, counts, struct.pack("<i", 20 + i % 200) * len(tags), texts))
            )
            for i in range(self._tokens)
        ]
        last = wire.encode(wire.StepEvents([(tag, Finished(0, "length", None, usage)) for tag in tags]))
        self._left = iter([first, *steps, last])
        self._began = time.process_time()
        self._times = os.times()
        if self.profile is not None:
            self.profile.enable()
        self._step()

    def _step(self) -> None:
        data = next(self._left, None)
        if data is None:
            self.seconds = time.process_time() - self._began
            now = os.times()
            self.user, self.system = now.user - self._times.user, now.system - self._times.system
            if self.profile is not None:
                self.profile.disable()
            return
        self._take(wire.decode_to_worker(data))
        asyncio.get_running_loop().call_later(STEP_SECONDS, self._step)


def clients(port: int, streams: int, api: str, out: Any) -> None:
    body: dict[str, Any] = {"stream": True, "max_tokens": 3000, "model": "bench"}
    path = "/v1/completions"
    if api == "chat":
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "hi"}]
    else:
        body["prompt"] = [30, 31, 32, 33]
    data = json.dumps(body).encode()

    async def one() -> tuple[int, int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n".encode()
            + data
        )
        events = size = 0
        while True:
            piece = await reader.read(1 << 16)
            size += len(piece)
            events += piece.count(b"data: ")
            if b"data: [DONE]" in piece or not piece:
                writer.close()
                return events, size

    async def all_() -> list[tuple[int, int]]:
        return await asyncio.gather(*(one() for _ in range(streams)))

    out.put(asyncio.run(all_()))


def served(folder: str, args: argparse.Namespace) -> dict[str, Any]:
    async def connected() -> Any:
        return engine

    engine = Engine(folder, args.streams, args.tokens)
    engine.profile = cProfile.Profile() if args.profile else None
    limits = Limits(max_connections_per_address=4096)
    config = ServeConfig(server=ServerConfig(limits=limits))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    out: Any = multiprocessing.Queue()
    client = multiprocessing.Process(
        target=clients, args=(listener.getsockname()[1], args.streams, args.api, out), daemon=True
    )

    async def run() -> list[tuple[int, int]]:
        state = AppState(config, models_of(folder, connected, args.family), NoMeter(), lambda scope, needed: Caller())
        settings = uvicorn.Config(
            create_app(state), log_level="warning", lifespan="off", access_log=False, http=guarded(limits)
        )
        server = uvicorn.Server(settings)
        task = asyncio.create_task(server.serve([listener]))
        client.start()
        # An error in a step would leave the clients waiting for ever.
        asyncio.get_running_loop().set_exception_handler(lambda _, context: out.put(context))
        found = await asyncio.to_thread(out.get)
        if isinstance(found, dict):
            raise RuntimeError(found["message"]) from found.get("exception")
        server.should_exit = True
        await task
        return list(found)

    found = uvloop.run(run())
    client.join()
    if engine.profile is not None:
        pstats.Stats(engine.profile).sort_stats("tottime").print_stats(45)
    tokens = args.streams * args.tokens
    return {
        "cpu_us": round(engine.seconds / tokens * 1e6, 2),
        "user_us": round(engine.user / tokens * 1e6, 2),
        "system_us": round(engine.system / tokens * 1e6, 2),
        "events_per_token": round(sum(events for events, _ in found) / tokens, 3),
        "bytes_per_token": round(sum(size for _, size in found) / tokens, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--api", choices=("chat", "completions"), default="chat")
    parser.add_argument("--family", default="hermes")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    folder = str(bundled.default_model_dir())
    rows = [served(folder, args) for _ in range(args.rounds)]
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    line = {"bench": "API worker", "api": args.api, "streams": args.streams, "tokens": args.tokens}
    print(json.dumps(line | middle | {"least_us": min(row["cpu_us"] for row in rows)}))


if __name__ == "__main__":
    main()
