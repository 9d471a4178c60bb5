"""The interface between the API and engines: an engine process here, one in this process, or a Ray replica.

The same conformance tests run against each implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec

from exl_serve.engine.events import EngineEvent
from exl_serve.request.internal import EngineRequest

__all__ = ["EngineClient", "EngineStatus", "ModelCard", "RunningRequest", "Sink"]

Sink = Callable[[EngineEvent], None]
"""Receives a request's events, on the event loop's thread, in order; must not block or raise."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a model that an engine sends to a connecting client."""

    id: str
    #: the model's folder; never told to clients
    folder: str
    max_seq_len: int
    max_batch_size: int
    cache_tokens: int
    vocab_size: int
    #: token ids that end an answer
    eos_ids: tuple[int, ...]
    #: hexadecimal digest of weights, quantization, cache format and engine version: equal digests, equal tokens
    digest: str
    quantization: str = ""
    cache_format: str = "fp16"
    modalities: tuple[str, ...] = ("text",)
    #: the folder's time, seconds since the epoch
    created: int = 0
    #: of generation_config.json, by the names of `Sampling`
    sampling_defaults: dict[str, Any] = {}
    #: loaded adapters by name
    adapters: tuple[str, ...] = ()
    page_size: int = 256
    #: root of the page labels of a request without adapter and salt
    namespace: bytes = b""


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine at one moment, as in its status page. Times are of `time.monotonic`."""

    boot: bytes
    state: Literal["loading", "warming", "ready", "draining", "failed"]
    #: number of steps so far. Its name in messages is older: replicas of two versions read each other's status
    step: int = msgspec.field(name="round")
    #: begin and end of the last step; inside a step if `began > ended`
    began: float
    ended: float
    decoding: int
    prefilling: int
    queued: int
    #: not computed yet: of queued requests, and of those that have begun
    queued_prompt_tokens: int
    pages_pinned: int
    pages_cached: int
    pages_free: int
    #: tokens per second, running averages; 0 where nothing was measured yet
    prefill_rate: float
    decode_rate: float
    #: seconds in all steps so far
    step_seconds: float = 0.0
    #: completions that gave up their pages for others and began again
    preemptions: int = 0
    #: tokens of a page
    page_size: int = 0


class RunningRequest(Protocol):
    """A request that an engine has accepted. All methods return at once; they may be called repeatedly, also after the
    end.
    """

    def cancel(self) -> None:
        """End the request.

        Events may still come for two steps, then none: a cancelled completion has no last event.
        """

    def pause(self) -> None:
        """Generate nothing until `resume`; pages are kept."""

    def resume(self) -> None:
        """Continue after `pause`."""


class EngineClient(Protocol):
    """One loaded model."""

    @property
    def card(self) -> ModelCard:
        """The description of the model."""

    @property
    def status(self) -> EngineStatus:
        """The engine's state, read without asking the engine. Raises `ServeError` 503 if it ended in the middle of a
        write.
        """

    def check_room(self, most: int | None) -> None:
        """Raise `ServeError` 429 where the queue is known to be full without asking the engine.

        `most`: requests that may wait; None: 8 times the batch size. The engine itself decides about all others.
        """

    async def submit(self, request: EngineRequest, sink: Sink) -> RunningRequest:
        """Queue a request. Returns when the engine has accepted it, before its first event reaches `sink`.

        Raises `ServeError` if it is rejected: 400 for a request that can never run (constraints that do not compile, a
        prompt that does not fit), 408 for a deadline that cannot be met, 429 with `retry_after` for a full queue, 503
        while the engine does not run.
        """

    async def control(self, name: str, /, **parameters: Any) -> dict[str, Any]:
        """Run an operator's call: load_adapter, unload_adapter, unload_adapters, reset_cache and others. Raises
        `ServeError`.
        """

    async def close(self) -> None:
        """Cancel this client's running requests, and disconnect."""
