"""One API worker: the models that the supervisor reports, its metrics, its HTTP server."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from exl_serve.api.state import Caller, ModelHandle
from exl_serve.config.model import ModelConfig
from exl_serve.engine.client import EngineClient
from exl_serve.engine.local import LocalEngine
from exl_serve.errors import ServeError
from exl_serve.stream.channels import OutputFamily, detect_family
from exl_serve.super import link

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from exl_serve.api.text import FolderText

__all__ = ["Handle", "Link", "WorkerModels", "find_model", "lags"]

log = logging.getLogger(__name__)

ENDED = "the engine of this model has ended: try again"
LIVING = ("ready", "draining", "stalled")
"""States in which an engine may still answer its accepted requests."""
LOAD_WAIT = 5.0
"""Seconds that a request waits for a model that is being loaded."""
REPORT_SECONDS = 1.0
"""Seconds after which what was counted is reported."""
LAG_SECONDS = 0.1
"""Seconds between two looks at how late the event loop is, while there are requests."""
MOST_LAG = 60.0
"""A process that was stopped for longer counts as this late."""


class Handle:
    """A model whose engine is a separate process."""

    def __init__(
        self, told: link.ModelState, text: FolderText, family: OutputFamily, load: Callable[[str], Awaitable[Any]]
    ) -> None:
        self.told, self.text, self.family = told, text, family
        self._load = load
        self._client: LocalEngine | None = None
        #: makes the client
        self._connecting: asyncio.Task[LocalEngine] | None = None
        self._epoch = -1
        self._changed = asyncio.Event()

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self.told.config

    @property
    def state(self) -> str:
        """unloaded, loading, ready, draining, stalled or failed."""
        return self.told.state

    def update(self, told: link.ModelState) -> None:
        """Store a new state. The client of an engine that has ended fails its requests, and so does one being made."""
        self.told = told
        ended = told.epoch != self._epoch or told.state not in LIVING
        if self._client is not None and ended:
            client, self._client = self._client, None
            client.fail(ENDED)
            asyncio.get_running_loop().create_task(client.close())
        if self._connecting is not None and ended:
            self._connecting.cancel()
            self._connecting = None
        self._changed.set()

    async def engine(self) -> EngineClient:
        """Return the engine's client; loads the model if necessary.

        Raises ServeError 503, or 409 where there is no room for the model.
        """
        if self.state == "unloaded":
            await self._load(self.config.id)
        if self.state in ("unloaded", "loading"):
            try:
                async with asyncio.timeout(LOAD_WAIT):
                    while self.state in ("unloaded", "loading"):
                        self._changed.clear()
                        await self._changed.wait()
            except TimeoutError:
                pass
        if self.state != "ready":
            raise self._refusal()
        if self._client is not None:
            return self._client
        if self._connecting is None:
            self._epoch = self.told.epoch
            self._connecting = asyncio.create_task(self._connect())
        connecting = self._connecting
        await asyncio.wait([connecting])
        if connecting.cancelled():
            raise ServeError.unavailable("engine_restarting", ENDED)
        return connecting.result()

    async def _connect(self) -> LocalEngine:
        """Make the client. All requests that need it wait for this one task, which `update` ends with the engine."""
        try:
            self._client = client = await LocalEngine.connect(self.told.address)
        finally:
            if self._connecting is asyncio.current_task():
                self._connecting = None
        return client

    def _refusal(self) -> ServeError:
        name = self.config.id
        if self.state == "failed":
            return ServeError.unavailable("model_failed", f"the model {name} could not be loaded; see the log", None)
        if self.state == "stalled":
            return ServeError.unavailable("engine_stalled", f"the engine of {name} makes no progress", LOAD_WAIT)
        if self.state == "loading":
            return ServeError.unavailable("model_loading", f"the model {name} is being loaded: try again", LOAD_WAIT)
        if self.state == "draining":
            return ServeError.unavailable("model_unloaded", f"the model {name} is being unloaded: try again", LOAD_WAIT)
        return ServeError.unavailable("model_unloaded", f"the model {name} is not loaded: try again", LOAD_WAIT)


def _read_text(config: ModelConfig) -> tuple[FolderText, OutputFamily]:
    """Read a model's tokenizer and template; a large vocabulary takes seconds. Raises OSError or TokenizerError."""
    # Imported here, on the thread that reads: /health/live answers before.
    from exl_serve.api.text import FolderText

    template = None if config.template is None else Path(config.template).read_text(encoding="utf-8")
    text = FolderText(config.path, template)
    return text, detect_family(config.family, text.template, text.special, text.piece)


