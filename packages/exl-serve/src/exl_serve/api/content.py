"""The content log: prompts and answers as JSON lines in a local file that only its owner can read."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from exl_serve.config.load import ConfigError
from exl_serve.request.body import LongUrl

__all__ = ["ContentLog", "append_line", "check_content_file"]

log = logging.getLogger(__name__)

KEY = "log.content"
MODE = 0o600
FLAGS = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Without O_NONBLOCK the opening of a named pipe would wait for its other end."""
QUEUED_BYTES = 64 << 20
"""Requests and answers of so many bytes wait for the disk; a line beyond them is lost. One line may always wait."""
LINE_BYTES = 4096
"""A line takes so much memory at least."""
CLOSE_SECONDS = 5.0
MIME_CHARACTERS = 128
"""Characters of a `data:` URL that may hold its type."""


def check_content_file(path: Path) -> None:
    """Check that content may be written to a file, which need not exist yet. Raises ConfigError."""
    try:
        os.close(_opened(path, FLAGS))
    except FileNotFoundError:
        folder = path.parent
        if not folder.is_dir():
            raise ConfigError(f"{KEY}: there is no folder {folder}: create it", KEY) from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"{KEY}: this user cannot create a file in {folder}: name another folder", KEY) from None


def _opened(path: Path, flags: int) -> int:
    """Return a descriptor of the file. Raises ConfigError, or FileNotFoundError where `flags` do not create it."""
    try:
        descriptor = os.open(path, flags, MODE)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{KEY}: {_reason(path, error)}", KEY) from None
    try:
        _check(path, os.fstat(descriptor))
    except ConfigError:
        os.close(descriptor)
        raise
    return descriptor


def _reason(path: Path, error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return f"{path} is a symbolic link: name the file itself"
    if error.errno in (errno.ENXIO, errno.EISDIR):
        return f"{path} is not a regular file: name another one"
    return f"{path} cannot be opened: {error.strerror}"


def _check(path: Path, found: os.stat_result) -> None:
    """Raise ConfigError unless the file belongs to this user, has one name, and only its owner can read it."""
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{KEY}: {path} is not a regular file: name another one", KEY)
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{KEY}: {path} belongs to user {found.st_uid}, and the server runs as user {os.geteuid()}: name a file "
            "of the server's user",
            KEY,
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode != MODE:
        raise ConfigError(f"{KEY}: {path} has mode {mode:04o}; it must be {MODE:04o}: chmod 600 {path}", KEY)
    if found.st_nlink > 1:  # content would appear in a file that somebody has linked here
        raise ConfigError(f"{KEY}: {path} is one of {found.st_nlink} hard links to a file: name another one", KEY)


def _summary(value: object) -> dict[str, Any]:
    """Return what the log says of an image's long URL, the only value of a body that json does not know."""
    if not isinstance(value, LongUrl):
        raise TypeError(f"a body holds no {type(value).__name__}")
    kind = value[5:MIME_CHARACTERS].partition(",")[0].partition(";")[0]
    return {"type": kind, "length": len(value), "sha256": value.sha256()}


def _size(value: Any) -> int:
    """Return roughly the bytes that answers take in memory."""
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return 64 + sum(map(_size, inner))


def append_line(path: Path, data: bytes) -> None:
    """Append a line to the file, all of it or nothing. Raises ConfigError or OSError."""
    descriptor = _opened(path, FLAGS | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # another worker's line may follow only a whole one
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data  # a process has ended while it wrote
        if os.write(descriptor, data) < len(data):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, "only a part of the line could be written: free space on the disk")
    finally:
        os.close(descriptor)


class ContentLog:
    """Appends lines to the file from a thread of its own, so that streams do not wait for a slow disk.

    The file is opened and checked for each line: a rotated one is created again, and one that has become unsafe gets no
    more lines. All API workers append to the same file. Lines that cannot be written are reported in the log, without
    their content: one error for each cause, and their number once lines are written again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: SimpleQueue[tuple[Mapping[str, Any], int] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._queued = 0
        self._waiting = 0
        self._closed = False
        self._cause = ""
        self._lost = 0
        # A daemon: the end of the process does not wait for a disk that hangs.
        self._thread = threading.Thread(target=self._run, name="exl-content", daemon=True)
        self._thread.start()

    def write(self, line: Mapping[str, Any], size: int) -> None:
        """Append one line soon. `size`: bytes of its request's body, which stay in memory until then."""
        size += LINE_BYTES + _size(line["answers"])
        with self._lock:
            full = self._queued > 0 and self._queued + size > QUEUED_BYTES
            cause = "the server stops" if self._closed else f"more than {QUEUED_BYTES} bytes wait for the disk"
            if not full and not self._closed:
                self._queued += size
                self._waiting += 1
                self._lines.put((line, size))
                return
        self._report(line, cause)

    async def close(self) -> None:
        """Wait until all lines are written, for at most `CLOSE_SECONDS`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._lines.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)
        if self._thread.is_alive():
            log.error("the content of %d requests was not logged: the disk is too slow", self._waiting)

    def _run(self) -> None:
        while (item := self._lines.get()) is not None:
            line, size = item
            try:
                # ASCII: no reader splits a line at another separator.
                append_line(self._path, json.dumps(line, default=_summary).encode() + b"\n")
                self._written()
            except (ConfigError, OSError) as error:
                self._report(line, str(error))
            except Exception as error:  # its text may hold content
                self._report(line, f"it cannot be written as JSON ({type(error).__name__})")
            with self._lock:
                self._queued -= size
                self._waiting -= 1
            del item, line  # an idle thread keeps no body

    def _report(self, line: Mapping[str, Any], cause: str) -> None:
        """Report a lost line, unless the line before was lost for the same cause."""
        with self._lock:
            self._lost += 1
            known, self._cause = cause == self._cause, cause
        if not known:
            log.error("request %s: its content was not logged: %s", line.get("id"), cause)

    def _written(self) -> None:
        with self._lock:
            lost, self._lost, self._cause = self._lost, 0, ""
        if lost:
            log.warning("content is logged again; that of %d requests was not", lost)
