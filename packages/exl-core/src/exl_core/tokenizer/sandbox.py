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
import time
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
AT_ONCE = 0.1  # within which a pipe to a process that has ended says so
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


def _exceeded() -> str:
    return f"the chat template took more than {SECONDS:g} seconds, or more than {MEMORY >> 20} MiB: it was ended"


class _Worker:
    """A process, started on first use and again after it had to be terminated. One thread uses it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request. Raises ChatTemplateError when there is none."""
        try:
            found = self._ask_running(request)
            if found is None:  # no process, or one that was ended from outside before it began
                process = self._process = self._started()
                found = self._exchange(process, request, SECONDS)
        except BaseException:
            self.end()  # a pending answer would be taken for the next one
            raise
        if found is None:
            raise ChatTemplateError(_exceeded())
        return found

    def _ask_running(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the answer of the process that served earlier requests; None if there is none or it has ended.

        It may have been ended from outside, which a request learns only when its answer ends at once. A process that
        ends later has been ended by the template, which does not run again. Raises ChatTemplateError for that.
        """
        process = self._process
        if process is None or process.poll() is not None:
            return None
        began = time.monotonic()
        try:
            found = self._exchange(process, request, SECONDS)
        except ChatTemplateError:
            found = None
        if found is None and time.monotonic() - began >= AT_ONCE:
            raise ChatTemplateError(_exceeded())
        return found

    def end(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            _kill(process)

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
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)


class _Request:
    """A request on its way: `begun` and `answers` are all that its caller and the thread that serves it share."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self.begun = False
        self.answers: queue.SimpleQueue[dict[str, Any] | BaseException] = queue.SimpleQueue()


class TemplatePool:
    """Several processes, so that a slow template does not block the others. Requests are served in order.

    A thread serves each process, and both are started on demand. The caller only puts its request into a queue and
    waits for the answer: wherever Ctrl-C interrupts it, no lock stays locked, and no process is lost or left with an
    answer that the next request would take for its own. Threads other than the main one are not interrupted.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.forget()

    @property
    def busy(self) -> int:
        """How many of the processes render a template now."""
        return len(self._workers) - self._idle

    def ask(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request.

        Raises ChatTemplateError when there is none, or no process becomes free in time.
        """
        request = _Request(content)
        self._requests.put(request)
        try:
            self._grow()
        except RuntimeError as e:
            if not self._workers:
                request.begun = True  # nobody waits for it any more
                raise ChatTemplateError(f"no thread for the chat template could be started: {e}") from e
        try:
            answer = request.answers.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            if not request.begun:
                request.begun = True  # nobody waits for it any more
                raise ChatTemplateError(
                    f"all {self._size} processes for chat templates were busy for {WAIT_SECONDS:g} seconds"
                ) from None
            answer = request.answers.get()  # limited by the time that a process may start and render
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end(self) -> None:
        """End the processes; the next request starts one."""
        for worker in list(self._workers):
            worker.end()

    def forget(self) -> None:
        """Begin anew, also after a fork: processes and threads belong to the parent."""
        self._lock = threading.Lock()  # of what the threads count; the callers never take it
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._idle = 0

    def _grow(self) -> None:
        """Start a thread if requests wait and may have another process."""
        if self._idle < self._requests.qsize() and len(self._workers) < self._size:
            threading.Thread(target=self._serve, name="chat template", daemon=True).start()

    def _serve(self) -> None:
        """Serve requests with a process."""
        worker, lock, requests = _Worker(), self._lock, self._requests
        with lock:
            if len(self._workers) >= self._size:
                return
            self._workers.append(worker)
            self._idle += 1
        while True:
            request = requests.get()
            with lock:
                self._idle -= 1
            with contextlib.suppress(RuntimeError):  # no thread could be started: those that run serve all
                self._grow()
            answer: dict[str, Any] | BaseException | None = None
            if not request.begun:
                request.begun = True
                try:
                    answer = worker.ask(request.content)
                except BaseException as e:
                    answer = e
            with lock:  # before the answer: the caller's next request finds this process idle
                self._idle += 1
            if answer is not None:
                request.answers.put(answer)
            del request, answer


pool = TemplatePool(PROCESSES)
"""The processes for the chat templates of this process."""
atexit.register(pool.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.forget)
