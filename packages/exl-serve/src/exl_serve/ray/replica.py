"""An engine replica: a Ray Serve deployment of one engine process. It does not import torch."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from exl_serve.config.model import ServeConfig
from exl_serve.engine import wire
from exl_serve.engine.__main__ import EngineStart
from exl_serve.engine.client import RunningRequest, Sink
from exl_serve.engine.events import EngineEvent, Failed, Finished, Progress, Started, Tokens
from exl_serve.engine.local import LocalEngine
from exl_serve.errors import ServeError
from exl_serve.ray.autoscale import record
from exl_serve.request.internal import EngineRequest, MediaRef

__all__ = ["EngineReplica", "decode_events", "encode_events"]

log = logging.getLogger("ray.serve")

ITEM_SECONDS, ITEM_TOKENS = 0.025, 16
"""Ray's cost per streamed item is large: after the first tokens an item has what comes in so many seconds, or so many
tokens."""
LEASE_SECONDS = 10.0
"""An ingress that is silent for so long has died: its requests are cancelled."""
LABEL_SECONDS = 2.0
BATCHES = 4
"""A replica takes so many batches of requests at a time. Ray allows more calls, which are left to messages."""

_requests = msgspec.msgpack.Decoder(EngineRequest)


def encode_events(events: list[EngineEvent]) -> bytes:
    """Return an item of a stream: the engine's events, in order."""
    return wire.encode(wire.StepEvents([(0, event) for event in events]))


def decode_events(data: bytes) -> list[EngineEvent]:
    """Return the events of an item. Raises WireError."""
    message = wire.decode_to_worker(data)
    return [event for _, event in message.all()] if isinstance(message, wire.StepEvents) else []


class _Taken:
    """A request that the engine runs, and the queue of its events; None ends the queue of a cancelled request."""

    def __init__(self, running: RunningRequest, events: asyncio.Queue[EngineEvent | None]) -> None:
        self._running, self._events = running, events
        self.pause, self.resume = running.pause, running.resume

    def cancel(self) -> None:
        self._running.cancel()
        self._events.put_nowait(None)  # the engine sends no more events: the stream would wait for ever


