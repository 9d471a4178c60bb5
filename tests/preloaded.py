"""Python programs in forks of one process that has imported torch: the import takes longer than most tests.

A fork runs the program as `python` would: in a session of its own, on the terminal that it is given, to the
interpreter's own end.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

__all__ = ["Program"]

LONGEST = 1 << 20  # bytes of an order


class Program:
    """A program that runs; its methods are those of `subprocess.Popen`.

    Args:
        arguments: `["-m", module, ...]` or `[script, ...]`.
        terminal: Descriptor of its terminal, for input and output.
        env: Its environment.
    """

    def __init__(self, arguments: Sequence[str], terminal: int, env: Mapping[str, str]) -> None:
        read, write = os.pipe()
        order = json.dumps({"arguments": list(arguments), "env": dict(env), "folder": os.getcwd()}).encode()
        assert len(order) < LONGEST
        socket.send_fds(_forks(), [order], [terminal, write])
        os.close(write)
        self._told = os.fdopen(read)
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def kill(self) -> None:
        """End the program at once."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Return the exit code once the program has ended; minus the number of the signal that ended it."""
        if self.returncode is None:
            with self._told:
                self.returncode = int(self._told.readline())
        return self.returncode


@cache
def _forks() -> socket.socket:
    """The connection to the process that forks; it ends with this process."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, __file__, str(its.fileno())], pass_fds=[its.fileno()], start_new_session=True
    )
    its.close()

    def end() -> None:
        mine.close()
        process.wait()

    atexit.register(end)
    return mine


def serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for every order. Returns the order in the program's process."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for the programs
    while True:
        order, descriptors, _, _ = socket.recv_fds(connection, LONGEST, 2)
        if not order:
            os._exit(0)
        terminal, told = descriptors
        if os.fork() == 0:
            break
        os.close(terminal)
        os.close(told)
    connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program = os.fork()
    if program:
        os.close(terminal)
        os.write(told, f"{program}\n".encode())
        _, status = os.waitpid(program, 0)
        os.write(told, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    os.close(told)
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for standard in range(3):
        os.dup2(terminal, standard)
    os.close(terminal)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found: dict[str, Any] = json.loads(order)
    return found


def become(order: dict[str, Any]) -> None:
    """Run the program, as the interpreter does."""
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["env"])
    # They live as long as the program.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    errors = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = errors  # type: ignore[misc]
    first, *rest = order["arguments"]
    if first == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [first, *rest], os.path.dirname(first)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    import torch  # noqa: F401 - what this process is for

    become(serve(socket.socket(fileno=int(sys.argv[1]))))
