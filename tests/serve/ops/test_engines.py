"""The supervisor's engine processes, without processes."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from exl_serve.config.load import parse
from exl_serve.engine.status import StatusReader, StatusWriter, status_path
from exl_serve.super import engines
from exl_serve.super.engines import Engines
from exl_serve.super.registry import Metrics
from exl_serve.super.stall import Patience

MADE: list[FakeChild] = []


class FakeChild:
    """A process that says what the test tells it to, and ends when it is killed."""

    def __init__(self, module: str, start: bytes, name: str, **options: Any) -> None:
        self.lines: deque[bytes] = deque([b'{"state": "ready"}'])
        self.killed = self.terminated = False
        MADE.append(self)

    def poll(self) -> int | None:
        return None

    def terminate(self) -> None:
        self.terminated = True

    def kill(self, *, stacks: bool = False) -> None:
        self.killed = True


class Made:
    """Engines of one model "m" that was started, with a clock that the test sets."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.page = status_path(folder, "m")
        config = parse({"model": [{"id": "m", "path": str(folder), "engine": "free"}]})
        wake = os.open(os.devnull, os.O_WRONLY)
        self.engines = Engines(config, folder, Metrics(False), lambda: self.now, wake, Patience(stall=30, kill=90))
        self.engines.registry.load("m")
        self.engines.step()
        self.child = MADE[-1]

    def until_killed(self) -> bool:
        """Let ten minutes pass."""
        while self.now < 600 and not self.child.killed:
            self.now += 5.0
            self.engines.step()
        return self.child.killed


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.setattr(engines, "Child", FakeChild)
    return Made(tmp_path)


def test_an_engine_whose_first_page_stays_half_written_is_ended(made: Made) -> None:
    writer = StatusWriter(made.page, b"0" * 16)
    with open(made.page, "r+b") as file:
        file.write((StatusReader(made.page).writes + 1).to_bytes(8, "little"))
    assert made.until_killed()
    assert made.engines.is_stalled("m")
    writer.close()


def test_an_engine_whose_page_is_not_there_ends_no_supervisor(made: Made) -> None:
    """An engine removes its page when it ends, maybe before its first words are read."""
    made.engines.step()
    assert not made.engines.is_stalled("m")
    writer = StatusWriter(made.page, b"0" * 16)  # it is watched once the page is there
    assert made.until_killed()
    writer.close()


def test_an_engine_without_a_page_is_ended(made: Made) -> None:
    """Nothing tells whether it makes progress, and its metrics are unknown."""
    assert made.until_killed()
    assert made.engines.is_stalled("m")


def test_a_request_that_came_and_went_between_two_looks_counts_as_use(made: Made) -> None:
    writer = StatusWriter(made.page, b"0" * 16)
    writer.state = "ready"
    entry = made.engines.registry.entries["m"]
    used = []
    for now, steps in ((100.0, 1), (200.0, 0), (300.0, 3), (400.0, 0)):
        made.now = now
        for _ in range(steps):
            writer.begin_step(now)
        writer.ended = now
        writer.write()
        made.engines.step()
        used.append(entry.last_used)
    assert used[0] == used[1] != 300.0
    assert used[2:] == [300.0, 300.0]
    writer.close()


def test_an_idle_engine_is_unloaded_once_the_workers_know(made: Made) -> None:
    """A request that was sent before comes to it."""
    writer = StatusWriter(made.page, b"0" * 16)
    writer.state = "ready"

    def look(now: float, queued: int) -> bool:
        made.now, writer.ended = now, now
        writer.counts = (0, 0, queued, 0, 0, 0, 0)
        writer.write()
        made.engines.step()
        return made.child.terminated

    look(10.0, 0)
    look(20.0, 0)
    made.engines.registry.unload("m")
    assert not look(20.0, 0)
    assert not look(20.5, 1)
    assert not look(22.0, 1)
    assert not look(22.2, 0)
    assert look(22.2 + engines.DRAIN_SECONDS, 0)
    writer.close()