class EngineReplica:
    """Own an engine process. Ends itself when that process ends, so that Ray starts another replica."""

    def __init__(self, config: bytes, model: str) -> None:
        from ray import serve

        self._config = msgspec.json.decode(config, type=ServeConfig)
        self._model = next(one for one in self._config.model if one.id == model)
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self._folder = tempfile.TemporaryDirectory(prefix="exl-ray-")  # 0700
        self._address = f"ipc://{self._folder.name}/engine"
        start = EngineStart(
            model=self._model,
            folder=self._folder.name,
            address=self._address,
            parent=os.getpid(),
            limits=self._config.server.limits,
            qos=self._config.qos,
        )
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "exl_serve.engine"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(start) + b"\n")
        self._process.stdin.close()
        self._wait_until_ready()
        self._engine: LocalEngine | None = None
        self._connecting = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        #: by (ingress, tag)
        self._running: dict[tuple[str, int], _Taken] = {}
        #: requests that run or are being submitted
        self._open = 0
        #: by request: prompt tokens that are not computed yet, as far as its events tell
        self._prompts: dict[object, int] = {}
        self._heard: dict[str, float] = {}
        #: by request whose prompt is not computed: its ingress and tag
        self._computing: dict[object, tuple[str, int]] = {}
        #: by ingress: highest tag of a request
        self._seen: dict[str, int] = {}
        #: of the engine's pages, and by ingress the tag up to which all prompts had been computed when they were read
        self._labels, self._settled = b"", dict[str, int]()
        self._reports = self._taken = 0

    def _wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if said["state"] == "ready":
                return
            if said["state"] == "failed":
                raise RuntimeError(f"the model {self._model.id} could not be loaded: {said['reason']}")
        raise RuntimeError(f"the engine of {self._model.id} ended while it loaded: see the log of this replica")

    async def _connected(self) -> LocalEngine:
        async with self._connecting:
            if self._engine is None:
                self._engine = await LocalEngine.connect(self._address)
                self._watching = asyncio.create_task(self._watch())
            return self._engine

    async def _watch(self) -> None:
        """End with the engine process; forget the requests of ingresses that have died; read the labels.

        The labels are read in a task of their own: an engine that has died does not answer.
        """
        asked, reading = 0.0, None
        while True:
            await asyncio.sleep(0.25)
            if self._process.poll() is not None and self._engine is not None:
                log.error("the engine process of %s has ended with %s", self._model.id, self._process.returncode)
                self._engine.fail("the engine of this replica has ended")
                await asyncio.sleep(0.25)  # the streams tell it
                os._exit(1)  # a replica without its engine would still get requests
            now = time.monotonic()
            for ingress in [name for name, heard in self._heard.items() if now - heard > LEASE_SECONDS]:
                self._keep(ingress, frozenset(), math.inf)
                del self._heard[ingress]
                self._seen.pop(ingress, None)
            if now - asked > LABEL_SECONDS and self._engine is not None and (reading is None or reading.done()):
                asked = now
                reading = asyncio.create_task(self._read_labels(self._engine))

    async def _read_labels(self, engine: LocalEngine) -> None:
        """Ask the engine for the labels of its pages."""
        settled = dict(self._seen)
        for ingress, tag in self._computing.values():
            settled[ingress] = min(settled.get(ingress, tag), tag - 1)
        try:
            self._labels = (await engine.control("labels"))["labels"]
        except ServeError as error:
            log.warning("the engine does not tell its pages: %s", error)
            return
        self._settled = settled

    # ---- calls of the ingress ------------------------------------------------------------------------------------

    async def generate(
        self,
        frame: bytes,
        *,
        ingress: str,
        tag: int,
        labels: Any = None,
        tokens: int = 0,
        avoid: Any = None,
        to: str | None = None,
    ) -> AsyncIterator[bytes]:
        """Yield a request's events.

        The first item is JSON: this replica's name, its model's digest, and whether it rejects the request. If so, the
        error follows.
        """
        engine = await self._connected()
        self._heard[ingress] = time.monotonic()
        self._seen[ingress] = max(tag, self._seen.get(ingress, 0))
        request = _requests.decode(frame)
        most = BATCHES * self._model.max_batch_size
        if self._open >= most and not request.again:
            message = f"{most} requests are open on this replica, the most that may: try again later"
            error = ServeError(429, "rate_limit_error", "queue_full", message, retry_after=1.0)
            yield self._head(engine, refused=True)
            yield wire.encode(wire.Rejected.of(tag, error))
            return
        queue: asyncio.Queue[EngineEvent | None] = asyncio.Queue()
        left = len(request.open_choices)
        taken: _Taken | None = None
        self._open += 1
        self._prompts[queue] = tokens
        self._computing[queue] = (ingress, tag)
        try:
            try:
                running = await self._submitted(engine, request, queue.put_nowait)
            except ServeError as error:
                yield self._head(engine, refused=True)
                yield wire.encode(wire.Rejected.of(tag, error))
                return
            taken = self._running[ingress, tag] = _Taken(running, queue)
            self._taken += 1
            yield self._head(engine, refused=False)
            begun = False
            while left:
                events, cancelled = await _next_events(queue, ITEM_SECONDS if begun else 0.0, ITEM_TOKENS * request.n)
                begun = begun or any(isinstance(event, Tokens) for event in events)
                left -= sum(isinstance(event, Finished | Failed) for event in events)
                for event in events:
                    self._prompts[queue] = _left_of(self._prompts[queue], event)
                    if isinstance(event, Tokens | Finished | Failed):
                        self._computing.pop(queue, None)
                if events:
                    yield encode_events(events)
                if cancelled:
                    return
        finally:
            self._open -= 1
            del self._prompts[queue]
            self._computing.pop(queue, None)
            if taken is not None:
                if self._running.get((ingress, tag)) is taken:
                    del self._running[ingress, tag]
                if left:
                    taken.cancel()

    def _head(self, engine: LocalEngine, *, refused: bool) -> bytes:
        return json.dumps({"replica": self._name, "digest": engine.card.digest, "refused": refused}).encode()

    async def _submitted(self, engine: LocalEngine, request: EngineRequest, take: Sink) -> RunningRequest:
        """Submit the request.

        Its images become files until the engine has accepted it, because one message cannot hold them. Raises
        ServeError.
        """
        paths: list[Path] = []
        media: list[MediaRef] = []
        try:
            for image in request.media:
                paths.append(Path(self._folder.name, secrets.token_hex(8)))
                await asyncio.to_thread(paths[-1].write_bytes, image.data)
                media.append(msgspec.structs.replace(image, path=str(paths[-1]), data=b""))
            return await engine.submit(msgspec.structs.replace(request, media=tuple(media)), take)
        finally:
            for path in paths:
                path.unlink(missing_ok=True)

    async def tell(self, what: str, *, ingress: str, tags: Any, to: str, upto: int = 0) -> None:
        """Cancel, pause or resume requests of an ingress. `live`: of its tags up to `upto`, it has only these.

        A request that is newer than a `live` message may arrive before it. Messages to a replica that has ended reach
        another one, which ignores them.
        """
        if to != self._name:
            return
        self._heard[ingress] = time.monotonic()
        if what == "live":
            self._keep(ingress, frozenset(tags), upto)
            return
        for tag in tags:
            running = self._running.get((ingress, tag))
            if running is not None:
                {"cancel": running.cancel, "pause": running.pause, "resume": running.resume}[what]()

    async def describe(self, *, to: str | None = None) -> dict[str, Any]:
        """Return the model's card and the engine's state as JSON, and facts of this replica.

        These are its name, the process id of its engine, and the number of requests that it has accepted.
        """
        engine = await self._connected()
        return {
            "card": wire.card_bytes(engine.card),
            "status": msgspec.json.encode(engine.status),
            "replica": self._name,
            "pid": self._process.pid,
            "taken": self._taken,
        }

    def _keep(self, ingress: str, tags: frozenset[int], upto: float) -> None:
        gone = [key for key in self._running if key[0] == ingress and key[1] not in tags and key[1] <= upto]
        for key in gone:
            self._running.pop(key).cancel()

    # ---- calls of Ray Serve --------------------------------------------------------------------------------------

    def check_health(self) -> None:
        """Raise RuntimeError once the engine process has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the engine process of {self._model.id} has ended")

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the report for `cost.Index.report`."""
        if self._engine is None:
            return {}
        status, card = self._engine.status, self._engine.card
        self._reports += 1
        running = status.decoding + status.prefilling
        return {
            "report": self._reports,
            "boot": status.boot,
            "running": running,
            # The engine writes its state from time to time; what has arrived since counts as queued.
            "queued": max(status.queued, self._open - running),
            "seen": dict(self._seen),
            "settled": self._settled,
            "queued_tokens": max(status.queued_prompt_tokens, sum(self._prompts.values())),
            "batch": card.max_batch_size,
            "prefill_rate": status.prefill_rate,
            "labels": self._labels,
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the report for `autoscale.policy`."""
        calm = self._config.ray.calm_seconds
        if self._engine is None:
            return {"exl_prompt_load": 0.0, "exl_batch_load": 0.0, "exl_page_load": 0.0, "exl_calm_seconds": calm}
        card, status = self._engine.card, self._engine.status
        pages = card.cache_tokens // card.page_size
        return record(status, card.max_batch_size, pages, self._config.qos.target_ttft, calm)

    def __del__(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._folder.cleanup()


async def _next_events(
    queue: asyncio.Queue[EngineEvent | None], seconds: float, tokens: int
) -> tuple[list[EngineEvent], bool]:
    """Return (events of the next item, whether the request was cancelled).

    An item has the events of so many seconds after its first event, or of so many tokens; at most those up to the end
    of a completion.
    """
    events: list[EngineEvent] = []
    end = math.inf
    while True:
        try:
            if not queue.empty():
                event = queue.get_nowait()
            elif not events:
                event = await queue.get()
            elif isinstance(events[-1], Finished | Failed) or (rest := end - time.monotonic()) <= 0:
                return events, False
            else:
                async with asyncio.timeout(rest):
                    event = await queue.get()
        except TimeoutError:
            return events, False
        if event is None:
            return events, True
        if not events:
            end = time.monotonic() + seconds
        events.append(event)
        if sum(len(one.ids) for one in events if isinstance(one, Tokens)) >= tokens:
            return events, False


def _left_of(tokens: int, event: EngineEvent) -> int:
    """Return the prompt tokens of a request that are not computed after `event`, from those before it."""
    if isinstance(event, Started):
        return min(tokens, event.prompt_tokens - event.cached_tokens)
    if isinstance(event, Progress):
        return min(tokens, event.total - event.done)
    return 0
