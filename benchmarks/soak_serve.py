"""Many requests and random disconnects against `exl serve`, and what is left of them.

    python benchmarks/soak_serve.py [--requests 100000] [--disconnects 0.2] [--streams 64] [--workers 1] [--idle 60]

Starts `exl serve` with the free test engine (a scripted model; everything else as with a real one), sends streamed
completions over raw sockets, and cuts a share of the connections at a random place: while the request is queued, after
the first event, or later. One JSON line: requests a second, and for the engine, the API workers and the supervisor the
resident memory, open files and threads after a warm-up and at the end. After it, on standard error, the bars and
whether each is met. `cpu_seconds` is what each process took for the requests; the clients run in this one. `left` is
what the engine still holds: running and waiting requests, and pinned pages; a connection is an open file. `idle_cpu` is
the share of a core that each process took while nothing was asked. Ends with 1 if
anything is left, or memory grew by more than `--slope` bytes a request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: "
CONFIG = """
[server]
port = 0
workers = {workers}
[server.limits]
max_connections_per_address = 4096
{limits}
[log]
level = "warning"
[[model]]
id = "test"
path = "{path}"
device = "{device}"
engine = "{engine}"
max_batch_size = {streams}
{more}
"""
WARM_UP = 10_000
"""Requests after which memory is measured first, at most half of them: tables and arenas reach their size in them."""
PARTS = 9
"""Parts of the rest, after each of which memory is measured again: growth that goes on shows in all of them."""
SETTLE_SECONDS = 30.0
SOAK_SECONDS = 1200.0
"""Most seconds for 100,000 requests."""
IDLE_SHARE = 0.01
"""Most of a core that all processes together take when nothing is asked."""
WORKER_BYTES = 120 << 20
"""Most memory of an API worker."""


def bars(line: dict[str, Any], slope: float) -> list[tuple[str, Any, str, bool]]:
    """Return (name, figure, bar, met) of each bar."""
    whole = line["seconds"] / line["requests"] * 100_000
    found: list[tuple[str, Any, str, bool]] = [
        ("left: requests and pages", sum(line["left"].values()), "0", not any(line["left"].values())),
        ("more open files", max(line["more_files"].values()), "0", max(line["more_files"].values()) <= 0),
        ("bytes of memory a request", line["bytes_a_request"], f"{slope:g}", line["bytes_a_request"] <= slope),
        ("seconds for 100,000 requests", round(whole), f"{SOAK_SECONDS:g}", whole <= SOAK_SECONDS),
    ]
    workers = [one["memory"] for name, one in line["processes"].items() if name.startswith("worker")]
    if workers:
        most = max(workers)
        found.append(("memory of an API worker, MiB", most >> 20, str(WORKER_BYTES >> 20), most <= WORKER_BYTES))
    if line["idle_cpu"] is not None:
        idle = round(sum(line["idle_cpu"].values()), 4)
        found.append(("share of a core when idle", idle, f"{IDLE_SHARE}", idle < IDLE_SHARE))
    return found


class Server:
    """`exl serve` and its processes."""

    def __init__(
        self,
        streams: int,
        workers: int,
        engine: str = "free",
        limits: Mapping[str, int] | None = None,
        *,
        template: str = "",
        wait: bool = True,
        device: str = "cpu",
    ) -> None:
        from exl_generate import bundled

        self._folder = tempfile.TemporaryDirectory()
        file = Path(self._folder.name) / "serve.toml"
        more = ""
        if template:
            (Path(self._folder.name) / "template.jinja").write_text(template)
            more = f'template = "{self._folder.name}/template.jinja"'
        file.write_text(
            CONFIG.format(
                more=more,
                workers=workers,
                streams=streams,
                path=bundled.default_model_dir(),
                engine=engine,
                device=device,
                limits="\n".join(f"{name} = {value}" for name, value in (limits or {}).items()),
            )
        )
        if not wait:  # the port has to be known before the server says it
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.port = int(free.getsockname()[1])
            file.write_text(file.read_text().replace("port = 0", f"port = {self.port}"))
        command = [sys.executable, "-m", "exl_serve", "--config", str(file)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE)
        if not wait:
            return
        assert self.process.stderr is not None
        told = b""
        for line in self.process.stderr:
            told += line
            found = re.search(rb"serving at http://127\.0\.0\.1:(\d+)", line)
            if found:
                self.port = int(found[1])
                break
        else:
            raise RuntimeError(f"the server did not start: {told.decode(errors='replace')}")
        # A full pipe would block the server.
        threading.Thread(target=shutil.copyfileobj, args=(self.process.stderr, sys.stderr.buffer), daemon=True).start()
        while not self._ready():
            time.sleep(0.1)

    def _ready(self) -> bool:
        try:
            self.get("/health/ready")
        except urllib.error.HTTPError:
            return False
        return True

    def wait_for(self, path: str, began: float) -> float:
        """Return the seconds from `began` until a route answers 200."""
        while True:
            try:
                self.get(path)
            except OSError:  # URLError and HTTPError are among them
                time.sleep(0.01)
            else:
                return time.perf_counter() - began

    def get(self, path: str) -> Any:
        """Return the JSON of a route. Raises OSError where it answers an error."""
        return json.loads(self.text(path))

    def text(self, path: str) -> str:
        """Return the text of a route. Raises OSError where it answers an error."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def processes(self) -> dict[str, int]:
        """Process ids by what they do."""
        found = {"supervisor": self.process.pid}
        for child in _children(self.process.pid):
            try:
                text = Path(f"/proc/{child}/cmdline").read_bytes()
            except OSError:  # it has ended a moment ago
                continue
            name = "engine" if b"exl_serve.engine" in text else "worker" if b"exl_serve.api" in text else "other"
            found[f"{name}.{sum(key.startswith(name) for key in found)}"] = child
        return found

    def measured(self) -> dict[str, dict[str, int]]:
        """Bytes of memory that is no file's, open files and threads, by process."""
        found = {}
        for name, pid in self.processes().items():
            with open(f"/proc/{pid}/status") as file:
                lines = dict(line.split(":", 1) for line in file)
            if "RssAnon" not in lines:  # it has ended a moment ago
                continue
            memory = sum(int(lines[key].split()[0]) << 10 for key in ("RssAnon", "VmSwap"))
            files = len(os.listdir(f"/proc/{pid}/fd"))
            found[name] = {"memory": memory, "files": files, "threads": int(lines["Threads"])}
        return found

    def cpu_seconds(self) -> dict[str, float]:
        """Return the processor time of each process since its start."""
        found = {}
        for name, pid in self.processes().items():
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            found[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return found

    def held(self) -> dict[str, int]:
        """Counts of what the engine holds of requests."""
        found = next(iter(self.get("/load")["models"].values()))
        return {key: found[key] for key in ("running", "waiting", "queued_prompt_tokens", "pages_pinned")}

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._folder.cleanup()


def _children(parent: int) -> list[int]:
    """Return the process ids of a process's children, oldest first."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    found.append(int(folder.name))
    return sorted(found)


async def send(port: int, count: int, streams: int, disconnects: float, seed: int) -> dict[str, int]:
    """`count` requests over `streams` connections at a time; how many were answered and how many were cut."""
    draw = random.Random(seed)
    done = {"answered": 0, "cut": 0, "refused": 0}
    left = iter(range(count))

    async def one(reader: Any, writer: Any) -> bool:
        """Whether the connection can be used again."""
        body = {
            "prompt": [draw.randrange(10, 250) for _ in range(draw.randrange(4, 40))],
            "max_tokens": draw.randrange(2, 24),
            "temperature": 0,
            "stream": True,
        }
        data = json.dumps(body).encode()
        writer.write(HEAD + str(len(data)).encode() + b"\r\n\r\n" + data)
        cut = draw.randrange(0, 8) if draw.random() < disconnects else None
        events = 0
        status = b""
        while True:
            if cut == events:
                done["cut"] += 1
                return False
            line = await reader.readline()
            status = status or line
            if not line:
                raise RuntimeError(f"the server closed a connection: {status!r}")
            if line.startswith(b"data: "):
                events += 1
                if line == b"data: [DONE]\n":
                    break
            elif b" 429 " in status or b" 503 " in status:
                done["refused"] += 1
                return False
            elif not status.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the server answered {status!r}")
        while (await reader.readline()).strip() != b"0":
            pass
        await reader.readline()
        done["answered"] += 1
        return True

    async def stream() -> None:
        reader = writer = None
        for _ in left:
            if writer is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if not await one(reader, writer):
                # At once: what is unread makes it a reset, as when a client's process dies.
                writer.transport.abort()
                writer = None
        if writer is not None:
            writer.close()

    await asyncio.gather(*(stream() for _ in range(streams)))
    return done


def settled(server: Server) -> dict[str, int]:
    """Wait until nothing is held; returns the last counts if that takes too long."""
    end = time.monotonic() + SETTLE_SECONDS
    while any((held := server.held()).values()) and time.monotonic() < end:
        time.sleep(0.1)
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--disconnects", type=float, default=0.2)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--idle", type=float, default=60.0, help="seconds of idleness that are measured")
    parser.add_argument("--slope", type=float, default=100.0, help="bytes a request that memory may grow by")
    given = parser.parse_args()
    server = Server(given.streams, given.workers)
    try:
        warm = max(1, min(WARM_UP, given.requests // 2))
        asyncio.run(send(server.port, warm, given.streams, given.disconnects, 1))
        settled(server)
        before = server.measured()
        began, spent, own = time.monotonic(), server.cpu_seconds(), time.process_time()
        done: dict[str, int] = {}
        samples = [before]
        for part in range(PARTS):
            count = (given.requests - warm) * (part + 1) // PARTS - (given.requests - warm) * part // PARTS
            told = asyncio.run(send(server.port, count, given.streams, given.disconnects, 2 + part))
            done = {key: done.get(key, 0) + value for key, value in told.items()}
            samples.append(server.measured())
        seconds = time.monotonic() - began
        busy = {name: round(after - spent.get(name, 0.0), 1) for name, after in server.cpu_seconds().items()}
        busy["clients"] = round(time.process_time() - own, 1)
        left = settled(server)
        time.sleep(1.0)  # sockets of clients that were cut are closed
        after = server.measured()
        cpu, began = server.cpu_seconds(), time.monotonic()
        time.sleep(given.idle)
        later, idle_seconds = server.cpu_seconds(), time.monotonic() - began
        idle = {name: round((later[name] - cpu.get(name, 0.0)) / idle_seconds, 4) for name in later}
    finally:
        server.close()
    grown = {name: after[name]["memory"] - before[name]["memory"] for name in before}
    slope = sum(grown.values()) / (given.requests - warm)
    more_files = {name: after[name]["files"] - before[name]["files"] for name in before}
    line = {
        "requests": given.requests - warm,
        **done,
        "seconds": round(seconds, 1),
        "requests_s": round((given.requests - warm) / seconds, 1),
        "cpu_seconds": busy,
        "left": left,
        "more_files": more_files,
        "memory_grown": grown,
        "memory_kib": {name: [sample[name]["memory"] >> 10 for sample in samples] for name in before},
        "bytes_a_request": round(slope, 1),
        "idle_cpu": idle if given.idle else None,
        "processes": after,
    }
    print(json.dumps(line), flush=True)
    for name, figure, bar, met in bars(line, given.slope):
        print(f"{name}: {figure} (at most {bar}): {'met' if met else 'MISSED'}", file=sys.stderr)
    if any(left.values()) or any(more > 0 for more in more_files.values()) or slope > given.slope:
        sys.exit(1)


if __name__ == "__main__":
    main()
