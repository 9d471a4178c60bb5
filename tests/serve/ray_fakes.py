"""Engines, replicas and responses of Ray for tests without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from exl_serve.config.model import ModelConfig
from exl_serve.engine.events import Usage
from exl_serve.errors import ServeError
from exl_serve.ray.replica import EngineReplica
from exl_serve.request.internal import EngineRequest, MediaRef, Sampling

USAGE = Usage(prompt_tokens=3, completion_tokens=4)


CARD: Any = SimpleNamespace(digest="d", namespace=b"n" * 16, page_size=256)
"""The description of an engine that is not there."""


class Answer:
    """The response of a call as Ray gives it: a stream that can be cancelled, which may be lost. Cancelling a stream
    that broke before its first item raises its error again."""

    def __init__(self, items: AsyncIterator[bytes]) -> None:
        self._items = items
        self.cancelled = self._begun = False
        self._error: Exception | None = None

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            item = await anext(self._items)
        except RuntimeError as error:
            self._error = error
            raise
        self._begun = True
        return item

    def cancel(self) -> None:
        self.cancelled = True
        if self._error is not None and not self._begun:
            raise self._error


class FakeEngine:
    """Takes every request, and generates nothing until a test lets it."""

    card = SimpleNamespace(digest="d", max_batch_size=1)
    #: as the engine wrote it before any request came
    status = SimpleNamespace(boot=b"b", decoding=0, prefilling=0, queued=0, queued_prompt_tokens=0, prefill_rate=1.0)

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []
        self.sinks: list[Any] = []
        self.images: list[bytes] = []
        self.rejection: ServeError | None = None
        self.cancelled = 0

    async def submit(self, request: EngineRequest, sink: Any) -> Any:
        self.requests.append(request)
        if self.rejection is not None:
            raise self.rejection
        self.sinks.append(sink)
        self.images += [Path(image.path).read_bytes() for image in request.media]
        return SimpleNamespace(cancel=self.cancel, pause=lambda: None, resume=lambda: None)

    def cancel(self) -> None:
        self.cancelled += 1


class StartedReplica(EngineReplica):
    """A replica whose engine process is there already."""

    def __init__(self, engine: Any, folder: Path, name: str = "here") -> None:
        self._model, self._name, self._engine = ModelConfig(id="m", path="m", max_batch_size=1), name, engine
        self._connecting, self._running, self._heard, self._seen = asyncio.Lock(), {}, {}, {}
        self._open = self._taken = self._reports = 0
        self._prompts, self._computing, self._labels, self._settled = {}, {}, b"", {}
        self._folder = SimpleNamespace(name=str(folder), cleanup=lambda: None)  # type: ignore[assignment]
        self._process = SimpleNamespace(poll=lambda: 0)  # type: ignore[assignment]

    @property
    def open(self) -> int:
        """Requests that it holds."""
        return self._open


def frame(*media: MediaRef) -> bytes:
    request = EngineRequest(id="r", prompt=b"", sampling=Sampling(), seeds=(1,), max_tokens=1, media=media)
    return msgspec.msgpack.encode(request)
