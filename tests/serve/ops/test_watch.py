"""Progress, service manager, child processes, listening sockets: the supervisor's parts without a model."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preloaded import run

from exl_serve.api.worker import LAG_SECONDS, Link, lags
from exl_serve.config.load import parse
from exl_serve.engine.client import EngineStatus
from exl_serve.engine.status import HalfWrittenError, StatusReader, StatusWriter
from exl_serve.errors import ServeError
from exl_serve.super.notify import Notifier
from exl_serve.super.spawn import describe
from exl_serve.super.stall import Patience, Watch
from exl_serve.super.supervisor import listen


def status(began: float, ended: float) -> EngineStatus:
    counts = dict.fromkeys(
        ("decoding", "prefilling", "queued", "queued_prompt_tokens", "pages_pinned", "pages_cached", "pages_free"), 0
    )
    return EngineStatus(
        boot=b"", state="ready", step=1, began=began, ended=ended, prefill_rate=0, decode_rate=0, **counts
    )


def test_busy_is_not_stalled_and_stalled_is_ended() -> None:
    watch = Watch(Patience(stall=30, kill=90))
    for now in range(0, 300, 10):  # long steps, one after the other
        assert watch.look(status(now, now + 10), now, now) == "ok"
    assert watch.look(status(300, 290), 300, 300) == "ok"
    # The longest step took 10 seconds: 200 are still a step.
    assert watch.look(status(300, 290), 300, 480) == "ok"
    assert watch.look(status(300, 290), 300, 510) == "stalled"
    assert watch.look(status(300, 290), 300, 600) == "kill"
    assert watch.look(status(300, 600), 301, 601) == "ok"


def test_an_idle_engine_that_writes_no_more_is_stalled() -> None:
    watch = Watch(Patience(stall=30, kill=90))
    for now in range(100):
        assert watch.look(status(0, 0), now, now) == "ok"
    assert watch.look(status(0, 0), 99, 130) == "stalled"


def test_every_write_of_the_status_page_counts(tmp_path: Path) -> None:
    writer = StatusWriter(tmp_path / "status", b"0" * 16)
    reader = StatusReader(tmp_path / "status")
    before = reader.writes
    writer.write()
    assert reader.writes != before
    reader.close()
    writer.close()


def test_the_page_of_a_killed_engine_stays_readable(tmp_path: Path) -> None:
    writer = StatusWriter(tmp_path / "status", b"0" * 16)
    reader = StatusReader(tmp_path / "status")
    StatusWriter(tmp_path / "status", b"1" * 16).close()  # the engine that takes its place
    assert reader.read().boot == b"0" * 16
    reader.close()
    writer.close()


def test_a_page_that_is_left_half_written_is_an_error(tmp_path: Path) -> None:
    writer = StatusWriter(tmp_path / "status", b"0" * 16)
    reader = StatusReader(tmp_path / "status")
    with open(tmp_path / "status", "r+b") as file:
        file.write((reader.writes + 1).to_bytes(8, "little"))
    with pytest.raises(HalfWrittenError):
        reader.read()
    reader.close()
    writer.close()


def test_the_service_manager_is_notified(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        notifier = Notifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "20000000"})
        assert notifier.interval == 10.0
        notifier.tell("READY=1")
        assert manager.recv(100) == b"READY=1"
        for _ in range(1000):
            notifier.tell("WATCHDOG=1")  # one that reads nothing holds nobody up
    notifier.tell("WATCHDOG=1")  # nobody listens any more: nothing happens
    assert Notifier({}).interval is None
    Notifier({}).tell("READY=1")


@given(due=st.floats(0, 1e6), late=st.floats(0, 30))
def test_a_long_block_of_the_loop_counts_for_every_timer_in_it(due: float, late: float) -> None:
    found, following = lags(due, due + late)
    assert len(found) == pytest.approx(late / LAG_SECONDS, abs=1.01)
    assert found[0] == pytest.approx(late, abs=1e-6)
    assert found == sorted(found, reverse=True)
    assert 0 <= found[-1] < LAG_SECONDS + 1e-6
    assert due + late <= following + 1e-6 <= due + late + LAG_SECONDS + 2e-6


def test_a_stopped_process_counts_for_a_minute() -> None:
    found, following = lags(0.0, 3600.0)
    assert (len(found), found[0]) == (601, 60.0)
    assert following == pytest.approx(3600.1)


def test_exit_statuses_in_words() -> None:
    assert (describe(1), describe(-9), describe(-99)) == ("status 1", "signal SIGKILL", "signal 99")


def test_an_address_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = parse({"server": {"port": taken.getsockname()[1]}})
        with pytest.raises(ServeError, match="choose another"):
            listen(config)


@pytest.mark.parametrize("host", ["nosuch.invalid", "192.0.2.1"])
def test_another_host_is_advised_where_the_host_is_wrong(host: str) -> None:
    """192.0.2.1 is an address that no machine has."""
    with pytest.raises(ServeError, match=f"cannot listen on {host}:8000: .*; choose another with --host$") as caught:
        listen(parse({"server": {"host": host}}))
    assert caught.value.param == "host"


@pytest.mark.parametrize("name", ["taken", "long" * 30, "long" * 100])
def test_another_path_is_advised_where_the_socket_is_taken_or_its_path_too_long(tmp_path: Path, name: str) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as taken:
        taken.bind(str(tmp_path / "taken"))
        taken.listen()
        with pytest.raises(ServeError, match=r": (?!None).+; choose another with --set server\.uds=PATH$") as caught:
            listen(parse({"server": {"uds": str(tmp_path / name)}}))
    assert caught.value.param == "uds"


def test_a_unix_socket_is_its_owners_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    config = parse({"server": {"uds": str(path)}})
    listener = listen(config)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ServeError, match="cannot listen"):
        listen(config)
    listener.close()
    listen(config).close()


CHILD = """
import os, sys, time
from exl_serve.super.spawn import Child
read, write = os.pipe()
child = Child("exl_serve.engine", b"not json", "x", wake=write)
while child.poll() is None:
    time.sleep(0.01)
print(child.poll(), flush=True)
"""


def test_a_child_that_cannot_start_tells_its_status() -> None:
    found = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=300, check=True)
    assert found.stdout == "1\n"


START = """
import sys
from exl_serve.config.load import parse
from exl_serve.super.supervisor import Supervisor
sys.exit(Supervisor(parse({"server": {"port": 0}, "model": [{"id": "m", "path": sys.argv[1]}]})).run())
"""


def test_the_start_ends_where_no_model_can_be_loaded(tmp_path: Path) -> None:
    found = run(["-c", START, str(tmp_path)])
    assert found.returncode == 1
    assert "model m cannot be served" in found.stderr


def test_a_request_that_blocks_the_loop_from_its_begin_is_measured(tmp_path: Path) -> None:
    seen: list[float] = []

    class Listening(Link):
        def observe(self, name: str, value: float, **labels: str) -> None:
            seen.append(value)

    async def blocking(*_: Any) -> None:
        time.sleep(0.35)

    async def work() -> None:
        link = Listening(f"ipc://{tmp_path}/socket", lambda state: None)
        await asyncio.sleep(0)
        await link.watching(blocking)({}, None, None)  # type: ignore[arg-type]  # the application reads none of them
        await asyncio.sleep(0.3)
        link.close()

    asyncio.run(work())
    assert max(seen) >= 0.2
    assert len(seen) >= 3
