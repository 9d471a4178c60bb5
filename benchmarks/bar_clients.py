"""Clients of bench_bars.py: ordinary and hostile ones."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import multiprocessing
import os
import random
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from http_load import HEAD

__all__ = [
    "CHAT",
    "KINDS",
    "ask",
    "clients_in_background",
    "completion",
    "events",
    "message",
    "png",
    "repeated",
    "schema",
]

CHAT = HEAD.replace(b"/v1/completions", b"/v1/chat/completions")
KINDS = ("all", "readers", "senders", "schemas")
"""Hostile clients: slow readers, slow senders, large schemas, or all of them."""
CLIENT_SECONDS = 600.0
START_SECONDS = 120.0


def message(head: bytes, body: dict[str, Any]) -> bytes:
    """One HTTP request."""
    data = json.dumps(body).encode()
    return head + str(len(data)).encode() + b"\r\n\r\n" + data


def completion(draw: random.Random, new: int = 200) -> dict[str, Any]:
    """A streamed completion of a short prompt."""
    prompt = [draw.randrange(10, 250) for _ in range(16)]
    return {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}


async def events(port: int, body: dict[str, Any], stamps: list[float], until: float = float("inf")) -> None:
    """Read one stream and append the time of each event."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(message(HEAD, body))
    while (line := await reader.readline()) and line != b"data: [DONE]\n":
        if line.startswith(b"data: "):
            stamps.append(time.perf_counter())
            if stamps[-1] > until:
                break
    writer.transport.abort()


async def ask(port: int, data: bytes) -> int:
    """Send a request, read its answer; returns the status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    writer.write(data)
    await writer.drain()
    status = int((await reader.readline()).split()[1])
    length = 0
    while (line := await reader.readline()).strip():
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    await reader.readexactly(length)
    writer.close()
    return status


async def repeated(work: Callable[[], Awaitable[Any]], until: float) -> None:
    """Do something again and again."""
    while time.perf_counter() < until:
        await work()


def png(side: int) -> str:
    """A `data:` URL of a PNG of random pixels, which hardly compress."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)

    rows = b"".join(b"\0" + os.urandom(3 * side) for _ in range(side))
    head = side.to_bytes(4) + side.to_bytes(4) + b"\x08\x02\0\0\0"
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(file).decode()


def schema(fields: int, seed: int) -> dict[str, Any]:
    """A JSON schema of many fields; no two are alike."""
    kinds = ({"type": "string", "maxLength": 20}, {"type": "integer"}, {"enum": ["a", "b", "c"]})
    own = {f"field_{seed}_{i}": kinds[i % 3] for i in range(fields)}
    return {"type": "object", "properties": own, "required": list(own), "additionalProperties": False}


@contextmanager
def clients_in_background(kind: str, port: int) -> Iterator[None]:
    """Run clients in another process: "ordinary" ones, or a kind of hostile ones."""
    spawn = multiprocessing.get_context("spawn")
    begun = spawn.Event()
    process = spawn.Process(target=_run_clients, args=(kind, port, begun), daemon=True)
    process.start()
    try:
        if not begun.wait(START_SECONDS):
            raise RuntimeError("the clients in the background did not start")
        yield
    finally:
        process.terminate()
        process.join()


def _run_clients(kind: str, port: int, begun: Any) -> None:
    asyncio.run(_clients(kind, port, begun))


async def _clients(kind: str, port: int, begun: Any) -> None:
    until = time.perf_counter() + CLIENT_SECONDS
    found: list[Awaitable[Any]] = []
    if kind == "ordinary":
        draw = random.Random(2)
        found += [repeated(lambda: events(port, completion(draw, 900), []), until) for _ in range(100)]
    if kind in ("all", "readers"):
        found += [_slow_reader(port) for _ in range(100)]
    if kind in ("all", "senders"):
        found += [repeated(lambda: _slow_sender(port), until) for _ in range(20)]
    if kind in ("all", "schemas"):
        numbers = itertools.count()
        found.append(repeated(lambda: _large_schema(port, next(numbers)), until))
    begun.set()
    await asyncio.gather(*found, return_exceptions=True)


async def _slow_reader(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=256)
    writer.write(message(HEAD, completion(random.Random(2), 900)))
    await reader.readline()
    await asyncio.sleep(CLIENT_SECONDS)


async def _slow_sender(port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    for byte in message(HEAD, completion(random.Random(3))):
        if writer.is_closing():
            return
        writer.write(bytes([byte]))
        await asyncio.sleep(0.2)


async def _large_schema(port: int, number: int) -> None:
    asked = {"guided_json": schema(1500, number), "max_tokens": 2}
    await ask(port, message(CHAT, asked | {"messages": [{"role": "user", "content": "a"}]}))
