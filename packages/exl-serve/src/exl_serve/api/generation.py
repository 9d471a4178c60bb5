"""Run a generation from its engine requests to the client: streamed or whole, cancelled when the client leaves."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import msgspec

from exl_serve.api.http import Call
from exl_serve.engine.client import EngineClient, RunningRequest
from exl_serve.engine.events import EngineEvent, Finished, Tokens
from exl_serve.errors import ServeError
from exl_serve.metrics import Gaps
from exl_serve.request.internal import EngineRequest, MediaRef
from exl_serve.request.messages import ImagePart
from exl_serve.stream.answer_queue import AnswerQueue
from exl_serve.stream.chunks import DONE, Answer
from exl_serve.stream.events import AnswerEvent, Error
from exl_serve.stream.family import ChannelMachine

__all__ = ["Generation", "answer_id", "serve"]

T = TypeVar("T")

TOO_LATE = "the request's deadline has passed while its images were decoded: allow more time, or send smaller images"
SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def answer_id(prefix: str) -> str:
    """Return a new random id that begins with `prefix`."""
    return prefix + base64.b32encode(secrets.token_bytes(15)).decode().lower()


class Generation:
    """The completions of one HTTP request. `machines` has one for each choice, those of the first request first."""

    def __init__(
        self, engine: EngineClient, requests: Sequence[EngineRequest], machines: Sequence[ChannelMachine]
    ) -> None:
        self._engine, self._requests, self._machines = engine, requests, machines
        self._running: list[RunningRequest] = []
        self.queue = AnswerQueue(self._pause, self._resume)
        self._cancelled = False
        #: ends a preparation that is under way
        self._interrupt: Callable[[], None] | None = None
        self.first_token: float | None = None
        #: tokens so far, of all completions
        self.generated = 0
        #: seconds between tokens
        self.gaps = Gaps(len(machines))
        #: writes of the stream
        self.writes = 0
        #: the engine has begun with it
        self.started = False
        #: time.monotonic() at which the last end of a choice arrived
        self.ended: float | None = None

    @property
    def constrained(self) -> bool:
        """Whether the engine has grammars to compile for it."""
        return bool(self._requests[0].constraints)

    @property
    def max_tokens(self) -> int:
        """Most new tokens of a completion."""
        return self._requests[0].max_tokens

    async def prepare(self, steps: Awaitable[T]) -> T | None:
        """Return the result of `steps`, which come before `submit`; None if the request is cancelled meanwhile.

        Raises ServeError 408 at the request's deadline.
        """
        loop = asyncio.get_running_loop()
        deadline = self._requests[0].deadline
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.time()) as limit:
                self._interrupt = lambda: None if limit.expired() else limit.reschedule(loop.time())
                if self._cancelled:
                    self._interrupt()
                return await steps
        except TimeoutError:
            if self._cancelled:
                return None
            raise ServeError(408, "timeout", "deadline_exceeded", TOO_LATE) from None
        finally:
            self._interrupt = None

    async def submit(self, media: tuple[MediaRef, ...] = ()) -> None:
        """Queue all requests, with their images. Raises ServeError if one is rejected; the others are then
        cancelled.
        """
        base = 0
        try:
            for request in self._requests:
                if self._cancelled:
                    break
                request = msgspec.structs.replace(request, media=media) if media else request
                self._running.append(await self._engine.submit(request, self._sink(base)))
                base += request.n
        except BaseException:
            self.cancel()
            raise
        if self._cancelled:  # the client left meanwhile
            self.cancel()

    def fail(self, error: ServeError) -> None:
        """End the generation with an error for the client."""
        for running in self._running:
            running.cancel()
        self.queue.put(Error(0, error.status, error.type, error.code, error.message))

    def is_cancelled(self) -> bool:
        """Whether the generation was cancelled."""
        return self._cancelled

    def cancel(self) -> None:
        """Cancel all requests, and release everyone who waits for events."""
        self._cancelled = True
        self.queue.close()
        if self._interrupt is not None:
            self._interrupt()
        for running in self._running:
            running.cancel()

    def release(self) -> None:
        """Let go of the engine's requests and of callbacks: nothing happens to it any more. They refer to it, so that
        only the garbage collector, which runs rarely, would free them."""
        self.queue.release()
        self._running.clear()

    def _sink(self, base: int) -> Callable[[EngineEvent], None]:
        machines, put = self._machines, self.queue.put

        def take(event: EngineEvent) -> None:
            self.started = True
            if isinstance(event, Tokens):
                self.generated += len(event.ids)
                self.gaps.take(base + event.choice, time.monotonic(), len(event.ids))
            elif isinstance(event, Finished):
                self.ended = time.monotonic()
            for found in machines[base + event.choice].feed(event):
                put(found)

        return take

    def _pause(self) -> None:
        for running in self._running:
            running.pause()

    def _resume(self) -> None:
        for running in self._running:
            running.resume()


async def serve(
    call: Call,
    generation: Generation,
    answer: Answer,
    *,
    stream: bool,
    extra: Callable[[Answer], dict[str, Any]] | None = None,
    images: Sequence[ImagePart] = (),
    interval: int = 1,
) -> None:
    """Run a generation and write its answer, each event of a stream with at least `interval` tokens.

    Raises ServeError before anything was written.
    """
    call.on_disconnect(generation.cancel)
    call.state.running.add(generation)
    began = time.monotonic()
    refused: ServeError | None = None
    try:
        if images:
            async with AsyncExitStack() as files:
                decoding = files.enter_async_context(call.state.media.decoded(images, call.state.config.media))
                media = await generation.prepare(decoding)
                await generation.submit(media or ())
        else:
            await generation.submit()
            if generation.constrained:
                waited = time.monotonic() - began
                call.phase("grammar", began)
                call.state.meter.observe("exl_grammar_compile_seconds", waited, model_name=call.model)
        if stream:
            await _stream(call, generation, answer, interval)
        else:
            await _whole(call, generation, answer, extra)
    except ServeError as error:
        refused = error
        raise
    finally:
        call.stop_watching()
        call.state.running.discard(generation)
        left = generation.is_cancelled() and not answer.finished and refused is None
        if not answer.finished or answer.error is not None:
            generation.cancel()
        generation.release()
        if call.ticket is not None:
            call.ticket.spend(answer.prompt_tokens + _generated(generation, answer, left))
        _account(call, generation, answer, began, left, refused)


async def _whole(
    call: Call, generation: Generation, answer: Answer, extra: Callable[[Answer], dict[str, Any]] | None
) -> None:
    while not answer.finished:
        events = await generation.queue.take()
        if generation.is_cancelled():
            return
        _first(generation)
        answer.chunks(events)
        generation.queue.written()
    value = answer.whole() | ({} if extra is None else extra(answer))
    await call.answer(200, value)


async def _stream(call: Call, generation: Generation, answer: Answer, interval: int) -> None:
    answer.keeps = False
    events, chunks = await _beginning(generation, answer, call.state.config.server.first_byte_seconds)
    if generation.is_cancelled():
        return
    if answer.error is not None and not chunks:  # no part of an answer exists: the status can still report it
        raise answer.error
    await call.start(200, SSE_HEADERS)
    await _pieces(call, generation, answer, events, chunks, interval)


async def _beginning(
    generation: Generation, answer: Answer, seconds: float
) -> tuple[list[AnswerEvent], list[dict[str, Any]]]:
    """Return the first chunks of an answer and their events, or none after `seconds`.

    Events that make no chunk, such as the end of the prompt, do not end the wait: the status can report an error that
    follows them.
    """
    loop = asyncio.get_running_loop()
    events: list[AnswerEvent] = []
    chunks: list[dict[str, Any]] = []
    end = loop.time() + seconds
    while not chunks and not answer.finished and (left := end - loop.time()) > 0:
        new = await generation.queue.take(left)
        if generation.is_cancelled():
            break
        events += new
        chunks = answer.chunks(new)
        if not chunks:  # the events that make some may wait for this
            generation.queue.written()
    return events, chunks


async def _pieces(
    call: Call,
    generation: Generation,
    answer: Answer,
    events: list[AnswerEvent],
    chunks: list[dict[str, Any]],
    interval: int,
) -> None:
    """Write these chunks of the answer, of these events, then those of further events to the answer's end."""
    server = call.state.config.server
    while True:
        data = b"".join(map(answer.line, chunks))
        if events:
            _first(generation)
        if answer.finished:
            tail = b"".join(map(answer.line, answer.last_chunks()))
            generation.writes += 1
            await call.write(data + tail + DONE, more=False)
            return
        if data or not events:
            generation.writes += 1
            await call.write(data or b": ping\n\n", more=True)
            if data and interval > 1:  # the first token does not wait for others
                generation.queue.set_interval(interval)
        generation.queue.written()
        events = await generation.queue.take(server.ping_seconds)
        if generation.is_cancelled():
            return
        chunks = answer.chunks(events)


