"""Chat templates come with models, so they are rendered in another process, with a limit on its time and memory."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ChatTemplateError
from .template_worker import PREFIX, write_message

__all__ = ["render"]

MEMORY = 512 << 20  # bytes that a template may take
SECONDS = 10.0
PROCESSES = 4  # started as they are needed
WAIT_SECONDS = 60.0  # for one of them to be free
START_SECONDS = 60.0  # for the process to come up, which is no template's doing
MOST_CHARACTERS = 1 << 24
WORKER = Path(__file__).with_name("template_worker.py")
# The terminal sends Ctrl-C to its whole foreground process group. The worker is in another one before its program
# starts: only this process decides what an interrupt means.
_APART: dict[str, Any] = {"start_new_session": True}
if sys.platform == "win32":
    _APART = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}


def render(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The prompt. Raises ChatTemplateError when the template is malformed, refuses the conversation, or takes more
    time or memory than a template may, and for variables that are not plain data (JSON)."""
    values = {**variables, "messages": messages}
    try:
        request = json.loads(json.dumps({"source": source, "values": values, "most": MOST_CHARACTERS}, default=_plain))
    except (TypeError, ValueError, RecursionError) as e:
        raise ChatTemplateError(f"messages and variables of a chat template must be plain data: {e}") from e
    answer = _pool.ask(request)
    if "error" in answer:
        raise ChatTemplateError(answer["error"])
    return str(answer["text"])


def _plain(value: Any) -> Any:
    """Mappings and sequences of other types than json knows."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, (str, bytes, bytearray)):
        return list(value)
    raise TypeError(f"a {type(value).__name__} is none")


class _Worker:
    """The process, started on first use and again after it had to be ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer. Raises ChatTemplateError when there is none."""
        with self._lock:
            try:
                process = self._process
                if process is None or process.poll() is not None:
                    process = self._process = self._started()
                found = self._exchange(process, request, SECONDS)
            except BaseException:
                # Also for a Ctrl-C, wherever it came: an answer that is under way would be taken for the next one, a
                # timer that nobody has stopped would end the process while it renders something else.
                self.end()
                raise
        if found is None:
            raise ChatTemplateError(
                f"the chat template took more than {SECONDS:g} seconds, or more than {MEMORY >> 20} MiB: it was ended"
            )
        return found

    def end(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            _kill(process)

    def forget(self) -> None:
        """In a forked child: the process is the parent's, and whoever held the lock stayed there."""
        self._process, self._lock = None, threading.Lock()

    def _started(self) -> subprocess.Popen[bytes]:
        """A process that has come up: what that takes on a busy machine is not taken from the template's time."""
        if not sys.executable:
            raise ChatTemplateError("chat templates need a Python interpreter to run in, and this program names none")
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, **_APART
            )
        except OSError as e:
            raise ChatTemplateError(f"no process for the chat template could be started: {e}") from e
        # What else stands in sys.path, a Path for example, means nothing to Python either.
        setup = {"path": [place for place in sys.path if isinstance(place, str)], "memory": MEMORY}
        if self._exchange(process, setup, START_SECONDS) is None:
            raise ChatTemplateError(
                f"the process for the chat template gave no sign for {START_SECONDS:g} seconds, or died"
            )
        return process

    def _exchange(
        self, process: subprocess.Popen[bytes], request: Mapping[str, Any], seconds: float
    ) -> dict[str, Any] | None:
        """The process's answer; None where it gave none, or half of one, within these seconds: it is ended then."""
        assert process.stdin is not None
        assert process.stdout is not None
        found: dict[str, Any] | None = None
        timer = threading.Timer(seconds, process.kill)
        timer.daemon = True
        timer.start()
        try:
            write_message(process.stdin, request)
            head = process.stdout.read(PREFIX)
            size = int.from_bytes(head, "little")
            body = process.stdout.read(size) if len(head) == PREFIX else b""
            found = json.loads(body) if body and len(body) == size else None
            return found
        except (OSError, ValueError) as e:
            raise ChatTemplateError(f"the chat template ended its process ({e})") from e
        finally:
            timer.cancel()
            if found is None:
                _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a Ctrl-C may have left a lock of Popen's locked
        process.wait(1.0)


class _Pool:
    """Several processes, so that a slow template does not stop the others. One that is free is taken, the one used last
    first; where none is, who came first is served first."""

    def __init__(self, size: int) -> None:
        self._workers = [_Worker() for _ in range(size)]
        self._fill()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer. Raises ChatTemplateError when there is none, or no process is free for too long."""
        try:
            worker = self._idle.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            raise ChatTemplateError(
                f"all {len(self._workers)} processes for chat templates were busy for {WAIT_SECONDS:g} seconds"
            ) from None
        try:
            return worker.ask(request)
        finally:
            self._idle.put(worker)

    def end(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.end()

    def forget(self) -> None:
        """After a fork: the processes belong to the parent."""
        for worker in self._workers:
            worker.forget()
        self._fill()

    def _fill(self) -> None:
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)


_pool = _Pool(PROCESSES)
atexit.register(_pool.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.forget)
