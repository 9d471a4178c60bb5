"""The process that decodes images: it has no network, and what goes wrong in it is its request's alone."""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import pytest
from served import children_of
from sessions import niceness_of_session

from exl_filters.cores import NICENESS
from exl_serve.config.model import Media
from exl_serve.errors import ServeError
from exl_serve.media import reader as media
from exl_serve.media.reader import MediaReader
from exl_serve.media.worker import CLONE_NEWNET, CLONE_NEWUSER, EXTRA_MEMORY
from exl_serve.request.messages import ImagePart

Image = pytest.importorskip("PIL.Image", reason="images need Pillow")


def part(side: int = 4) -> ImagePart:
    file = BytesIO()
    Image.new("RGB", (side, side), (10, 20, 30)).save(file, "png")
    return ImagePart("data:image/png;base64," + base64.b64encode(file.getvalue()).decode(), "auto", "x")


def decoders() -> list[int]:
    """Decoder processes of this process."""
    return children_of(os.getpid(), "exl_serve.media.worker")


async def decode(reader: MediaReader, image: ImagePart) -> bytes | ServeError:
    try:
        async with reader.decoded([image], Media()) as (found,):
            return Path(found.path).read_bytes()
    except ServeError as error:
        return error


def test_it_has_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """On kernels that let any user leave the network; on others the process keeps it."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")  # numpy starts threads, and only a process of one may leave
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    program = f"import ctypes; print(ctypes.CDLL(None).unshare({CLONE_NEWUSER | CLONE_NEWNET}))"
    may = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()

    async def work() -> tuple[bytes | ServeError, list[str]]:
        reader = MediaReader()
        try:
            found = await decode(reader, part())
            return found, [os.readlink(f"/proc/{pid}/ns/net") for pid in decoders()]
        finally:
            await reader.close()

    pixels, networks = asyncio.run(work())
    assert pixels == bytes([10, 20, 30] * 16)
    own = os.readlink("/proc/self/ns/net")
    assert len(networks) == 1
    assert (networks[0] != own) == (may == "0")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_other_processes_come_before_it() -> None:
    """Also those of other sessions, where the kernel schedules by sessions."""
    sessions = os.path.exists("/proc/self/autogroup")

    async def work() -> tuple[int, int | None, bytes | ServeError]:
        reader = MediaReader()
        try:
            found = await decode(reader, part())
            (pid,) = decoders()
            return os.getpriority(os.PRIO_PROCESS, pid), niceness_of_session(pid) if sessions else None, found
        finally:
            await reader.close()

    own, of_session, pixels = asyncio.run(work())
    assert pixels == bytes([10, 20, 30] * 16)
    assert own == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    assert of_session == (min(19, niceness_of_session("self") + NICENESS) if sessions else None)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_its_memory_has_a_limit() -> None:
    async def work() -> tuple[list[str], bytes | ServeError]:
        reader = MediaReader()
        try:
            found = await decode(reader, part())
            (pid,) = decoders()
            return Path(f"/proc/{pid}/limits").read_text().splitlines(), found
        finally:
            await reader.close()

    lines, pixels = asyncio.run(work())
    assert pixels == bytes([10, 20, 30] * 16)
    (soft, hard) = next(line.split()[3:5] for line in lines if line.startswith("Max address space"))
    assert soft == hard
    assert EXTRA_MEMORY < int(hard) < 16 << 30


def test_one_that_takes_too_long_is_ended_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> tuple[list[int], list[int], bytes | ServeError, bytes | ServeError]:
        reader = MediaReader()
        try:
            await decode(reader, part())
            first = decoders()
            monkeypatch.setattr(media, "SECONDS", 0.0)
            late = await decode(reader, part())
            monkeypatch.undo()
            again = await decode(reader, part())
            return first, decoders(), late, again
        finally:
            await reader.close()

    first, second, late, again = asyncio.run(work())
    assert isinstance(late, ServeError)
    assert (late.status, late.code) == (400, "image_too_large")
    assert len(first) == 1
    assert not set(first) & set(second)
    assert again == bytes([10, 20, 30] * 16)


def test_one_that_is_killed_is_replaced() -> None:
    async def work() -> bytes | ServeError:
        reader = MediaReader()
        try:
            await decode(reader, part())
            for pid in decoders():
                os.kill(pid, 9)
            await decode(reader, part())  # may meet the dead one
            return await decode(reader, part())
        finally:
            await reader.close()

    assert asyncio.run(work()) == bytes([10, 20, 30] * 16)


def test_one_that_announces_an_endless_answer_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hijacked decoder cannot make the API worker allocate the size that its answer begins with."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nprintf '\\000\\000\\000\\000\\000\\020\\000\\000'\nexec cat > /dev/null\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    async def work() -> bytes | ServeError:
        reader = MediaReader()
        try:
            return await decode(reader, part())
        finally:
            await reader.close()

    found = asyncio.run(work())
    assert isinstance(found, ServeError)
    assert (found.status, found.code) == (400, "image_too_large")


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    async def work() -> bytes | ServeError:
        reader = MediaReader(str(tmp_path))
        reader.folder = "/dev/full"  # no file can be made below it
        try:
            return await decode(reader, part())
        finally:
            reader.folder = None
            await reader.close()

    found = asyncio.run(work())
    assert isinstance(found, ServeError)
    assert (found.status, found.code) == (503, "media_unavailable")
    assert "/dev/full" not in found.message
