"""Health, version and load: read from status pages, so that no engine is asked."""

from __future__ import annotations

import logging
import time
from typing import Any

from exl_serve import __version__
from exl_serve.api.http import Call
from exl_serve.api.state import ModelHandle
from exl_serve.engine.client import EngineStatus
from exl_serve.errors import ServeError

__all__ = ["live", "load", "metrics", "not_known", "problem", "ready", "version"]

log = logging.getLogger(__name__)

STALLED_SECONDS = 30.0
"""A generator step that takes longer counts as hung."""


async def live(call: Call) -> None:
    """Answer 200 while this process's event loop runs."""
    await call.answer(200, {"status": "ok"})


async def ready(call: Call) -> None:
    """Answer 200 if this address should get traffic, else 503 with the reason."""
    if call.state.draining:
        raise ServeError.unavailable("draining", "the server is about to stop", 5.0)
    if call.state.known is not None and not call.state.known.is_set():
        raise not_known()
    reasons = [await problem(handle) for handle in call.state.models.list()]
    if reasons and all(reason is not None for reason in reasons):
        first = next(reason for reason in reasons if reason is not None)
        raise ServeError.unavailable(*first)
    await call.answer(200, {"status": "ok"})


def not_known() -> ServeError:
    """Return the error of a process that has not read its list of models yet."""
    return ServeError.unavailable("model_loading", "the tokenizers of the models are being read: try again", 5.0)


async def problem(handle: ModelHandle) -> tuple[str, str] | None:
    """Return (code, message) for a model that does not serve; None for one that does, or that is loaded on demand."""
    if handle.state == "unloaded":
        return None
    if handle.state == "failed":
        return "model_failed", f"the model {handle.config.id} could not be loaded; the server's log says why"
    if handle.state == "stalled":
        return "engine_stalled", f"the engine of {handle.config.id} makes no progress"
    if handle.state != "ready":
        return "model_loading", f"the model {handle.config.id} is {handle.state}"
    try:
        status = (await handle.engine()).status
    except ServeError as error:  # its engine has just ended: another model may serve
        return error.code, error.message
    if is_stalled(status):
        return (
            "engine_stalled",
            f"the engine of {handle.config.id} has made no progress for {STALLED_SECONDS:g} seconds",
        )
    return None


def is_stalled(status: EngineStatus) -> bool:
    """Whether a generator step does not end. A busy engine is not stalled."""
    return status.began > status.ended and time.monotonic() - status.began > STALLED_SECONDS


async def version(call: Call) -> None:
    """Answer the server's version."""
    await call.answer(200, {"version": __version__, "server": "exl-serve"})


async def load(call: Call) -> None:
    """Answer the load of each engine."""
    found: dict[str, Any] = {}
    for handle in call.state.models.list():
        entry: dict[str, Any] = {}
        if handle.state == "ready":
            try:
                entry = _counts((await handle.engine()).status)
            except ServeError as error:  # its engine has ended meanwhile, so that its state is another one
                log.debug("the load of %s: %s", handle.config.id, error.message)
        found[handle.config.id] = {"state": handle.state, **entry}
    await call.answer(200, {"models": found})


def _counts(status: EngineStatus) -> dict[str, Any]:
    return {
        "running": status.decoding + status.prefilling,
        "waiting": status.queued,
        "queued_prompt_tokens": status.queued_prompt_tokens,
        "pages_pinned": status.pages_pinned,
        "pages_cached": status.pages_cached,
        "pages_free": status.pages_free,
        "prefill_tokens_per_second": round(status.prefill_rate, 1),
        "decode_tokens_per_second": round(status.decode_rate, 1),
        "steps": status.step,
    }


async def metrics(call: Call) -> None:
    """Answer the metrics in Prometheus's text format."""
    render = call.state.render_metrics
    data = b"" if render is None else (await render()).encode()
    await call.start(
        200, {"content-type": "text/plain; version=0.0.4; charset=utf-8", "content-length": str(len(data))}
    )
    await call.write(data, more=False)
