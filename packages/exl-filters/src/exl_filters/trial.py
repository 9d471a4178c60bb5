"""Compile a grammar in a process that can be killed, before it is compiled in this process.

llguidance counts its work ("fuel"), but a single step may be exponential. A terminal that is the intersection of 20
patterns, or a schema of 1.2 kB with an `allOf` of 30, takes gigabytes and minutes whatever the fuel. A chain of 4000
references overflows the stack, which ends the process. Nothing inside a process can bound that. So a grammar that is
not small and plain (`plain.py`) is compiled in a separate process first, under limits of memory and time. A grammar
that passes is then compiled here, at about the same cost. The process is started when it is first needed and kept;
plain grammars do not need it. xgrammar has no limits at all; the process sends back its compiled grammar.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from exl_filters import trial_worker
from exl_filters.compiling import CompileBudget, Deadline, deadline
from exl_filters.cores import available_cores
from exl_filters.errors import FilterCompileError, FilterError
from exl_filters.trial_worker import receive, send
from exl_filters.vocabulary import Vocabulary

__all__ = ["Worker", "WorkerPool", "compile_elsewhere", "tried_grammar", "workers"]

# Processes that work at once, kept for the next grammar.
MOST_WORKERS = max(3, min(4, available_cores() // 2))
REMEMBERED, REMEMBERED_CHARACTERS = 512, 16 << 20
START_SECONDS = 60.0
CANNOT_START = (
    "no process for trying the grammar can be started (budget=CompileBudget(trust=True) compiles it in this one, "
    "which no limit bounds)"
)
# `<` and `[` as JSON may write them. After an escaped backslash they are text, where a match does no harm.
_ESCAPED = re.compile(r"\\u00(3c|5b)", re.IGNORECASE)
REINSTALL = "install exl-filters and {library} again, and restart this program"
_OUT_OF_TIME = -getattr(signal, "SIGXCPU", 1 << 16)


def tried_grammar(
    source: Mapping[str, Any],
    options: Mapping[str, Any],
    limits: Mapping[str, int] | None,
    budget: CompileBudget,
    vocabulary: Vocabulary,
) -> str:
    """Return llguidance's grammar for a source that compiles within the budget.

    The other process translates the source as well: a schema takes milliseconds of Python code, during which a
    program's other threads would wait for the interpreter.

    Args:
        source: One entry, as `grammar_source.text_source` returns it.
        options: The other arguments of `grammar_source.grammar_text`.
        limits: llguidance's parser limits by name.
        budget: Limits of time and memory.
        vocabulary: The vocabulary whose control tokens the grammar may name.

    Raises:
        FilterCompileError: the grammar does not compile, exceeds the budget, or ends the process.
        FilterError: no process can be started, or its installation is faulty.
    """
    parser = {"verbose_errors": False, **(limits or {})}
    request = {
        "source": dict(source),
        "options": dict(options),
        "limits": parser,
        **_control_tokens(source, vocabulary),
    }
    key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).digest()
    with _lock:
        taken, allowed, grammar = _passed.get(key, (math.inf, 0, ""))
    if taken > budget.seconds or allowed > budget.megabytes:
        reply = workers.ask(request, budget)
        if reply["error"]:
            raise FilterCompileError(reply["error"])
        if reply["warnings"]:
            raise FilterCompileError("cannot be enforced: " + "; ".join(reply["warnings"]))
        taken, grammar = reply["took"], reply["grammar"]
        _remember(key, (taken, budget.megabytes, grammar))
        if taken > budget.seconds:
            # On a busy machine, the timer that kills may fire late.
            raise _too_slow(budget)
    limit = deadline()
    if limit is not None and limit.left() < taken:
        raise limit.error()
    return grammar


def _remember(key: bytes, passed: tuple[float, int, str]) -> None:
    """Remember a grammar that has passed, and forget those that have not been tried for the longest time."""
    global _characters
    with _lock:
        if key in _passed:
            _characters -= len(_passed.pop(key)[2])
        _passed[key] = passed
        _characters += len(passed[2])
        while len(_passed) > REMEMBERED or _characters > REMEMBERED_CHARACTERS:
            _characters -= len(_passed.popitem(last=False)[1][2])


def _control_tokens(source: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """Return size and control tokens of the vocabulary, where the source may name them: `<|name|>`, `<[id]>`."""
    ((kind, text),) = source.items()
    if kind == "llg":  # JSON, which may escape both characters
        text = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)
    if kind in ("json_schema", "regex", "choice") or "<" not in text:
        return {"width": 0, "control": {}}
    texts = {i: vocabulary.special_texts.get(i, "") for i in sorted(vocabulary.special_ids)}
    if "<[" in text:
        return {"width": vocabulary.size, "control": texts}
    return {"width": 0, "control": dict(enumerate(texts.values()))}


def compile_elsewhere(
    call: str,
    text: str,
    options: Mapping[str, Any],
    vocabulary: str,
    tokens: Callable[[], list[bytes]],
    budget: CompileBudget,
) -> str:
    """Return the result of xgrammar's compiler method `call` for `text`, in xgrammar's serialized form.

    `vocabulary` is the key of `tokens()`; the tokens are sent to a process that does not have them yet.
    """
    request = {"call": call, "text": text, "options": dict(options), "vocabulary": vocabulary}
    reply = workers.ask(request, budget, "xgrammar")
    if "unknown" in reply:
        reply = workers.ask({**request, "tokens": [token.decode("latin-1") for token in tokens()]}, budget, "xgrammar")
    return str(reply["compiled"])


class Worker:
    """One process; one thread at a time uses it.

    Raises:
        FilterError: the process cannot be started, or cannot import what it needs.
    """

    begun = False
    """Whether the process has read the last request, as it reports before it sets its limits."""

    def __init__(self, library: str) -> None:
        self.library = library
        place = importlib.util.find_spec(library)
        if place is None or place.origin is None:
            raise FilterError(f"{CANNOT_START}: {library} is not found")
        directory = str(Path(place.origin).parents[1])
        # In a frozen program, sys.executable is that program.
        if not sys.executable or getattr(sys, "frozen", False):
            raise FilterError(f"{CANNOT_START}: this program is not run by a Python interpreter")
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", trial_worker.__file__, library, directory, str(_stack())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise FilterError(f"{CANNOT_START}: {error}") from error
        ready = self._within(START_SECONDS, None)
        if ready is None:
            self.kill()
            raise FilterError(f"{CANNOT_START}: {sys.executable} did not answer within {START_SECONDS:g} s or ended")
        if "broken" in ready:
            self.kill()
            raise self.broken(ready["broken"])

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Return the answer; None when there was none in time or the process has died."""
        return self._within(seconds, request)

    def kill(self) -> None:
        """End the process and close its pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # a request that the process did not read cannot be flushed
                    pipe.close()

    def broken(self, reason: str) -> FilterError:
        """Return the error for a process that could not import a module or read a file."""
        return FilterError(
            f"the installation of exl-filters or {self.library} is incomplete or was changed under this program "
            f"({reason}): {REINSTALL.format(library=self.library)}"
        )

    def _within(self, seconds: float, request: dict[str, Any] | None) -> dict[str, Any] | None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        timer = threading.Timer(seconds, self.process.kill)
        timer.daemon = True
        timer.start()
        self.begun = False
        try:
            if request is not None:
                send(self.process.stdin, request)
                self.begun = receive(self.process.stdout) is not None
            return receive(self.process.stdout)
        except OSError:
            return None
        finally:
            timer.cancel()


class _Places:
    """Slots for the processes that work at once."""

    def __init__(self, count: int) -> None:
        self._free: SimpleQueue[Any] = SimpleQueue()
        for _ in range(count):
            self._free.put(None)

    def one(self, seconds: float) -> _Place:
        """Return a context manager that takes a slot. It raises `queue.Empty` when none is free within `seconds`."""
        return _Place(self._free, seconds)


class _Place:
    """Take a slot and return it in C code, which Ctrl-C does not interrupt.

    A Ctrl-C in the main thread inside a Semaphore, which is Python code, would leave it locked: no grammar could be
    tried any more.
    """

    def __init__(self, free: SimpleQueue[Any], seconds: float) -> None:
        self._free, self._seconds = free, seconds

    @property
    def __enter__(self) -> Callable[[], object]:
        return partial(self._free.get, True, self._seconds)

    @property
    def __exit__(self) -> Callable[[Any, Any, Any], None]:
        return self._free.put  # `with` passes an argument, which becomes the returned entry


class WorkerPool:
    """Processes that compile grammars: at most `count` work at once, and each is kept for the next grammar.

    Args:
        count: Processes that may work at once.
        start: Starts the process of a library (`"llguidance"` or `"xgrammar"`).
    """

    def __init__(self, count: int, start: Callable[[str], Worker] = Worker) -> None:
        self._count, self._start = count, start
        self._lock, self._places = threading.Lock(), _Places(count)
        self._idle: list[Worker] = []

    @property
    def idle(self) -> tuple[Worker, ...]:
        """The processes that wait for a grammar."""
        with self._lock:
            return tuple(self._idle)

    def ask(self, request: dict[str, Any], budget: CompileBudget, library: str = "llguidance") -> dict[str, Any]:
        """Return a process's answer to a request.

        Raises:
            FilterCompileError: the budget is used up, the process died, or no process was free in time.
            FilterError: no process can be started, or its installation is faulty.
        """
        limit = deadline() or Deadline(None)
        # Every holder of a slot has a budget, so the wait has an end.
        longest = 10 * budget.seconds
        try:
            with self._places.one(min(limit.left(), longest)):
                reply = self._ask_one(request, budget, library, limit)
        except Empty:
            if limit.over():
                raise limit.error() from None
            raise FilterCompileError(
                f"not tried: {self._count} other grammars have been compiling for {longest:g} s; try again later"
            ) from None
        if "refused" in reply:
            raise FilterCompileError(f"{library}: {reply['refused']}")
        return reply

    def stop(self) -> None:
        """End the processes that wait for a grammar; the next grammar that needs one starts it again."""
        with self._lock:
            ended, self._idle[:] = list(self._idle), []
        for worker in ended:
            worker.kill()

    def forget(self) -> None:
        """Forget the processes, without ending them: in a forked child they are the parent's."""
        self._lock, self._places = threading.Lock(), _Places(self._count)
        self._idle.clear()

    def _ask_one(self, request: dict[str, Any], budget: CompileBudget, library: str, limit: Deadline) -> dict[str, Any]:
        worker = self._kept(library)
        reply = None if worker is None else self._answer(worker, request, budget, limit)
        if reply is None:
            worker = self._start(library)
            reply = self._answer(worker, request, budget, limit)
            if reply is None:
                code = worker.process.returncode
                raise FilterError(f"{CANNOT_START}: it ended with exit code {code} before it read the grammar")
        return reply

    def _answer(
        self, worker: Worker, request: dict[str, Any], budget: CompileBudget, limit: Deadline
    ) -> dict[str, Any] | None:
        """Return a process's answer, and keep the process; None where it had ended before it read the request."""
        seconds = min(budget.seconds, limit.left())
        start = time.monotonic()
        try:
            with limit.killing(worker.process):
                reply = worker.ask({**request, "megabytes": budget.megabytes, "seconds": seconds}, seconds)
        except BaseException:
            worker.kill()
            raise
        if reply is None:
            worker.kill()
            late = time.monotonic() - start >= seconds
            if worker.begun or late or limit.over():
                raise _cause(worker, budget, limit, late)
            return None
        if "broken" in reply:
            worker.kill()
            raise worker.broken(reply["broken"])
        with self._lock:
            self._idle.append(worker)
        return reply

    def _kept(self, library: str) -> Worker | None:
        """Return an idle process of the library; None where there is none."""
        while True:
            with self._lock:
                worker = next((w for w in reversed(self._idle) if w.library == library), None)
                if worker is not None:
                    self._idle.remove(worker)
            if worker is None or worker.process.poll() is None:
                return worker
            worker.kill()


