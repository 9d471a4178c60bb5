"""Lateness of an API worker's event loop while streams, large images, long prompts and large schemas come together.

The worker, an engine process with the paced test engine, and the clients (in the calling process) are as in
`exl serve`, but the worker runs a probe: a task that sleeps and looks how late it wakes. A loop is late because
something blocks it, or because its thread waits for a core that other threads and processes occupy. The kernel counts
the second, so both can be told apart on a machine with few cores.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from http_load import percentile
from http_worker import worker

__all__ = ["lateness"]

PROBE_SECONDS = 0.005
STREAMS = 64
READY_SECONDS = 120.0


def lateness(clients: Callable[[int], Coroutine[Any, Any, Any]]) -> dict[str, float]:
    """Return milliseconds while `clients(port)` runs: the 99th percentile of all lateness as `late`, and of the part in
    which the loop's thread did not wait for a core as `blocked`; the longest of the latter as `most`.
    """
    from exl_generate import bundled

    folder = str(bundled.default_model_dir())
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place, socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        address, file = f"ipc://{place}/engine", Path(place) / "lags"
        engine = spawn.Process(target=_engine, args=(address, folder, place), daemon=True)
        front = spawn.Process(target=_worker, args=(listener, address, folder, str(file)))  # starts image decoders
        try:
            engine.start()
            _wait_for(Path(place) / "ready")
            front.start()
            port = listener.getsockname()[1]
            asyncio.run(_asked(port))
            began = time.monotonic()
            asyncio.run(clients(port))
            ended = time.monotonic()
        finally:
            for one in (front, engine):
                if one.pid is not None:
                    one.terminate()
                    one.join()
        rows = [row for row in json.loads(file.read_text()) if began <= row[0] <= ended]
    late = [1e3 * max(0.0, row[1]) for row in rows]
    blocked = [1e3 * max(0.0, row[1] - row[2]) for row in rows]
    found = {"late": percentile(late, 0.99), "blocked": percentile(blocked, 0.99), "most": max(blocked)}
    return found | {"looks": len(rows)}


def _wait_for(file: Path) -> None:
    until = time.monotonic() + READY_SECONDS
    while not file.exists():
        if time.monotonic() > until:
            raise RuntimeError("the engine process did not start")
        time.sleep(0.05)


async def _asked(port: int) -> None:
    """Wait until the worker answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    if b" 200 " not in answer[:20]:
        raise RuntimeError(f"the worker does not serve: {answer[:200]!r}")


class _NoRows:
    """Replace an image encoder: requests with images are refused once the images are decoded."""

    def embed(self, images: Any, salt: bytes = b"") -> list[Any]:
        return []


def _engine(address: str, folder: str, place: str) -> None:
    import msgspec

    from exl_serve.config.model import Limits, ModelConfig
    from exl_serve.engine.__main__ import SWITCH_SECONDS
    from exl_serve.engine.host import Host
    from exl_serve.engine.load import load
    from exl_serve.engine.status import StatusWriter

    sys.setswitchinterval(SWITCH_SECONDS)
    config = ModelConfig(id="bench", path=folder, max_batch_size=STREAMS, engine="paced", device="cpu")
    loaded = load(config)
    card = msgspec.structs.replace(loaded.card, modalities=("text", "image"))
    status = StatusWriter(Path(place) / "status", os.urandom(16))
    vision: Any = _NoRows()
    host = Host(
        loaded.generator, card, address, status, config=config, limits=Limits(), step_floor=loaded.floor, vision=vision
    )
    (Path(place) / "ready").touch()
    host.run()


def _worker(listener: socket.socket, address: str, folder: str, file: str) -> None:
    rows: list[tuple[float, float, float]] = []
    worker(listener, address, folder, alongside=partial(_probe, rows))
    Path(file).write_text(json.dumps(rows))


async def _probe(rows: list[tuple[float, float, float]]) -> None:
    """Add (time, seconds late, seconds in which this thread waited for a core) again and again."""
    waited = _waited()
    for _ in itertools.count():
        due = time.monotonic() + PROBE_SECONDS
        await asyncio.sleep(PROBE_SECONDS)
        now, before = time.monotonic(), waited
        waited = _waited()
        rows.append((now, now - due, waited - before))


def _waited() -> float:
    """Return the seconds that this thread was ready to run and had no core."""
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