def _first(generation: Generation) -> None:
    if generation.first_token is None:
        generation.first_token = time.monotonic()


def _generated(generation: Generation, answer: Answer, left: bool) -> int:
    """Return the tokens that were generated; for a client that left, those that had arrived."""
    counted = int(answer.usage()["completion_tokens"])
    return max(counted, generation.generated) if left or answer.error is not None else counted


def _account(
    call: Call, generation: Generation, answer: Answer, began: float, left: bool, refused: ServeError | None
) -> None:
    """Record the metrics and the log line of a request. `refused`: its error, if that was told by the status."""
    now = time.monotonic()
    error = answer.error if refused is None else refused
    if call.asked is not None:
        call.answers = answer.content()
    reason = "abort" if left else "error" if error is not None else (answer.choices[0].finish or "abort")
    if refused is not None and not generation.started:
        return  # a rejected request: `exl_rejected_total` counts it
    _trace(call, generation, answer)
    _measure(call, generation, answer, began, left, reason)
    usage = answer.usage()
    call.log(
        {
            "id": call.id,
            "key": call.caller.name,
            "model": str(answer.head.get("model", "")),
            "status": 499 if left else 200 if error is None else error.status,
            "finish": reason,
            "code": None if error is None else error.code,
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "completion_tokens": _generated(generation, answer, left),
            "seconds": round(now - began, 4),
            "ttft": None if generation.first_token is None else round(generation.first_token - began, 4),
            **{name: round(value, 4) for name, value in answer.timings().items()},
            "events": generation.writes,
            "user": call.user,
        }
    )


