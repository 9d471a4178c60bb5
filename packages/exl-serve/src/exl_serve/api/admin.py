"""The operator's routes: adapters, models, requests, the prefix cache."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from exl_serve.api.http import Call
from exl_serve.api.prepare import read_request
from exl_serve.api.state import ModelHandle
from exl_serve.errors import ServeError
from exl_serve.request.rules import boolean

__all__ = [
    "ADAPTER",
    "body_of",
    "cancel_request",
    "handle_of",
    "list_adapters",
    "list_requests",
    "load_adapter",
    "load_model",
    "load_one",
    "reset_cache",
    "text_of",
    "unload_adapter",
    "unload_model",
]


ADAPTER = ("model", "lora_name", "lora_path", "load_inplace")
"""Fields of a body that loads an adapter."""


def text_of(body: dict[str, Any], name: str) -> str:
    """Return a text of the body. Raises ServeError 400."""
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise ServeError.invalid(f"{name} must be a text", name, "missing_field")
    return value


async def body_of(call: Call, *names: str, optional: bool = False) -> dict[str, Any]:
    """Return the body, whose fields have these names; others, and parameters in the URL, are named in a header, or
    rejected.

    `optional`: there may be none. Raises ServeError 400.
    """
    body = await call.json(optional=optional)
    read_request(call, call.query | body, {}, frozenset(names) - call.query.keys() | body.keys() & frozenset(names))
    return body


def handle_of(call: Call, body: dict[str, Any]) -> ModelHandle:
    """Return the model that the body names, or the only one."""
    handles = call.state.models.list()
    if body.get("model") is None and len(handles) == 1:
        return handles[0]
    return call.state.models.resolve(str(body.get("model") or ""), call.caller)[0]


async def load_adapter(call: Call) -> None:
    """Load an adapter: {lora_name, lora_path, load_inplace}. Answers 200 once it is loaded; with `load_inplace` it
    replaces one of the same name.
    """
    await load_one(call, await body_of(call, *ADAPTER))


async def load_one(call: Call, body: dict[str, Any]) -> None:
    """Load the adapter of a body {lora_name, lora_path, load_inplace}."""
    engine = await handle_of(call, body).engine()
    name, path = text_of(body, "lora_name"), text_of(body, "lora_path")
    inplace = boolean("load_inplace", body["load_inplace"]) if body.get("load_inplace") is not None else False
    await call.answer(200, await engine.control("load_adapter", name=name, path=path, inplace=inplace))


async def unload_adapter(call: Call) -> None:
    """Unload an adapter: {lora_name}. Answers 409 while requests use it."""
    body = await body_of(call, "model", "lora_name")
    engine = await handle_of(call, body).engine()
    await call.answer(200, await engine.control("unload_adapter", name=text_of(body, "lora_name")))


async def list_adapters(call: Call) -> None:
    """List the loaded adapters."""
    found = []
    async for handle, told in _asked(call, "adapters"):
        about = {"object": "lora", "owned_by": "exl", "model": handle.config.id}
        found += [{"id": name, **about, "scaling": scaling} for name, scaling in told["adapters"].items()]
    await call.answer(200, {"object": "list", "data": found})


async def _asked(call: Call, name: str, **parameters: Any) -> AsyncIterator[tuple[ModelHandle, dict[str, Any]]]:
    """Yield each loaded model with its engine's answer to a call, without those whose engine ends meanwhile."""
    for handle in call.state.models.list():
        if handle.state == "ready":
            try:
                told = await (await handle.engine()).control(name, **parameters)
            except ServeError as error:
                if error.status != 503:
                    raise
                continue
            yield handle, told


async def reset_cache(call: Call) -> None:
    """Forget every cached page."""
    await body_of(call, optional=True)
    for handle in call.state.models.list():
        if handle.state == "ready":
            await (await handle.engine()).control("reset_cache")
    await call.answer(200, {})


async def list_requests(call: Call) -> None:
    """List the requests that are queued or running: all of them for an operator, else those of the caller's key."""
    owner = _owner(call)
    found: list[dict[str, Any]] = []
    async for handle, told in _asked(call, "requests"):
        found += [{**one, "model": handle.config.id} for one in told["requests"] if owner in (None, one["key"])]
    await call.answer(200, {"object": "list", "data": found})


async def cancel_request(call: Call) -> None:
    """End a request: any for an operator, else one of the caller's key."""
    owner = _owner(call)
    async for _, told in _asked(call, "cancel", id=call.path["id"], key=owner):
        if told["cancelled"]:
            await call.answer(200, {"id": call.path["id"], "cancelled": True})
            return
    raise ServeError(404, "not_found_error", "request_not_found", "there is no such request")


def _owner(call: Call) -> str | None:
    """Return the key whose requests the caller may see and end; None: all."""
    return None if "admin" in call.caller.scopes else call.caller.name


async def load_model(call: Call) -> None:
    """Load a model."""
    await body_of(call, optional=True)
    await call.answer(200, await call.state.models.control("load", model=call.path["id"]))


async def unload_model(call: Call) -> None:
    """Unload a model."""
    await body_of(call, optional=True)
    await call.answer(200, await call.state.models.control("unload", model=call.path["id"]))
