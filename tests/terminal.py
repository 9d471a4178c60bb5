"""A program on a pseudo-terminal: its foreground process group gets the keyboard's signals, as in a shell."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from types import TracebackType

from preloaded import Program

# The program's own process makes the terminal its controlling one before the program begins.
LAUNCHER = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
CTRL_C = b"\x03"
PATIENCE = 120  # seconds without a sign of life, which only a hang takes
REACTION = 0.3  # seconds from what a person sees to Ctrl-C


class Terminal:
    """Runs Python with `arguments` until the block ends; typed text is not echoed.

    The terminal is dumb, unless `env` says else. The program is a fork of a process that has imported torch, unless it
    is to be `fresh`. torn_down: see `preloaded.Program`.
    """

    def __init__(
        self, *arguments: str, env: Mapping[str, str] | None = None, fresh: bool = False, torn_down: bool = True
    ) -> None:
        self._master, slave = pty.openpty()
        modes = termios.tcgetattr(slave)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        variables = os.environ | {"TERM": "dumb"} | dict(env or {})
        self._process: subprocess.Popen[bytes] | Program
        if fresh:
            self._process = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, sys.executable, *arguments],
                stdin=slave,
                stdout=slave,
                stderr=slave,
                env=variables,
                start_new_session=True,
            )
        else:
            self._process = Program(arguments, (slave, slave, slave), variables, terminal=True, torn_down=torn_down)
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
        """Read on until `text` is shown after what this returned before; returns what was shown up to it."""
        while text not in self.shown:
            if not self._read():
                raise AssertionError(f"the program ended without {text!r}: {self.shown}")
        head, _, self.shown = self.shown.partition(text)
        return head + text

    def end(self, keys: bytes = b"") -> tuple[int, str]:
        """Press `keys` and wait for the program's end; its exit code, and what it showed after the last `until`.

        Ctrl-C is pressed once: the interpreter restores the signal's default while it ends, where another one would
        kill the program. Nobody presses it in the first moments of a prompt, in which prompt_toolkit sets itself up and
        Python may lose a KeyboardInterrupt in a callback of a weak reference.
        """
        if keys == CTRL_C:
            time.sleep(REACTION)
        self.type(keys)
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
