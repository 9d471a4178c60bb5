"""Python programs in forks of one process that has imported torch and the packages, which takes longer than most tests.

A fork runs the program as `python` would: in a session of its own, on the standard streams that it is given, to the
interpreter's own end. A test of what an import does starts an interpreter of its own instead.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib.util
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["Program", "Running", "leave", "prepare", "run", "run_ranks"]

LONGEST = 1 << 20  # bytes of an order
COMMANDS = ("app", "bench", "chat", "convert", "generate", "info")
#: What most programs import. None of these reads a variable for the CPU or starts a thread when it is imported.
PRELOADED = ("torch", "pydantic.types", *(f"exl_generate.cli.{name}" for name in COMMANDS))


class Program:
    """A program that runs; its methods are those of `subprocess.Popen`.

    Args:
        arguments: `["-m", module, ...]`, `["-c", source, ...]` or `[script, ...]`.
        streams: Descriptors of its standard input, output and errors; -1 leaves one closed.
        env: Its environment; None for that of this process. PYTHONPATH goes in front of the path.
        folder: Its working folder; None for that of this process.
        terminal: Whether the first of `streams` becomes its controlling terminal.
        torn_down: Whether the interpreter ends as usual. Else the process ends once threads, `atexit` and the streams
            are done, which spares it half a second of freeing objects.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        streams: tuple[int, int, int],
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        *,
        terminal: bool = False,
        torn_down: bool = True,
    ) -> None:
        read, write = os.pipe()
        order = {
            "arguments": list(arguments),
            "env": dict(os.environ if env is None else env),
            "folder": os.fspath(folder or os.getcwd()),
            "closed": [number for number, stream in enumerate(streams) if stream < 0],
            "terminal": terminal,
            "torn_down": torn_down,
        }
        words = json.dumps(order).encode()
        assert len(words) < LONGEST
        with open(os.devnull, "r+b") as nothing:
            given = [nothing.fileno() if stream < 0 else stream for stream in streams]
            socket.send_fds(_forks(), [words], [*given, write])
        os.close(write)
        self._told = os.fdopen(read)
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        """Send a signal to the program unless it has been waited for."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the program at once."""
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """Return the exit code once the program has ended; minus the number of the signal that ended it."""
        if self.returncode is None:
            with self._told:
                self.returncode = int(self._told.readline())
        return self.returncode


class Running:
    """A program with files for its standard streams.

    Args:
        arguments, env, folder, torn_down: as for `Program`.
        stdin: Text of its standard input.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        *,
        torn_down: bool = False,
    ) -> None:
        self._arguments = list(arguments)
        self._files = [tempfile.TemporaryFile("w+") for _ in range(3)]  # noqa: SIM115
        self._files[0].write(stdin)
        self._files[0].seek(0)
        given, out, err = (file.fileno() for file in self._files)
        self._program = Program(arguments, (given, out, err), env, folder, torn_down=torn_down)

    def end(self) -> subprocess.CompletedProcess[str]:
        """Wait for the end and return what `subprocess.run` does with captured text."""
        code = self._program.wait()
        for file in self._files:
            file.seek(0)
        _, out, err = (file.read() for file in self._files)
        self.close()
        return subprocess.CompletedProcess(self._arguments, code, out, err)

    def close(self) -> None:
        """Kill the program unless it has ended."""
        self._program.kill()
        for file in self._files:
            file.close()


def run(
    arguments: Sequence[str],
    *,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    torn_down: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; arguments as for `Running`."""
    return Running(arguments, stdin, env, folder, torn_down=torn_down).end()


def run_ranks(
    arguments: Sequence[str], number: int, env: Mapping[str, str] | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program in `number` processes with the variables by which torchrun makes them a group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        **(os.environ if env is None else env),
        **{"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }
    started: list[Running] = []
    try:
        ranks = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number))
        started.extend(Running(arguments, env=shared | rank) for rank in ranks)
        return [running.end() for running in started]
    finally:
        for running in started:
            running.close()


def prepare() -> None:
    """Start the process that forks; the forks of this process share it."""
    _forks()


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
    while True:
        order, descriptors, _, _ = socket.recv_fds(connection, LONGEST, 4)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those that waited for programs which have ended
                pass
        if not order:
            os._exit(0)
        *streams, told = descriptors
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    connection.close()
    program = os.fork()
    if program:
        for stream in streams:
            os.close(stream)
        os.write(told, f"{program}\n".encode())
        _, status = os.waitpid(program, 0)
        os.write(told, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    os.close(told)
    os.setsid()
    found: dict[str, Any] = json.loads(order)
    if found["terminal"]:
        fcntl.ioctl(streams[0], termios.TIOCSCTTY, 0)
    for standard, stream in enumerate(streams):
        os.dup2(stream, standard)
        os.close(stream)
    for standard in found["closed"]:
        os.close(standard)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return found


READ_AT_IMPORT = ("EXL_CUDA_PDL", "EXL_ROW_INVARIANT")
"""Variables that preloaded modules have read."""


def become(order: dict[str, Any]) -> None:
    """Run the program, as the interpreter does."""
    for name in READ_AT_IMPORT:
        if order["env"].get(name) != os.environ.get(name):
            sys.exit(f"{name} differs, which preloaded modules have read: run this program with another interpreter")
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["env"])
    # They live as long as the program. The interpreter has None in place of a stream that is closed.
    streams: list[Any] = [None, None, None]
    for number, mode in enumerate("rww"):
        if number not in order["closed"]:
            streams[number] = open(number, mode, closefd=False)  # noqa: SIM115
    if streams[2] is not None:
        streams[2].reconfigure(line_buffering=True, errors="backslashreplace")
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]
    here, *path = sys.path
    extra = order["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [here, *(place for place in extra if place and place not in path), *path]
    first, *rest = order["arguments"]
    if first == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[0] = [first, *rest[1:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))  # noqa: S102
    else:
        sys.argv, sys.path[0] = [first, *rest], os.path.dirname(first)
        runpy.run_path(first, run_name="__main__")


def end_early(order: dict[str, Any]) -> None:
    """Run the program and end the process."""
    code = 0
    try:
        become(order)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    leave(code)


def leave(code: int) -> None:
    """End the process without freeing its objects, which takes half a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - as the interpreter does first
    atexit._run_exitfuncs()  # noqa: SLF001
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    gc.disable()
    for name in PRELOADED:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:  # a package may be tested alone
            importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()  # collections of a program would visit, and so copy, every page of objects
    given_order = serve(socket.socket(fileno=int(sys.argv[1])))
    if given_order["torn_down"]:
        become(given_order)
    else:
        end_early(given_order)