def _trace(call: Call, generation: Generation, answer: Answer) -> None:
    """Note the engine's phases, which follow one another, of the choice that ended last.

    They are placed by their end: what an engine does before it queues a choice takes time that it does not report.
    """
    ended = generation.ended
    if ended is None or call.state.tracing is None:
        return
    began = ended - sum(answer.timings().values())
    for name, seconds in zip(("queue", "prefill", "decode"), answer.timings().values(), strict=True):
        if seconds:
            call.phases.append((name, began, began + seconds))
        began += seconds


def _measure(call: Call, generation: Generation, answer: Answer, began: float, left: bool, reason: str) -> None:
    """Record the metrics of a request that the engine took."""
    meter = call.state.meter
    model = str(answer.head.get("model", ""))
    usage = answer.usage()
    meter.count("exl_requests_total", model_name=model, finished_reason=reason)
    meter.count("exl_prompt_tokens_total", usage["prompt_tokens"], model_name=model)
    generated = _generated(generation, answer, left)
    meter.count("exl_generation_tokens_total", generated, model_name=model)
    meter.count("exl_looked_up_tokens_total", usage["prompt_tokens"], model_name=model)
    meter.count("exl_cached_tokens_total", usage["prompt_tokens_details"]["cached_tokens"], model_name=model)
    meter.observe("exl_request_prompt_tokens", usage["prompt_tokens"], model_name=model)
    meter.observe("exl_request_generation_tokens", generated, model_name=model)
    meter.observe("exl_request_params_n", len(answer.choices), model_name=model)
    meter.observe("exl_request_params_max_tokens", generation.max_tokens, model_name=model)
    for one in answer.usages:
        meter.observe("exl_request_queue_seconds", one.queue_seconds, model_name=model)
        meter.observe("exl_request_prefill_seconds", one.prefill_seconds, model_name=model)
        meter.observe("exl_request_decode_seconds", one.generate_seconds, model_name=model)
        inference = one.prefill_seconds + one.generate_seconds
        meter.observe("exl_request_inference_seconds", inference, model_name=model)
        if one.drafts_accepted or one.drafts_rejected:
            meter.count("exl_drafted_tokens_total", one.drafts_accepted + one.drafts_rejected, model_name=model)
            meter.count("exl_accepted_tokens_total", one.drafts_accepted, model_name=model)
        if one.completion_tokens > 1:
            meter.observe("exl_token_seconds", one.generate_seconds / (one.completion_tokens - 1), model_name=model)
    meter.spread("exl_inter_token_seconds", generation.gaps.counts, generation.gaps.total, model_name=model)
    if generation.writes:
        meter.count("exl_events_total", generation.writes, model_name=model)
    meter.observe("exl_request_seconds", time.monotonic() - began, model_name=model)
    if generation.first_token is not None:
        meter.observe("exl_time_to_first_token_seconds", generation.first_token - began, model_name=model)
    if left:
        meter.count("exl_disconnects_total", phase="decode" if generation.first_token else "queue")
