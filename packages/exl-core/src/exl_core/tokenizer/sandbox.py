"""Render chat templates, which come with models, in another process with a limit on its time and memory."""

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

__all__ = ["TemplatePool", "pool", "render"]

MEMORY = 512 << 20  # bytes that a template may use
SECONDS = 10.0
PROCESSES = 4  # started on demand
WAIT_SECONDS = 60.0  # for a free process
START_SECONDS = 60.0  # for the start of the process, which does not depend on the template
MOST_CHARACTERS = 1 << 24
WORKER = Path(__file__).with_name("template_worker.py")
# The terminal sends Ctrl-C to its whole foreground process group. The worker is in another group before its program
# starts: only this process handles interrupts.
_APART: dict[str, Any] = {"start_new_session": True}
if sys.platform == "win32":
    _APART = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}


def render(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Render a template and return the prompt.

    Args:
        source: Jinja source.
        messages: the conversation, plain data (JSON).
        variables: further variables, plain data (JSON).

    Raises:
        ChatTemplateError: the template is malformed, rejects the conversation, or exceeds the limits of time or memory;
            or a variable is not plain data.
    """
    values = {**variables, "messages": messages}
    try:
        request = json.loads(json.dumps({"source": source, "values": values, "most": MOST_CHARACTERS}, default=_plain))
    except (TypeError, ValueError, RecursionError) as e:
        raise ChatTemplateError(f"messages and variables of a chat template must be plain data: {e}") from e
    answer = pool.ask(request)
    if "error" in answer:
        raise ChatTemplateError(answer["error"])
    return str(answer["text"])


def _plain(value: Any) -> Any:
    """Convert mappings and sequences of other types than json supports."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, (str, bytes, bytearray)):
        return list(value)
    raise TypeError(f"a {type(value).__name__} is none")


class _Worker:
    """The process, started on first use and again after it had to be terminated."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request. Raises ChatTemplateError when there is none."""
        with self._lock:
            try:
                process = self._process
                if process is None or process.poll() is not None:
                    process = self._process = self._started()
                found = self._exchange(process, request, SECONDS)
            except BaseException:
                # Also after Ctrl-C at any point: a pending answer would be taken for the next one, and a running
                # timer would end the process during another request.
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
        """Reset the state in a forked child: the process is the parent's, and the lock's holder does not exist here."""
        self._process, self._lock = None, threading.Lock()

    def _started(self) -> subprocess.Popen[bytes]:
        """Return a started process; the time of its start on a busy machine does not count as the template's time."""
        if not sys.executable:
            raise ChatTemplateError("chat templates need a Python interpreter to run in, and this program names none")
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, **_APART
            )
        except OSError as e:
            raise ChatTemplateError(f"no process for the chat template could be started: {e}") from e
        # sys.path may have other entries, a Path for example, which Python itself ignores, too.
        setup = {"path": [place for place in sys.path if isinstance(place, str)], "memory": MEMORY}
        if self._exchange(process, setup, START_SECONDS) is None:
            raise ChatTemplateError(
                f"the process for the chat template did not respond for {START_SECONDS:g} seconds, or died"
            )
        return process

    def _exchange(
        self, process: subprocess.Popen[bytes], request: Mapping[str, Any], seconds: float
    ) -> dict[str, Any] | None:
        """Return the process's answer.

        None if no complete answer arrived within `seconds`; the process is then terminated.
        """
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
    with contextlib.suppress(subprocess.TimeoutExpired):  # Ctrl-C may have left a lock of Popen's locked
        process.wait(1.0)


class TemplatePool:
    """Several processes, so that a slow template does not block the others.

    The most recently used free process is taken; waiting requests are served in order.
    """

    def __init__(self, size: int) -> None:
        self._workers = [_Worker() for _ in range(size)]
        self._fill()

    @property
    def busy(self) -> int:
        """How many of the processes render a template now."""
        return len(self._workers) - self._idle.qsize()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request.

        Raises ChatTemplateError when there is none, or no process becomes free in time.
        """
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
        """Reset the state after a fork: the processes belong to the parent."""
        for worker in self._workers:
            worker.forget()
        self._fill()

    def _fill(self) -> None:
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)


pool = TemplatePool(PROCESSES)
"""The processes for the chat templates of this process."""
atexit.register(pool.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.forget)
