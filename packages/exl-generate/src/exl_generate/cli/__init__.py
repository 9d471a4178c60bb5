"""The `exl` command."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

__all__ = ["main", "program"]


def main() -> None:
    """Run the command line; errors made on purpose, and output that cannot be written, become one line on stderr and
    exit code 1, Ctrl-C exit code 130, a reader of the output that went away exit code 141."""
    # Last in, first out: a second Ctrl-C does not interrupt the libraries' cleanup at the end.
    _run(lambda: atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN))


def program() -> None:
    """`main`, with which the process ends: once it is done, Ctrl-C is ignored. (The interpreter waits for threads
    before it comes to what `main` registers, and a Ctrl-C there would print a traceback.)"""
    _run(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))


def _run(at_end: Callable[[], object]) -> None:
    _open_closed_streams()
    from exl_generate.cli.app import app

    try:
        try:
            app()
        finally:
            try:
                sys.stdout.flush()
            finally:
                at_end()
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # after the terminal's ^C
        sys.exit(130)
    except BrokenPipeError:
        _reader_gone()
    except SystemExit as stop:
        # click turns the broken pipe of a command into exit code 1 before it gets here
        if isinstance(stop.__context__, BrokenPipeError):
            _reader_gone()
        raise
    except Exception as error:
        code = getattr(error, "code", None)
        if isinstance(code, str):
            print(f"exl: {error} [{code}]", file=sys.stderr)
        elif isinstance(error, OSError) and error.errno is not None and error.filename is None:
            # Errors about files carry a name: this one is of a stream that was open from the start.
            print(f"exl: cannot write the output: {error.strerror} [output]", file=sys.stderr)
            _discard_output()
        else:
            raise
        sys.exit(1)


def _open_closed_streams() -> None:
    """Replace standard streams that were closed before the start, which Python sets to None.

    Input is then empty, errors go nowhere, and writing output fails as on any stream that cannot be written.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY), encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")


def _reader_gone() -> NoReturn:
    """Exit code 141 (128 + SIGPIPE)."""
    _discard_output()
    sys.exit(141)


def _discard_output() -> None:
    """Send what is still buffered nowhere, so that the interpreter's own flush at the end does not complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
