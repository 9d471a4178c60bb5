"""An `EngineClient` over the handle of an engine deployment: many replicas appear as one engine."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import json
import logging
import time
from pathlib import Path
from typing import Any, Self

import msgspec

from exl_serve.engine import wire
from exl_serve.engine.client import EngineStatus, ModelCard, Sink
from exl_serve.engine.events import EngineEvent, Failed
from exl_serve.engine.local import SILENT
from exl_serve.errors import ServeError
from exl_serve.ray.quarantine import Quarantine
from exl_serve.ray.replica import decode_events
from exl_serve.ray.resume import Completion
from exl_serve.request.internal import EngineRequest
from exl_serve.request.labels import page_labels, salted

__all__ = ["RayEngine"]

log = logging.getLogger("ray.serve")

DEATHS = 2
"""A request is not tried again after so many of its replicas have died: the request may cause it."""
TRIES = 3
"""Most replicas that may reject a request for their own state, or serve another model or version."""
DROPS = 8
"""Most times that replicas may drop a request which they run: each takes the ingress for dead, as where a busy machine
lets it wait for longer than the lease."""
PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds before a dropped request is sent again: the first pause, which doubles with each drop, and the longest."""
ELSEWHERE = ("queue_full", "draining", "engine_version")
RESUMING = ("resume_refused", "engine_error", "filter_dead_end")
"""Errors of a resumed completion before its first event that mean: this replica would have given another answer."""
POISON = "two replicas ended while they ran this request"
LEASE_PERIOD, STATUS_PERIOD = 1.0, 2.0
DIVERGED = "the replica that ran this request has ended, and another one gives another answer: try again"
MIXED = "the replicas serve different models or versions"
BROKEN = "the server failed on this request; see its log for more"
DROPPED = "the server was too busy to keep this request running: try again"
ENDED = "the replica that ran this request has ended: try again"
GONE = "the replica that ran this request has ended, and the request could not be finished on another: try again"


def pause_after(drops: int) -> float:
    """Return the seconds before a request is sent again that was dropped so many times."""
    return float(min(PAUSE * 2 ** (drops - 1), LONGEST_PAUSE))


def _called(method: Any, *given: Any, **named: Any) -> Any:
    """Call a handle's method in a new context.

    Calls in the context of an HTTP request share its id, by which Ray's router identifies requests. Of two that wait at
    once, it would forget one.
    """
    return contextvars.Context().run(lambda: method.remote(*given, **named))


def _rejection(data: bytes) -> ServeError:
    """Return the error of a message `Rejected`. Another message is one of another version."""
    try:
        message = wire.decode_to_worker(data)
    except wire.WireError:
        message = None
    return message.error() if isinstance(message, wire.Rejected) else ServeError.unavailable("engine_version", MIXED)


class _DivergedError(ServeError):
    """The replica cannot continue after the ids that the client has."""

    def __init__(self) -> None:
        super().__init__(503, "server_error", "engine_restarting", DIVERGED, retry_after=1.0)


