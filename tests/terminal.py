"""A program on a pseudo-terminal: its foreground process group gets the keyboard's signals, as in a shell."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
import termios
from types import TracebackType

# The program's own process makes the terminal its controlling one before the program begins.
LAUNCHER = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
CTRL_C = b"\x03"
PATIENCE = 120  # seconds without a sign of life, which only a hang takes


class Terminal:
    """Runs `command` until the block ends; typed text is not echoed."""

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        modes = termios.tcgetattr(slave)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=os.environ | {"TERM": "dumb"},
            start_new_session=True,
        )
        os.close(slave)
        self.shown = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    def type(self, keys: bytes) -> None:
        """Press keys; those that come after the end of the program are lost."""
        with contextlib.suppress(OSError):
            os.write(self._master, keys)

    def until(self, text: str) -> str:
        """Read on until `text` is shown behind what this returned before; returns what was shown up to it."""
        while text not in self.shown:
            if not self._read():
                raise AssertionError(f"the program ended without {text!r}: {self.shown}")
        head, _, self.shown = self.shown.partition(text)
        return head + text

    def end(self) -> tuple[int, str]:
        """Wait for the end of the program; its exit code, and what was shown after the last `until`."""
        while self._read():
            pass
        return self._process.wait(), self.shown

    def _read(self) -> bool:
        if not select.select([self._master], [], [], PATIENCE)[0]:
            raise AssertionError(f"nothing came for {PATIENCE} s: {self.shown}")
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux says so when the last process has closed its side
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)
