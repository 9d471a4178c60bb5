"""Child processes: started with their configuration on standard input, read line by line, ended with their parent."""

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
    """`python -m MODULE` with `start` on its standard input.

    Lines of its standard output are added to `lines`, and `wake` is written to. Its standard error goes to the log,
    unless `inherit_log`. Make it on the main thread: the kernel ends a child with the thread that started it.
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
        #: a separate session, so that Ctrl-C reaches only the supervisor
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
        """Return the exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self, *, stacks: bool = False) -> None:
        """End it at once. With `stacks` it first writes the stacks of its threads to the log, if it still can."""
        if stacks:
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)
        self._process.kill()

    def end(self, seconds: float) -> None:
        """Wait for its end, and force it after `seconds`."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def rss(self) -> int:
        """Return its resident memory in bytes; 0 where that is unknown."""
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
    """Return an exit status in words."""
    if status >= 0:
        return f"status {status}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"
