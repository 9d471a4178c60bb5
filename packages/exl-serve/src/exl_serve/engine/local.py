"""Clients of an engine on this machine, over ZeroMQ, on an asyncio event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import zmq

from exl_serve.engine import wire
from exl_serve.engine.admission import SPARE_JOBS, queue_full, queue_limit
from exl_serve.engine.client import EngineStatus, ModelCard, Sink
from exl_serve.engine.events import EngineEvent, Failed, Finished, Progress, Started
from exl_serve.engine.status import HalfWrittenError, StatusReader
from exl_serve.errors import ServeError
from exl_serve.request.internal import EngineRequest

__all__ = ["SILENT", "LocalEngine"]

log = logging.getLogger(__name__)

BROKEN = "the server failed on this request; see its log for more"
CONNECT_SECONDS = 30.0
GONE = "the engine process has ended; it is being restarted: try again"
SILENT = "the engine heard nothing of this worker for too long: try again"
"""The message of `engine_restarting` where the engine lives, and has dropped its worker."""


class ForgottenError(ServeError):
    """The engine has not read a request, since it took its worker for dead."""


class _Running:
    """A request that the engine has accepted."""

    __slots__ = ("_engine", "open", "sink", "tag")

    def __init__(self, engine: LocalEngine, tag: int, sink: Sink, choices: tuple[int, ...]) -> None:
        self._engine, self.tag = engine, tag
        self.sink = sink
        #: completions that have not ended
        self.open = set(choices)

    def cancel(self) -> None:
        self._engine.forget(self.tag, wire.Cancel(self.tag))

    def pause(self) -> None:
        self._engine.send_if_running(self.tag, wire.Pause(self.tag))

    def resume(self) -> None:
        self._engine.send_if_running(self.tag, wire.Resume(self.tag))


class LocalEngine:
    """The client of one engine process, or of one engine thread at an `inproc://` address. Use `connect`.

    One that is dropped without `close` disconnects when it is collected: the event loop holds no reference to it.
    """

    def __init__(self, address: str, context: zmq.Context[Any] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = (context or zmq.Context.instance()).socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.IDENTITY, os.urandom(8))
        self._socket.connect(address)
        self._tags = itertools.count(1)
        self._running: dict[int, _Running] = {}
        #: tags of running requests of which no token has come
        self._unheard: set[int] = set()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._waiting: dict[int, tuple[Sink, tuple[int, ...]]] = {}
        #: of each Hello, in order: the engine answers each with one Welcome
        self._welcomes: deque[asyncio.Future[wire.Welcome]] = deque()
        self._card: ModelCard | None = None
        self._status: StatusReader | None = None
        self._closed = False
        #: while this worker announces itself to an engine that forgot it
        self._known_again: asyncio.Future[None] | None = None
        self._loop.add_reader(self._socket.getsockopt(zmq.FD), _drain, weakref.ref(self))
        # It holds the socket, and so the socket's context: one that is collected together with open sockets would wait
        # for them for ever.
        self._release = weakref.finalize(self, _release, self._loop, self._socket)
        self._pinging: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, address: str, context: zmq.Context[Any] | None = None) -> LocalEngine:
        """Connect to an engine. Raises ServeError 503 when no engine answers."""
        engine = cls(address, context)
        try:
            await engine._open()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _open(self) -> None:
        """Announce this worker, and open the engine's status page. Raises ServeError 503."""
        try:
            welcome = await asyncio.wait_for(self._say_hello(), CONNECT_SECONDS)
        except TimeoutError:
            raise ServeError.unavailable("engine_restarting", "the engine does not answer: try again") from None
        if welcome.version != wire.VERSION:
            raise ServeError.unavailable(
                "engine_version",
                f"the engine speaks version {welcome.version} of the protocol, this worker {wire.VERSION}: restart all",
            )
        self._card = wire.card_of(welcome.card)
        try:
            self._status = StatusReader(Path(welcome.status_path))
        except OSError:  # it has removed its page, and ends
            raise ServeError.unavailable("engine_restarting", GONE) from None
        self._pinging = asyncio.create_task(_ping(weakref.ref(self)))

    @property
    def card(self) -> ModelCard:
        """The description of the model."""
        if self._card is None:
            raise RuntimeError("the engine is not connected: use LocalEngine.connect")
        return self._card

    @property
    def status(self) -> EngineStatus:
        """The engine's state, read from its status page. Raises ServeError 503 if the engine died while it wrote."""
        if self._status is None:
            raise RuntimeError("the engine is not connected: use LocalEngine.connect")
        try:
            return self._status.read()
        except HalfWrittenError:
            raise ServeError.unavailable("engine_restarting", GONE) from None

    def check_room(self, most: int | None) -> None:
        """Raise ServeError 429 where the status page shows a full queue. `most`: requests that may wait."""
        status = self.status
        # The page counts the jobs in the generator's own queue as well.
        if status.queued >= queue_limit(most, self.card.max_batch_size) + SPARE_JOBS:
            wait = status.queued_prompt_tokens / status.prefill_rate if status.prefill_rate > 0 else 0.0
            raise queue_full(f"{status.queued} requests wait", wait)

    async def submit(self, request: EngineRequest, sink: Sink) -> _Running:
        """Queue a request; returns when the engine has accepted it. Raises ServeError.

        This worker announces itself to an engine that took it for dead, and asks once more.
        """
        try:
            return await self._submit(request, sink)
        except ForgottenError:
            known = self._known_again
        if known is not None:  # else it is known again already
            try:
                await asyncio.wait_for(asyncio.shield(known), CONNECT_SECONDS)
            except TimeoutError:
                raise ServeError.unavailable("engine_restarting", GONE) from None
        return await self._submit(request, sink)

    async def _submit(self, request: EngineRequest, sink: Sink) -> _Running:
        self._check_open()
        tag = next(self._tags)
        taken = self._answers[tag] = self._loop.create_future()
        self._waiting[tag] = (sink, request.open_choices)
        try:
            self._send(wire.Submit(tag, request))
            running: _Running = await taken
        except asyncio.CancelledError:
            self._waiting.pop(tag, None)
            self.forget(tag, wire.Cancel(tag), always=True)
            raise
        finally:
            self._answers.pop(tag, None)
            self._waiting.pop(tag, None)
            del taken  # its error would refer to this frame, and this frame to it
        return running

    async def control(self, name: str, /, **parameters: Any) -> dict[str, Any]:
        """Run an operator's call. Raises ServeError."""
        self._check_open()
        tag = next(self._tags)
        answered = self._answers[tag] = self._loop.create_future()
        try:
            self._send(wire.Call(tag, name, parameters))
            found: dict[str, Any] = await answered
        finally:
            self._answers.pop(tag, None)
        if name in ("load_adapter", "unload_adapter", "unload_adapters"):
            await self._refresh_card()
        return found

    async def close(self) -> None:
        """Cancel all running requests, and disconnect."""
        if self._closed:
            return
        self.fail(GONE)
        self._send(wire.Goodbye())
        self._closed = True
        if self._pinging is not None:
            self._pinging.cancel()
        self._release.detach()
        self._loop.remove_reader(self._socket.getsockopt(zmq.FD))
        self._socket.close()
        if self._status is not None:
            self._status.close()

    def fail(self, message: str) -> None:
        """End every running request with an error: the engine has ended."""
        self._end_running(message)
        for waiting in (*self._answers.values(), *self._welcomes, self._known_again):
            if waiting is not None and not waiting.done():
                waiting.set_exception(ServeError.unavailable("engine_restarting", message))
                waiting.exception()  # a Hello may have nobody that waits for its answer

    def forget(self, tag: int, message: wire.ToEngine, *, always: bool = False) -> None:
        """Send the engine a message, and drop further events of this request."""
        if self._running.pop(tag, None) is not None or always:
            self._send(message)

    def send_if_running(self, tag: int, message: wire.ToEngine) -> None:
        """Send a message about a request unless it has ended."""
        if tag in self._running:
            self._send(message)

    async def _refresh_card(self) -> None:
        self._check_open()
        self._card = wire.card_of((await self._say_hello()).card)

    def _say_hello(self) -> asyncio.Future[wire.Welcome]:
        """Announce this worker; returns the engine's answer."""
        welcome = self._loop.create_future()
        self._welcomes.append(welcome)
        self._send(wire.Hello(wire.VERSION, f"pid {os.getpid()}"))
        return welcome

    def _forgotten(self) -> None:
        """The engine has dropped this worker after a long silence, and with it all its requests.

        It rejects each message until it reads the Hello.
        """
        if self._known_again is not None:
            return
        self._known_again = self._loop.create_future()
        self._end_running(SILENT)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ForgottenError(503, "server_error", "engine_restarting", SILENT, retry_after=1.0))
        self._say_hello()

    def _end_running(self, message: str) -> None:
        running, self._running = self._running, {}
        for one in running.values():
            for choice in sorted(one.open):
                _deliver(one, Failed(choice, 503, "server_error", "engine_restarting", message))

    def _break_off(self, tag: int, one: _Running, choice: int) -> None:
        """End a request whose sink could not take an event of this choice."""
        self.forget(tag, wire.Cancel(tag))
        for number in sorted(one.open | {choice}):
            _deliver(one, Failed(number, 500, "server_error", "engine_error", BROKEN))

    def _check_open(self) -> None:
        if self._closed:
            raise ServeError.unavailable("engine_restarting", GONE)

    def _send(self, message: wire.ToEngine) -> None:
        if self._closed:
            return
        try:
            data = wire.encode(message)
        except wire.WireError as error:
            raise ServeError(413, "invalid_request_error", "body_too_large", str(error)) from error
        self._socket.send(data)
        # The descriptor reports changes only: a message that came during the send would be found with the next change.
        if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._loop.call_soon(_drain, weakref.ref(self))

    def _drain(self) -> None:
        """Read all messages that have arrived."""
        while not self._closed:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(wire.decode_to_worker(data))
            except wire.WireError as error:
                log.error("the engine sent %s", error)

    def _first_tokens_first(self, message: wire.StepEvents) -> list[tuple[int, EngineEvent]]:
        """Return a step's events, first those of requests that have had no token.

        Answers are written in this order. A client that waits for its first token does not wait until the step's tokens
        of all others have been written.
        """
        found = list(message.all())
        if unheard := self._unheard:
            found.sort(key=lambda one: one[0] not in unheard)
            heard = {tag for tag, event in found if not isinstance(event, Started | Progress)}
            self._unheard = (unheard - heard) & self._running.keys()
        return found

    def _take(self, message: wire.ToWorker) -> None:
        if isinstance(message, wire.StepEvents):
            running = self._running
            for tag, event in self._first_tokens_first(message):
                one = running.get(tag)
                if one is None:
                    continue
                if isinstance(event, Finished | Failed):
                    one.open.discard(event.choice)
                    if not one.open:
                        del running[tag]
                if not _deliver(one, event):
                    self._break_off(tag, one, event.choice)
            return
        if isinstance(message, wire.Welcome):
            if self._known_again is not None:
                self._card = wire.card_of(message.card)
                if not self._known_again.done():
                    self._known_again.set_result(None)
                self._known_again = None
            if self._welcomes and not (welcome := self._welcomes.popleft()).done():
                welcome.set_result(message)
            return
        if isinstance(message, wire.Rejected) and message.code == "engine_restarting":
            self._forgotten()
            return
        answer = self._answers.get(message.tag)
        if isinstance(message, wire.Accepted):
            waiting = self._waiting.get(message.tag)
            if waiting is None or answer is None or answer.done():
                self._send(wire.Cancel(message.tag))  # the request was cancelled meanwhile
                return
            running_one = _Running(self, message.tag, *waiting)
            # Here, not when the waiting task runs: events may follow in the same batch of messages.
            self._running[message.tag] = running_one
            self._unheard.add(message.tag)
            answer.set_result(running_one)
        elif answer is not None and not answer.done():
            if isinstance(message, wire.Rejected):
                answer.set_exception(message.error())
            else:
                answer.set_result(message.result)


async def _ping(engine: weakref.ref[LocalEngine]) -> None:
    while True:
        await asyncio.sleep(wire.PING_SECONDS)
        if (one := engine()) is None:
            return
        one._send(wire.Ping())
        del one


def _deliver(one: _Running, event: EngineEvent) -> bool:
    """Hand an event to a request's sink; returns whether it took it. Its failure is that of its request alone: other
    requests have events in the same message.
    """
    try:
        one.sink(event)
    except Exception:
        log.exception("an event of request %d could not be passed on", one.tag)
        return False
    return True


def _drain(engine: weakref.ref[LocalEngine]) -> None:
    if (one := engine()) is not None:
        one._drain()


def _release(loop: asyncio.AbstractEventLoop, socket: zmq.Socket[Any]) -> None:
    """Close the socket of an engine that was dropped, on its event loop if that runs: the collection may be on another
    thread.
    """

    def close() -> None:
        if not loop.is_closed():
            loop.remove_reader(int(socket.getsockopt(zmq.FD)))
        socket.close(0)

    try:
        loop.call_soon_threadsafe(close)
    except RuntimeError:  # the loop is closed
        close()
