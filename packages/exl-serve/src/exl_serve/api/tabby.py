"""TabbyAPI's names for the operator's routes."""

from __future__ import annotations

import asyncio
from typing import Any

from exl_serve.api.admin import ADAPTER, body_of, handle_of, load_one, text_of
from exl_serve.api.http import Call
from exl_serve.api.models import models_for
from exl_serve.api.state import ModelHandle
from exl_serve.engine.adapters import check_folder_name
from exl_serve.errors import ServeError
from exl_serve.request.rules import boolean, number
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
MAX_LORAS = 64
SCALING = number(-100, 100)
_ANY_LOAD: dict[str, tuple[Any, ...]] = {
    "backend": (),
    "tensor_parallel": (False,),
    "tensor_parallel_backend": (),
    "gpu_split_auto": (True,),
    "autosplit_reserve": ([], [96]),
    "gpu_split": ([],),
    "rope_scale": (1, 1.0),
    "rope_alpha": (1, 1.0),
    "chunk_size": (),
    "output_chunking": (True,),
    "prompt_template": ("",),
    "num_experts_per_token": (),
    "draft_model": ({},),
    "draft": ({},),
    "override_preset": ("",),
    "skip_queue": (False,),
}
"""TabbyAPI's options of loading that the configuration sets here, with the values that change nothing, besides null."""
_OF_MODEL = ("max_seq_len", "cache_size", "cache_mode", "max_batch_size", "vision")
"""Options that may repeat what is configured."""


def _entry(handle: ModelHandle) -> dict[str, Any]:
    return {"id": handle.config.id, "object": "model", "owned_by": "exl", "state": handle.state}


def _loaded(call: Call) -> ModelHandle:
    """Return the first loaded model that the key may use. Raises ServeError 404."""
    for handle in models_for(call):
        if handle.state == "ready":
            return handle
    raise ServeError(404, "not_found_error", "model_not_found", "no model is loaded")


async def current_model(call: Call) -> None:
    """Answer the first loaded model that the key may use."""
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
    """Answer the models that the key may use, of those of the configuration."""
    await call.answer(200, {"object": "list", "data": [_entry(handle) for handle in models_for(call)]})


async def load_model(call: Call) -> None:
    """Load a model: {model_name}. Answers a stream of events until it is loaded, or has failed.

    TabbyAPI's other fields may repeat what the configuration says.
    """
    body = await body_of(call, "model_name", "name", *_ANY_LOAD, *_OF_MODEL)
    name = body.get("model_name", body.get("name"))
    if not isinstance(name, str):
        raise ServeError.invalid("model_name must be a text", "model_name", "missing_field")
    handle, _ = call.state.models.resolve(name, call.caller)
    await _check_options(handle, body)
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


async def _check_options(handle: ModelHandle, body: dict[str, Any]) -> None:
    """Raise ServeError 400 for an option of loading that differs from the configuration."""
    config = handle.config
    allowed = dict(_ANY_LOAD)
    values: list[tuple[Any, ...]] = [
        (config.max_seq_len, config.cache_tokens, config.cache.upper(), config.max_batch_size, config.vision)
    ]
    if handle.state == "ready":
        card = (await handle.engine()).card
        values.append((card.max_seq_len, card.cache_tokens, card.cache_format.upper(), card.max_batch_size, None))
    allowed |= dict(zip(_OF_MODEL, zip(*values, strict=True), strict=True))
    for key, neutral in allowed.items():
        value = body.get(key)
        if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
            raise ServeError.unsupported(key, f"{key} is set by the configuration of {config.id}: leave it out")


async def unload_model(call: Call) -> None:
    """Unload every loaded model."""
    await body_of(call, optional=True)
    found = [
        await call.state.models.control("unload", model=handle.config.id)
        for handle in call.state.models.list()
        if handle.state == "ready"
    ]
    await call.answer(200, {"object": "list", "data": found})


async def load_lora(call: Call) -> None:
    """Load adapters from the folders of their names: {loras: [{name, scaling}]}. With `lora_name` as
    /v1/load_lora_adapter does.
    """
    body = await body_of(call, *ADAPTER, "loras", "skip_queue")
    if "loras" not in body:
        await load_one(call, body)
        return
    for other in ("lora_name", "lora_path", "load_inplace"):
        if other in body:
            raise ServeError.invalid(f"loras and {other} exclude each other: leave one out", "loras")
    if body.get("skip_queue") is not None and boolean("skip_queue", body["skip_queue"]):
        raise ServeError.unsupported("skip_queue", "skip_queue is not offered: an adapter in use is not replaced")
    wanted = _loras(body["loras"])
    engine = await handle_of(call, body).engine()
    errors: dict[str, dict[str, str]] = {}
    for name, scaling in wanted:
        try:
            await engine.control("load_adapter", name=name, path=None, scaling=scaling, inplace=True)
        except ServeError as error:
            if (
                error.status >= 500 and error.code != "unsupported"
            ):  # the engine failed, which is not the adapter's fault
                raise
            errors[name] = {"code": error.code, "message": error.message}
    loaded = [name for name, _ in wanted if name not in errors]
    await call.answer(200, {"success": loaded, "failure": list(errors), "errors": errors})


def _loras(value: Any) -> list[tuple[str, float]]:
    """Return name and factor of each adapter that is to be loaded. Raises ServeError 400."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_LORAS:
        raise ServeError.invalid(f"loras must be a list of 1 to {MAX_LORAS} objects with name and scaling", "loras")
    found = []
    for at, one in enumerate(value):
        if not isinstance(one, dict):
            raise ServeError.invalid(f"loras[{at}] must be an object with name and scaling", "loras")
        for key in one:
            if key not in ("name", "scaling"):
                param = f"loras[{at}].{key[:64]}"
                raise ServeError.invalid(f"{param} is unknown: leave it out", param, "unknown_parameter")
        given = one.get("scaling")
        scaling = 1.0 if given is None else SCALING(f"loras[{at}].scaling", given)
        found.append((check_folder_name(f"loras[{at}].name", text_of(one, "name")), scaling))
    if len({name for name, _ in found}) < len(found):
        raise ServeError.invalid("loras names an adapter twice: name each once", "loras")
    return found


async def unload_lora(call: Call) -> None:
    """Unload all adapters of a model, or none where requests use one; with `lora_name` the one of that name."""
    body = await body_of(call, "model", "lora_name", optional=True)
    engine = await handle_of(call, body).engine()
    if "lora_name" in body:
        await call.answer(200, await engine.control("unload_adapter", name=text_of(body, "lora_name")))
        return
    told = await engine.control("unload_adapters")
    await call.answer(200, {"success": told["names"]})


async def permission(call: Call) -> None:
    """Answer the scopes of the key."""
    scopes = sorted(call.caller.scopes)
    await call.answer(200, {"permission": "admin" if "admin" in scopes else "api", "scopes": scopes})
