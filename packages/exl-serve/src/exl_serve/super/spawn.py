"""Child processes: started with their configuration on standard input, read line by line, never left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

__all__ = ["Child", "describe"]

LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)", re.DOTALL)


class Child:
    """`python -m MODULE` with `start` on its standard input. Lines of its standard output come into `lines`, and `wake`
    is written to; its standard error goes to the log, unless `inherit_log`.

    To be made on the main thread: the kernel ends a child with the thread that started it.
    """

    def __init__(
        self,
        module: str,
        start: bytes,
        name: str,
        *,
        wake: int,
        sockets: Sequence[int] = (),
        read_output: bool = True,
        inherit_log: bool = False,
    ) -> None:
        self.name = name
        #: a session of its own, so that Ctrl-C reaches the supervisor alone
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if read_output else None,
            stderr=None if inherit_log else subprocess.PIPE,
            pass_fds=tuple(sockets),
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.lines: deque[bytes] = deque()
        self._wake = wake
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended already, which `poll` tells
                self._process.stdin.write(start + b"\n")
                self._process.stdin.close()
        for read in (self._read_output, self._read_log):
            threading.Thread(target=read, name=f"exl-{name}", daemon=True).start()

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self, *, stacks: bool = False) -> None:
        """With `stacks` it writes what its threads are doing into the log first, if it still can."""
        if stacks:
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)
        self._process.kill()

    def end(self, seconds: float) -> None:
        """Wait for the end, and after `seconds` bring it about."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def rss(self) -> int:
        """Resident memory, bytes; 0 where that is not known."""
        try:
            with open(f"/proc/{self.pid}/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError, ValueError):
            return 0

    def _read_output(self) -> None:
        for line in self._process.stdout or ():
            self.lines.append(line)
            with contextlib.suppress(OSError):
                os.write(self._wake, b"\0")

    def _read_log(self) -> None:
        log = logging.getLogger(f"exl_serve.{self.name}")
        for line in self._process.stderr or ():
            text = line.decode("utf-8", "replace").rstrip("\n")
            found = LEVEL.fullmatch(text)
            if found:
                log.log(getattr(logging, found[1]), "%s", found[2])
            elif text:
                log.warning("%s", text)


def describe(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"status {status}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"
