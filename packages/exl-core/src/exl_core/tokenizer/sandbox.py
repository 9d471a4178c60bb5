"""Chat templates come with models, so they are rendered in another process, with a limit on its time and memory."""

from __future__ import annotations

import atexit
import json
import os
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
START_SECONDS = 60.0  # for the process to come up, which is no template's doing
MOST_CHARACTERS = 1 << 24
WORKER = Path(__file__).with_name("template_worker.py")


def render(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The prompt. Raises ChatTemplateError when the template is malformed, refuses the conversation, or takes more
    time or memory than a template may, and for variables that are not plain data (JSON)."""
    values = {**variables, "messages": messages}
    try:
        request = json.loads(json.dumps({"source": source, "values": values, "most": MOST_CHARACTERS}, default=_plain))
    except (TypeError, ValueError, RecursionError) as e:
        raise ChatTemplateError(f"messages and variables of a chat template must be plain data: {e}") from e
    answer = _worker.ask(request)
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
        self._owner = 0
        self._lock = threading.Lock()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                self._process = None
                self._process, self._owner = self._started(), os.getpid()
            found = self._exchange(self._process, request, SECONDS)
        if found is None:
            raise ChatTemplateError(
                f"the chat template took more than {SECONDS:g} seconds, or more than {MEMORY >> 20} MiB: it was ended"
            )
        return found

    def end(self) -> None:
        """End the process, if this one started it."""
        if self._process is not None and self._owner == os.getpid():
            _kill(self._process)
        self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        """A process that has come up: what that takes on a busy machine is not taken from the template's time."""
        if not sys.executable:
            raise ChatTemplateError("chat templates need a Python interpreter to run in, and this program names none")
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        except OSError as e:
            raise ChatTemplateError(f"no process for the chat template could be started: {e}") from e
        if self._exchange(process, {"path": sys.path, "memory": MEMORY}, START_SECONDS) is None:
            raise ChatTemplateError(
                f"the process for the chat template gave no sign for {START_SECONDS:g} seconds, or died"
            )
        return process

    def _exchange(
        self, process: subprocess.Popen[bytes], request: Mapping[str, Any], seconds: float
    ) -> dict[str, Any] | None:
        """The process's answer, None where it gave none within these seconds. Unless it answered it is ended: what a
        Ctrl-C left on its way would be taken for the answer to the next request."""
        assert process.stdin is not None
        assert process.stdout is not None
        found: dict[str, Any] | None = None
        timer = threading.Timer(seconds, process.kill)
        timer.daemon = True
        timer.start()
        try:
            write_message(process.stdin, request)
            head = process.stdout.read(PREFIX)
            body = process.stdout.read(int.from_bytes(head, "little")) if len(head) == PREFIX else b""
            found = json.loads(body) if body else None
            return found
        except (OSError, ValueError) as e:
            raise ChatTemplateError(f"the chat template ended its process ({e})") from e
        finally:
            timer.cancel()
            if found is None:
                _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


_worker = _Worker()
atexit.register(_worker.end)
