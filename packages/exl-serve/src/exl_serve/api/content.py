"""The content log: prompts and answers as JSON lines in a local file that only its owner can read."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from exl_serve.config.load import ConfigError
from exl_serve.request.body import LongUrl

__all__ = ["ContentLog", "check_content_file"]

log = logging.getLogger(__name__)

KEY = "log.content"
MODE = 0o600
FLAGS = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Without O_NONBLOCK the opening of a named pipe would wait for its reader."""


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


def _url(value: object) -> str:
    """Return the text of an image's URL, the only value of a body that json does not know."""
    if not isinstance(value, LongUrl):
        raise TypeError(f"a body holds no {type(value).__name__}")
    return value[:]


class ContentLog:
    """Appends lines to the file from a thread of its own, so that a slow disk does not delay streams.

    The file is opened and checked for each line: a rotated one is created again, and one that has become unsafe gets no
    more lines. All API workers append to the same file.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError."""
        check_content_file(path)
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exl-content")

    async def write(self, line: Mapping[str, Any]) -> None:
        """Append one line. A line that cannot be written is reported in the log, without its content."""
        waiting = asyncio.get_running_loop().run_in_executor(self._thread, self._append, line)
        await asyncio.shield(waiting)  # the line is written even if the request's task is cancelled

    def close(self) -> None:
        """Wait until all lines are written."""
        self._thread.shutdown()

    def _append(self, line: Mapping[str, Any]) -> None:
        try:
            data = json.dumps(line, default=_url).encode() + b"\n"  # ASCII: no reader splits at another line separator
            descriptor = _opened(self._path, FLAGS | os.O_CREAT)
            try:
                written = os.write(descriptor, data)  # one call, so that workers' lines do not mix
            finally:
                os.close(descriptor)
            if written < len(data):
                raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes were written")
        except (ConfigError, OSError) as error:
            log.error("request %s: its content was not logged: %s", line.get("id"), error)