def _cause(worker: Worker, budget: CompileBudget, limit: Deadline, late: bool) -> FilterCompileError:
    """Return the error for a worker that gave no answer."""
    if limit.over():
        return limit.error()
    if late or worker.process.returncode == _OUT_OF_TIME:
        return _too_slow(budget)
    return FilterCompileError(
        f"compiling it takes more than {budget.megabytes} MB, or more stack than there is (exit code "
        f"{worker.process.returncode}): simplify it (fewer patterns joined by allOf or &, shorter chains of "
        "references), or give a larger `budget`"
    )


def _too_slow(budget: CompileBudget) -> FilterCompileError:
    return FilterCompileError(
        f"not compiled within {budget.seconds:g} s: simplify it (fewer patterns joined by allOf or &, fewer "
        "members), or give a larger `budget`"
    )


def _stack() -> int:
    """Return the stack for a trial in bytes: half of a thread's stack here, so that a grammar that passes also fits
    here.
    """
    try:
        import resource

        own, _ = resource.getrlimit(resource.RLIMIT_STACK)
    except ImportError:
        own = 2 << 20  # Windows
    sizes = [8 << 20, *(size for size in (own, threading.stack_size()) if size > 0)]
    return max(256 << 10, min(sizes) // 2 // 4096 * 4096)


workers = WorkerPool(MOST_WORKERS)
"""The processes of this process."""
_lock = threading.Lock()
# Seconds taken, megabytes allowed and llguidance's grammar, by request that passed; and the characters of them all,
# which take up to 64 MB: Python uses four bytes for each character of a text with an emoji.
_passed: OrderedDict[bytes, tuple[float, int, str]] = OrderedDict()
_characters = 0


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    workers.forget()


atexit.register(workers.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
