"""TabbyAPI's names for the operator's routes."""

from __future__ import annotations

import asyncio
from typing import Any

from exl_serve.api.admin import load_adapter, unload_adapter
from exl_serve.api.http import Call
from exl_serve.api.state import ModelHandle
from exl_serve.errors import ServeError
from exl_serve.stream.chunks import sse

__all__ = [
    "current_model",
    "list_folders",
    "load_lora",
    "load_model",
    "permission",
    "unload_lora",
    "unload_model",
]

LOAD_SECONDS = 3600.0
POLL_SECONDS = 0.5


def _entry(handle: ModelHandle) -> dict[str, Any]:
    return {"id": handle.config.id, "object": "model", "owned_by": "exl", "state": handle.state}


def _loaded(call: Call) -> ModelHandle:
    """Return the first loaded model. Raises ServeError 404."""
    for handle in call.state.models.list():
        if handle.state == "ready":
            return handle
    raise ServeError(404, "not_found_error", "model_not_found", "no model is loaded")


async def current_model(call: Call) -> None:
    """Answer the first loaded model."""
    handle = _loaded(call)
    card = (await handle.engine()).card
    parameters = {
        "max_seq_len": card.max_seq_len,
        "max_batch_size": card.max_batch_size,
        "cache_size": card.cache_tokens,
        "cache_mode": card.cache_format.upper(),
    }
    await call.answer(200, _entry(handle) | {"parameters": parameters})


async def list_folders(call: Call) -> None:
    """Answer the models that can be loaded: those of the configuration."""
    await call.answer(200, {"object": "list", "data": [_entry(handle) for handle in call.state.models.list()]})


async def load_model(call: Call) -> None:
    """Load a model: {model_name}. Answers a stream of events until it is loaded, or has failed."""
    body = await call.json()
    name = body.get("model_name", body.get("name"))
    if not isinstance(name, str):
        raise ServeError.invalid("model_name must be a text", "model_name", "missing_field")
    handle, _ = call.state.models.resolve(name, call.caller)
    id = handle.config.id
    told = await call.state.models.control("load", model=id)  # an error comes before the stream begins
    await call.start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
    async with asyncio.timeout(LOAD_SECONDS):
        while told["state"] not in ("ready", "failed", "unloaded"):
            event = {"model_type": "model", "status": "processing", "state": told["state"]}
            event |= {"module": told.get("done", 0), "modules": told.get("total", 0)}
            await call.write(sse(event), more=True)
            await asyncio.sleep(POLL_SECONDS)
            try:
                told = await call.state.models.control("load", model=id)
            except ServeError as error:
                await call.write(sse(error.body()), more=False)
                return
    done = {"model_type": "model", "status": "finished" if told["state"] == "ready" else "failed", **told}
    await call.write(sse(done), more=False)


async def unload_model(call: Call) -> None:
    """Unload every loaded model."""
    found = [
        await call.state.models.control("unload", model=handle.config.id)
        for handle in call.state.models.list()
        if handle.state == "ready"
    ]
    await call.answer(200, {"object": "list", "data": found})


async def load_lora(call: Call) -> None:
    """Load an adapter, as /v1/load_lora_adapter does."""
    await load_adapter(call)


async def unload_lora(call: Call) -> None:
    """Unload an adapter, as /v1/unload_lora_adapter does."""
    await unload_adapter(call)


async def permission(call: Call) -> None:
    """Answer the scopes of the key."""
    scopes = sorted(call.caller.scopes)
    await call.answer(200, {"permission": "admin" if "admin" in scopes else "api", "scopes": scopes})