def find_model(
    handles: Sequence[ModelHandle],
    name: str,
    caller: Caller,
    accept_any: bool,
    missing: Sequence[tuple[ModelConfig, ServeError]] = (),
) -> tuple[ModelHandle, str | None]:
    """Return (model, adapter) for a name.

    `missing`: models that exist but cannot answer, and the error for requests that name them. Raises this error, or
    ServeError with the known names: 404 for another name, 400 for none.
    """
    candidates: list[tuple[ModelConfig, ModelHandle | ServeError]] = [(one.config, one) for one in handles]
    candidates += missing
    allowed = [pair for pair in candidates if caller.models is None or pair[0].id in caller.models]
    base, _, adapter = name.partition(":")
    for config, found in allowed:
        known = (config.id, *config.aliases)
        if name in known:
            return _there(found), None
        if base in known and adapter:
            return _there(found), adapter
    # A request that names no model means the only one there is.
    if len(allowed) == 1 and (accept_any or not name):
        return _there(allowed[0][1]), None
    there = ", ".join(config.id for config, _ in allowed) or "none"
    if not name and allowed:
        raise ServeError.invalid(f"model is missing; it must be one of {there}", "model", "missing_field")
    raise ServeError(
        404,
        "not_found_error",
        "model_not_found",
        f"the model {name[:128]!r} does not exist; there is: {there}",
        param="model",
    )


def _there(found: ModelHandle | ServeError) -> ModelHandle:
    if isinstance(found, ServeError):
        raise found
    return found


class WorkerModels:
    """The models of a worker."""

    def __init__(self, accept_any: bool, call: Any) -> None:
        self._handles: dict[str, Handle] = {}
        #: the last state of models whose tokenizers are being read
        self._reading: dict[str, link.ModelState] = {}
        #: states of models whose tokenizers could not be read; they are read again for another configuration or engine
        self._unreadable: dict[str, link.ModelState] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._accept_any, self._call = accept_any, call
        #: set once the first list of models has been read, or when the server stops
        self.known = asyncio.Event()
        #: set once requests for some model that is ready are answered, or refused because its tokenizer is unreadable
        self.ready = asyncio.Event()

    def update(self, told: Sequence[link.ModelState]) -> None:
        """Store the states of all models; forget removed ones and begin to read the tokenizers of new ones."""
        ids = {one.config.id for one in told}
        for id in self._handles.keys() - ids:
            del self._handles[id]  # the operator has removed it
        for id in self._reading.keys() - ids:
            del self._reading[id]
        for id in self._unreadable.keys() - ids:
            del self._unreadable[id]
        for one in told:
            id = one.config.id
            if (handle := self._handles.get(id)) is not None:
                handle.update(one)
            elif id in self._reading:
                self._reading[id] = one
            elif (bad := self._unreadable.get(id)) is None or (bad.config, bad.epoch) != (one.config, one.epoch):
                self._reading[id] = one
                task = asyncio.create_task(self._read(id))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self._unreadable[id] = one
        self._set_events()

    def _set_events(self) -> None:
        if not self._reading:
            self.known.set()
        states = [handle.state for handle in self._handles.values()]
        if "ready" in states + [told.state for told in self._unreadable.values()]:
            self.ready.set()

    async def _read(self, id: str) -> None:
        """Add a model once its tokenizer is read, on a thread: streams of other models go on meanwhile.

        A configuration that changes meanwhile is read again.
        """
        while (read := self._reading.get(id)) is not None:
            config = read.config
            made: tuple[FolderText, OutputFamily] | None
            try:
                made = await asyncio.get_running_loop().run_in_executor(None, _read_text, config)
            except Exception as error:  # the engine fails for the same reason and reports it
                log.error("the tokenizer of %s cannot be used: %s", id, error)
                made = None
            told = self._reading.get(id)
            if told is None or told.config != config:
                continue
            del self._reading[id]
            if made is None:
                self._unreadable[id] = msgspec.structs.replace(told, epoch=read.epoch)
            else:
                self._unreadable.pop(id, None)
                self._handles[id] = Handle(told, *made, self._load)
        self._set_events()

    def resolve(self, name: str, caller: Caller) -> tuple[ModelHandle, str | None]:
        """Return (model, adapter) for a name.

        Raises ServeError 404, or 503 for a model whose tokenizer is being read or cannot be read.
        """
        return find_model(self.list(), name, caller, self._accept_any, self._missing())

    def _missing(self) -> Sequence[tuple[ModelConfig, ServeError]]:
        """Return the models that have no handle, and the error for their requests."""
        found = []
        for id, told in self._reading.items():
            text = f"the model {id} is being loaded: try again"
            found.append((told.config, ServeError.unavailable("model_loading", text, LOAD_WAIT)))
        for id, told in self._unreadable.items():
            if id not in self._reading:
                text = f"the tokenizer of the model {id} cannot be read; see the log"
                found.append((told.config, ServeError.unavailable("model_failed", text, None)))
        return found

    def list(self) -> Sequence[ModelHandle]:
        """Return all models."""
        return list(self._handles.values())

    async def _load(self, id: str) -> None:
        await self._call("load", {"model": id, "wanted": True})

    async def control(self, name: str, /, **parameters: Any) -> dict[str, Any]:
        """Ask the supervisor for an operator's call. Raises ServeError."""
        found: dict[str, Any] = await self._call(name, parameters)
        return found


