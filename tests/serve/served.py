"""`exl serve` as a process, for tests."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

from exl_serve.testing.waiting import until

__all__ = ["SECONDS", "Served", "children_of", "gone", "processor_seconds"]

SECONDS = 120.0
"""Only a hang takes so long."""


def children_of(parent: int, module: str) -> list[int]:
    """Child processes of `parent` that run a module, by /proc."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it may end meanwhile
            words = (place / "cmdline").read_bytes().split(b"\0")
            own_parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if own_parent == parent and module.encode() in words:
                found.append(int(place.name))
    return found


class Served:
    """A running `exl serve`. `descriptors`: most open files of each of its processes."""

    def __init__(
        self, *options: str, environment: dict[str, str] | None = None, descriptors: int | None = None
    ) -> None:
        limit = [] if descriptors is None else ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh"]
        self.process = subprocess.Popen(
            [*limit, sys.executable, "-m", "exl_serve", "--port", "0", *options],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"EXL_DEVICE": "cpu"} | (environment or {}),
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def up(self) -> Served:
        until(lambda: "serving at" in self.log or self.process.poll() is not None, lambda: self.log)
        found = re.search(r"serving at (\S+)", self.log)
        assert found is not None, self.log
        self.url = found[1]
        until(lambda: self.get("/health/ready") == 200, lambda: self.log)
        return self

    def get(self, path: str, **options: Any) -> int:
        try:
            return httpx.get(self.url + path, timeout=SECONDS, **options).status_code
        except httpx.HTTPError:
            return 0

    def complete(self, **fields: Any) -> httpx.Response:
        body = {"prompt": "Once upon", "max_tokens": 4, "seed": 1} | fields
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=SECONDS)

    def children(self, module: str = "exl_serve") -> list[int]:
        """Its processes of this module."""
        return children_of(self.process.pid, module)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.reader.join(SECONDS)


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}/exe").exists() and _alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def processor_seconds(pid: int) -> float:
    """Seconds of processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