class _Call:
    """One request, on whichever replica runs it. Each attempt has its own tag."""

    def __init__(self, engine: RayEngine, request: EngineRequest, sink: Sink) -> None:
        self._engine, self._request, self._sink = engine, request, sink
        self.tag = 0
        self._choices = [Completion() for _ in range(request.n)]
        self._labels = engine.labels(request)
        self._dead: list[str] = []
        #: whether the present replica has accepted the request, and how many ended after they had
        self._runs, self._ended = False, 0
        #: whether a replica that ended may have run other requests, and whether one had this request alone
        self._shares, self._alone = False, False
        #: whether the last stream broke, and how many ended without an error before the request did
        self._broke, self._drops = False, 0
        self._stream: Any = None
        self._task: asyncio.Task[None] | None = None
        self._paused = self._cancelled = self._resumed = self._accepted = False
        self.replica = ""

    async def start(self) -> None:
        """Return once a replica has accepted the request. Raises ServeError."""
        first = await self._open()
        self._task = asyncio.create_task(self._run(first))

    async def _open(self) -> Any:
        """Return the stream of a replica that has accepted the request. Raises ServeError."""
        rejected: list[str] = []
        while True:
            avoid = [name for name in (*self._dead, *rejected) if name]
            try:
                return await self._ask(avoid)
            except _DivergedError:
                raise
            except ServeError as error:
                if error.code == "engine_restarting":
                    self._died()
                    continue
                rejected.append(self.replica)
                if error.code not in ELSEWHERE or self.replica in avoid or len(rejected) >= TRIES:
                    raise
            except Exception as error:  # Ray has many for an actor that has died
                log.info("request %s is asked for again: %s", self._request.id, type(error).__name__)
                self._died()

    def _died(self) -> None:
        """Note that the replica has ended; its name is empty if it had not answered. Raises ServeError at `DEATHS`."""
        self._abandon()  # a broken stream does not prove that the replica has ended
        self._dead.append(self.replica)
        self._ended += self._runs
        shared = self._others()
        self._alone |= self._runs and not shared
        if len(self._dead) >= DEATHS:
            # A replica that ended before it had the request, or with others on it, is no sign against the request.
            if self._ended >= DEATHS and self._alone:
                log.error("request %s is in quarantine: %s", self._request.id, POISON)
                self._engine.quarantine.add(self._request)
            raise ServeError.engine(POISON)

    def _others(self) -> bool:
        """Return whether this ingress may have other requests on the replica that ended, and mark those.

        They find out later, when this request may be elsewhere. A request that has no answer yet may be on any replica.
        """
        here = ("", self.replica)
        others = [call for call in self._engine.calls.values() if call is not self]
        if self.replica:
            others = [call for call in others if call.replica in here]
        for call in others:
            call._shares = True
        return self._shares or bool(others)

    async def _dropped(self) -> None:
        """Wait, after the replica has ended the stream and lives: it is busy. Raises ServeError after `DROPS`."""
        self._abandon()
        self._drops += 1
        if self._drops > DROPS:
            raise ServeError.unavailable("engine_restarting", DROPPED)
        await asyncio.sleep(pause_after(self._drops))

    async def _ask(self, avoid: list[str]) -> Any:
        """Return the stream of the replica that Ray's router chooses, once it has accepted. Raises as `_open`, or an
        error of Ray.
        """
        engine = self._engine
        if self._cancelled:
            raise ServeError(409, "conflict", "cancelled", "the request was cancelled")
        self.replica, self._runs, self._shares = "", False, False
        engine.retag(self)
        request = self._continuation()
        self._resumed = bool(request.resume)
        self._stream = stream = _called(
            engine.handle.options(stream=True).generate,
            msgspec.msgpack.encode(request),
            ingress=engine.name,
            tag=self.tag,
            labels=self._labels,
            tokens=len(self._request.prompt) // 4,
            avoid=avoid,
        )
        try:
            head = await anext(stream)
        except StopAsyncIteration:
            raise ServeError.unavailable("engine_restarting", GONE) from None
        said = json.loads(head)
        self.replica = said["replica"]
        if said["digest"] != engine.card.digest:
            self._abandon()
            raise ServeError.unavailable("engine_version", MIXED)
        if said.get("refused", False):  # older versions raise the error of a rejection
            error = _rejection(await anext(stream))
            raise _DivergedError() if self._resumed and error.code in RESUMING else error
        self._accepted = self._runs = True
        return stream

    def _continuation(self) -> EngineRequest:
        """Return the request, to continue after the part that the client has received."""
        over = tuple(number for number, choice in enumerate(self._choices) if choice.ended)
        resume = tuple(b"" if choice.ended else choice.ids for choice in self._choices)
        return msgspec.structs.replace(
            self._request, resume=resume if any(resume) else (), over=over, again=self._accepted
        )

    async def _run(self, stream: Any) -> None:
        try:
            while not await self._relay(stream) and not self._cancelled:
                if self._broke:
                    self._died()
                else:
                    await self._dropped()
                if not self._engine.resumes and any(choice.ids for choice in self._choices):
                    raise ServeError.unavailable("engine_restarting", ENDED)
                how = "has ended" if self._broke else "dropped it"
                log.warning("replica %s %s: request %s is sent again", self.replica, how, self._request.id)
                stream = await self._open()
                if self._paused:
                    self._tell("pause")
        except ServeError as error:
            self._fail(error.code, error.status, error.message)
        except Exception:
            log.exception("request %s could not be finished", self._request.id)
            self._abandon()
            self._fail("engine_error", 500, BROKEN)
        finally:
            self._engine.calls.pop(self.tag, None)

    async def _relay(self, stream: Any) -> bool:
        """Pass on a stream's events. Returns False if it ended before them; `_broke` tells whether its replica did.

        Raises the errors of decoding an item and of the sink: another replica would not help.
        """
        begun: set[int] = set()
        self._broke = False
        while (item := await self._next(stream)) is not None:
            for event in decode_events(item):
                if isinstance(event, Failed) and event.code == "engine_restarting":
                    self._broke = event.message != SILENT  # a silent replica is busy, and has not ended
                    return False
                if isinstance(event, Failed) and self._has_diverged(event, event.choice in begun):
                    event = Failed(event.choice, 503, "server_error", "engine_restarting", DIVERGED)
                begun.add(event.choice)
                self._take(event)
        return all(choice.ended for choice in self._choices)

    def _has_diverged(self, event: Failed, begun: bool) -> bool:
        return self._resumed and (event.code == "resume_refused" or (not begun and event.code in RESUMING))

    async def _next(self, stream: Any) -> bytes | None:
        """Return the next item of a stream, or None after its end or break."""
        try:
            item: bytes = await anext(stream)
        except StopAsyncIteration:
            return None
        except Exception as error:  # Ray has many for an actor that has died
            log.info("the stream of request %s broke: %s", self._request.id, type(error).__name__)
            self._broke = True
            return None
        return item

    def _take(self, event: EngineEvent) -> None:
        new = self._choices[event.choice].feed(event)
        if new is not None and not self._cancelled:
            self._sink(new)

    def _fail(self, code: str, status: int, message: str) -> None:
        for number, choice in enumerate(self._choices):
            if not choice.ended:
                choice.ended = True
                self._sink(Failed(number, status, "server_error", code, message))

    def _abandon(self) -> None:
        """End the current attempt on its replica, if that still runs it."""
        self._tell("cancel")  # Ray loses some cancellations, most of all early ones
        if self._stream is None:
            return
        try:
            self._stream.cancel()
        except Exception as error:  # Ray raises the error of a call that no replica has got
            log.info("request %s had ended already: %s", self._request.id, type(error).__name__)

    def _tell(self, what: str) -> None:
        if self.replica:
            self._engine.tell(what, [self.tag], self.replica)

    def cancel(self) -> None:
        if self._cancelled:
            return
        self._cancelled = True
        live = self._engine.calls.pop(self.tag, None) is not None
        if live and not all(choice.ended for choice in self._choices):
            self._abandon()
        if self._task is not None:
            self._task.cancel()

    def pause(self) -> None:
        self._paused = True
        self._tell("pause")

    def resume(self) -> None:
        self._paused = False
        self._tell("resume")