def lags(due: float, now: float) -> tuple[list[float], float]:
    """Return how late each timer of every `LAG_SECONDS` is that should have run since `due`, and when the next is due.

    A block of a second has delayed ten of them: as one, it would hardly count among the many that were in time.
    """
    due = max(due, now - MOST_LAG)
    missed = max(0, math.floor((now - due) / LAG_SECONDS)) + 1
    return [max(0.0, now - due - i * LAG_SECONDS) for i in range(missed)], due + missed * LAG_SECONDS


class Link:
    """The worker's end of the supervisor's socket, and its `Meter`."""

    def __init__(self, address: str, on_state: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 100)
        self._socket.setsockopt(zmq.IDENTITY, os.urandom(8))
        self._socket.connect(address)
        self._on_state = on_state
        self._tags = itertools.count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._counts: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._spreads: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[list[int], float]] = {}
        self._observed: list[tuple[bool, str, dict[str, str], float]] = []
        self._ready = False
        #: runs while there is something to report
        self._timer: asyncio.TimerHandle | None = None
        #: requests that are being handled
        self._open = 0
        self._busy = asyncio.Event()
        #: time.monotonic() at which the first look at the event loop is due, once there are requests
        self._due = 0.0
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._drain)
        self._looking = asyncio.create_task(self._look_at_lag())
        self._flush()

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter; reported within a second."""
        key = (name, tuple(sorted(labels.items())))
        self._counts[key] = self._counts.get(key, 0.0) + amount
        self._report_later()

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add a value to a histogram; reported within a second."""
        self._observed.append((False, name, labels, value))
        self._report_later()

    def spread(self, name: str, counts: Sequence[int], total: float, **labels: str) -> None:
        """Add values to a histogram by their buckets; reported within a second."""
        key = (name, tuple(sorted(labels.items())))
        known, before = self._spreads.get(key, ([0] * len(counts), 0.0))
        self._spreads[key] = ([a + b for a, b in zip(known, counts, strict=True)], before + total)
        self._report_later()

    def watching(self, app: ASGIApp) -> ASGIApp:
        """Return `app`; the event loop's lag is measured while it handles requests."""

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            if not self._open:
                # uvloop's own time is that at which the loop's iteration began.
                self._due = (math.floor(time.monotonic() / LAG_SECONDS) + 1) * LAG_SECONDS
            self._open += 1
            self._busy.set()
            try:
                await app(scope, receive, send)
            finally:
                self._open -= 1
                if not self._open:
                    self._busy.clear()

        return watched

    def tell_ready(self) -> None:
        """Tell the supervisor that this worker answers requests for some model."""
        self._ready = True
        self._flush()

    async def call(self, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the supervisor for an operator's call. Raises ServeError."""
        tag = next(self._tags)
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._answers[tag] = answer
        self._send(link.Operator(tag, name, dict(parameters)))
        try:
            async with asyncio.timeout(30):
                return await answer
        except TimeoutError:
            raise ServeError.unavailable("supervisor", "the supervisor does not answer") from None
        finally:
            del self._answers[tag]

    async def metrics(self) -> str:
        """Return the server's metrics in Prometheus's text format."""
        self._flush()
        return str((await self.call("metrics", {}))["text"])

    def close(self) -> None:
        """Report the last metrics and close the socket."""
        self._looking.cancel()
        self._flush()
        self._loop.remove_reader(self._descriptor)
        self._socket.close()

    def _report_later(self) -> None:
        if self._timer is None and not self._socket.closed:
            self._timer = self._loop.call_later(REPORT_SECONDS, self._flush)

    async def _look_at_lag(self) -> None:
        """Measure how late timers run: whatever blocks the loop delays all streams of this worker.

        The first of them is due within `LAG_SECONDS` of the begin of a request, whose first part may be what blocks.
        """
        while True:
            await self._busy.wait()
            due, goes_on = self._due, True
            while goes_on:
                await asyncio.sleep(due - time.monotonic())
                late, due = lags(due, time.monotonic())
                for seconds in late:
                    self.observe("exl_loop_lag_seconds", seconds)
                goes_on = self._busy.is_set()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        counts = [(True, name, dict(labels), value) for (name, labels), value in self._counts.items()]
        self._counts.clear()
        observed, self._observed = self._observed, []
        spreads = [(name, dict(labels), *spread) for (name, labels), spread in self._spreads.items()]
        self._spreads.clear()
        self._send(link.Report(counts + observed, self._ready, spreads))

    def _send(self, message: link.Report | link.Operator) -> None:
        self._socket.send(link.encode(message))
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        while not self._socket.closed:
            try:
                message = link.decode_told(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except msgspec.MsgspecError:
                log.error("the supervisor sent an invalid message")
                continue
            if isinstance(message, link.State):
                self._on_state(message)
                self._flush()  # the supervisor asks whether this worker is ready
                continue
            answer = self._answers.get(message.tag)
            if answer is None or answer.done():
                continue
            if (problem := message.problem()) is None:
                answer.set_result(message.result)
            else:
                answer.set_exception(problem)
