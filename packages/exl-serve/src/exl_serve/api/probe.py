"""GET /health/generate: test whether a model generates the expected token. The engine is asked at most once in a
while.
"""

from __future__ import annotations

import asyncio
import math
import time

from exl_serve.api.http import Call
from exl_serve.api.state import ModelHandle
from exl_serve.engine.client import EngineClient
from exl_serve.engine.events import EngineEvent, Failed, Finished, Tokens
from exl_serve.errors import ServeError
from exl_serve.request.internal import EngineRequest, Sampling, id_bytes

__all__ = ["Probe", "generate"]

TEXT = "The quick brown fox jumps over"
PROMPT_TOKENS = 4
SECONDS = 10.0
"""Seconds in which the token must come."""
MAX_AGE = 30.0
"""Seconds for which an answer holds, unless the request says otherwise."""
LONGEST_AGE = 3600.0


class Probe:
    """The first greedy token of a fixed prompt, which is the same for as long as a model is loaded."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._at = self._failed_at = -math.inf
        self._failure: ServeError | None = None
        self._boot = b""
        self._expected: int | None = None

    async def check(self, handle: ModelHandle, max_age: float) -> float:
        """Return the seconds since the last right token; generate a new one if that is longer ago than `max_age`.

        Concurrent callers share one generation, also a failing one: with an engine that hangs, each would otherwise
        wait for all before it. Raises ServeError 503.
        """
        came = time.monotonic()
        async with self._lock:
            if self._failure is not None and self._failed_at >= came:
                raise self._failure.with_traceback(None)
            try:
                return await self._check(handle, max_age)
            except ServeError as error:
                self._failure, self._failed_at = error, time.monotonic()
                raise

    async def _check(self, handle: ModelHandle, max_age: float) -> float:
        engine = await handle.engine()
        if engine.status.boot != self._boot:  # another engine process: its token is not known yet
            self._boot, self._expected, self._at = engine.status.boot, None, -math.inf
        if time.monotonic() - self._at > max_age:
            token = await _first_token(handle, engine)
            if self._expected is None:
                self._expected = token
            if token != self._expected:
                raise ServeError.unavailable(
                    "engine_wrong_token",
                    f"{handle.config.id} made token {token} where it has made {self._expected} before",
                )
            self._at = time.monotonic()
        return max(0.0, time.monotonic() - self._at)


async def generate(call: Call) -> None:
    """Answer 200 if every loaded model, or the one that `model` names, generates the right token.

    An answer of at most `max_age` seconds ago counts. A request for a fresher one than by default may make the engine
    work each time, so it counts against the limits of its key. Raises ServeError 503 with the reason, 400, 404 or 429.
    """
    max_age = _max_age(call.query.get("max_age"))
    if "model" in call.query:
        handles = [call.state.models.resolve(call.query["model"], call.caller)[0]]
    else:
        mine = call.caller.models
        handles = [
            handle
            for handle in call.state.models.list()
            if handle.state == "ready" and (mine is None or handle.config.id in mine)
        ]
    if not handles:
        raise ServeError.unavailable("model_loading", "no model is loaded")
    ticket = call.state.admit(call.caller, len(handles)) if max_age < MAX_AGE else None
    ages = {}
    try:
        for handle in handles:
            probe = call.state.probes.setdefault(handle.config.id, Probe())
            ages[handle.config.id] = round(await probe.check(handle, max_age), 3)
    finally:
        if ticket is not None:
            ticket.release()
    await call.answer(200, {"status": "ok", "token_age_seconds": ages})


def _max_age(text: str | None) -> float:
    try:
        found = MAX_AGE if text is None else float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= LONGEST_AGE:
        raise ServeError.invalid(f"max_age must be 0 to {LONGEST_AGE:g} seconds", "max_age")
    return found


async def _first_token(handle: ModelHandle, engine: EngineClient) -> int:
    """Return the first token. Raises ServeError 503 for an engine that generates none."""
    ids = handle.text.encode(TEXT, bos=True)[:PROMPT_TOKENS]
    request = EngineRequest(
        id=f"probe-{time.monotonic_ns()}",
        prompt=id_bytes(ids),
        sampling=Sampling(temperature=0.0),
        seeds=(0,),
        max_tokens=1,
        ignore_eos=True,
        special_text=True,
        priority=0,  # no deadline: it would be refused for the predicted wait of all classes
    )
    found: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    tokens: list[int] = []

    def take(event: EngineEvent) -> None:
        if isinstance(event, Tokens):
            tokens.extend(event.ids)
        if found.done():
            return
        if isinstance(event, Failed):
            found.set_exception(ServeError.unavailable(event.code, f"{handle.config.id}: {event.message}"))
        elif isinstance(event, Finished):
            if tokens:
                found.set_result(tokens[0])
            else:
                found.set_exception(ServeError.unavailable("no_token", f"{handle.config.id} made no token"))

    running = None
    try:
        async with asyncio.timeout(SECONDS):
            running = await engine.submit(request, take)
            return await found
    except TimeoutError:
        raise ServeError.unavailable("no_token", f"{handle.config.id} made no token in {SECONDS:g} seconds") from None
    except ServeError as error:
        raise ServeError.unavailable(error.code, error.message) from None
    finally:
        if running is not None and not found.done():
            running.cancel()
        found.cancel()