class RayEngine:
    """The client of one model on the replicas of its deployment. Use `connect`, or give the `card` of a model that is
    known already.
    """

    def __init__(self, handle: Any, name: str, card: ModelCard | None = None, *, resumes: bool = True) -> None:
        #: of the engine deployment
        self.handle = handle
        #: of this ingress
        self.name = name
        #: whether a stream continues elsewhere after what its client has received
        self.resumes = resumes
        self.calls: dict[int, _Call] = {}
        self.quarantine = Quarantine()
        self._tags = itertools.count(1)
        self._last = 0
        self._card = card
        self._status: EngineStatus | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    @classmethod
    async def connect(cls, handle: Any, name: str, *, resumes: bool = True) -> Self:
        """Connect, and wait for a replica that is ready."""
        engine = cls(handle, name, resumes=resumes)
        await engine._look()
        engine._keep(asyncio.create_task(engine._lease()))
        return engine

    @property
    def card(self) -> ModelCard:
        """The description of the model."""
        if self._card is None:
            raise RuntimeError("the engine is not connected: use RayEngine.connect")
        return self._card

    @property
    def status(self) -> EngineStatus:
        """The recent state of one replica.

        Its clock is another machine's, so the times of its steps are zero and it never counts as hung.
        """
        if self._status is None:
            raise RuntimeError("the engine is not connected: use RayEngine.connect")
        return self._status

    def check_room(self, most: int | None) -> None:
        """Do nothing: a replica whose queue is full may have neighbours with room."""

    async def submit(self, request: EngineRequest, sink: Sink) -> _Call:
        """Queue a request; returns when a replica has accepted it. Raises ServeError."""
        if self._closed:
            raise ServeError.unavailable("engine_restarting", GONE)
        self.quarantine.check(request)
        if request.media:
            media = []
            for one in request.media:
                data = one.data or await asyncio.to_thread(Path(one.path).read_bytes)
                media.append(msgspec.structs.replace(one, path="", data=data))
            request = msgspec.structs.replace(request, media=tuple(media))
        call = _Call(self, request, sink)
        try:
            await call.start()
        except ServeError:
            self.calls.pop(call.tag, None)
            raise
        except asyncio.CancelledError:
            call.cancel()
            raise
        except Exception as error:
            self.calls.pop(call.tag, None)
            log.warning("request %s was not taken: %s", request.id, type(error).__name__)
            raise ServeError.unavailable("engine_restarting", GONE) from error
        return call

    async def control(self, name: str, /, **parameters: Any) -> dict[str, Any]:
        """Run an operator's call: adapters, requests, cancel. Raises ServeError 501 for others."""
        if name == "adapters":
            return {"adapters": dict.fromkeys(self.card.adapters, 1.0)}  # those of the configuration
        if name == "requests":
            return {"requests": [{"id": call._request.id, "key": call._request.key} for call in self.calls.values()]}
        if name == "cancel":
            found = [call for call in self.calls.values() if call._request.id.partition("/")[0] == parameters["id"]]
            found = [call for call in found if parameters.get("key") in (None, call._request.key)]
            for call in found:
                call.cancel()  # first: a request whose completions have all ended is not cancelled on its replica
                call._fail("cancelled", 409, "the request was cancelled")
            return {"cancelled": bool(found)}
        raise ServeError(
            501, "not_implemented", "unsupported", f"{name} is not offered on Ray: write it into the configuration"
        )

    async def close(self) -> None:
        """Cancel all running requests."""
        self._closed = True
        for call in list(self.calls.values()):
            call.cancel()
        for task in list(self._tasks):
            task.cancel()

    def labels(self, request: EngineRequest) -> list[tuple[int, bytes]]:
        """Return the labels of its prompt's pages."""
        card = self.card
        return page_labels(salted(card.namespace, request.cache_salt, request.adapter), request.prompt, card.page_size)

    def retag(self, call: _Call) -> None:
        """Give a call the next tag, so that its attempts are told apart."""
        self.calls.pop(call.tag, None)
        self._last = call.tag = next(self._tags)
        self.calls[call.tag] = call

    def tell(self, what: str, tags: list[int], replica: str, upto: int = 0) -> None:
        """Send a message to one replica, without waiting."""
        self._keep(asyncio.create_task(self._told(what, tags, replica, upto)))

    async def _told(self, what: str, tags: list[int], replica: str, upto: int) -> None:
        try:
            await _called(self.handle.tell, what, ingress=self.name, tags=tags, to=replica, upto=upto)
        except Exception as error:  # the replica has ended, or will find out by the lease
            log.info("replica %s was not told to %s: %s", replica, what, type(error).__name__)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _lease(self) -> None:
        """Send the replicas this ingress's running requests, once a second, also when there are none left."""
        before: set[str] = set()
        looked = time.monotonic()
        while True:
            await asyncio.sleep(LEASE_PERIOD)
            # All tags to each: a replica that has just accepted a request may not be known yet as its replica.
            here = {call.replica for call in self.calls.values() if call.replica}
            for replica in before | here:
                self.tell("live", list(self.calls), replica, self._last)
            before = here
            if time.monotonic() - looked >= STATUS_PERIOD:
                looked = time.monotonic()
                try:
                    async with asyncio.timeout(5):
                        await self._look()
                except Exception as error:
                    log.info("no replica tells its state: %s", type(error).__name__)

    async def _look(self) -> None:
        said = await _called(self.handle.describe)
        if self._card is None:
            self._card = wire.card_of(said["card"])
        found = msgspec.json.decode(said["status"], type=EngineStatus)
        self._status = msgspec.structs.replace(found, began=0.0, ended=0.0)
