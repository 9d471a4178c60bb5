"""GET /v1/models, and the tokenizer's routes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exl_serve.api.chat import FIELDS, variables_of
from exl_serve.api.http import Call
from exl_serve.api.prepare import checked_ids, read_request
from exl_serve.api.state import ModelHandle
from exl_serve.engine.client import ModelCard
from exl_serve.errors import ServeError
from exl_serve.request.messages import messages_of, tool_choice_of, tools_of

__all__ = [
    "apply_template",
    "card_of",
    "detokenize",
    "embeddings",
    "get_model",
    "list_models",
    "models_for",
    "tokenize",
]

TEMPLATE = {
    name: FIELDS[name]
    for name in (
        *("chat_template_kwargs", "template_vars", "enable_thinking", "reasoning_effort", "verbosity"),
        *("documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
    )
}
"""Fields of chat that change the rendered prompt, by name and alias."""


async def card_of(handle: ModelHandle) -> list[dict[str, Any]]:
    """Return the list entries of the model and its adapters."""
    card: dict[str, Any] = {
        "id": handle.config.id,
        "object": "model",
        "created": _changed(handle.config.path),
        "owned_by": "exl",
        "root": handle.config.id,
        "parent": None,
        "max_model_len": handle.config.max_seq_len,
        "exl": {
            "state": handle.state,
            "aliases": list(handle.config.aliases),
            "reasoning": handle.family.has_reasoning,
            "tools": handle.family.name if handle.family.has_tools else None,
        },
    }
    found = [card]
    known = await _known(handle)
    if known is not None:
        card |= {"created": known.created, "max_model_len": known.max_seq_len}
        card["exl"] |= {
            "modalities": list(known.modalities),
            "quantization": known.quantization,
            "cache": known.cache_format,
            "digest": known.digest,
            "default_sampling": known.sampling_defaults,
        }
        parent = handle.config.id
        found += [card | {"id": f"{parent}:{name}", "parent": parent} for name in known.adapters]
    return found


async def _known(handle: ModelHandle) -> ModelCard | None:
    """Return what a loaded model's engine says of it; None where there is none, or it ends meanwhile."""
    if handle.state != "ready":
        return None
    try:
        return (await handle.engine()).card
    except ServeError as error:
        if error.status != 503:
            raise
        return None


def _changed(folder: str) -> int:
    """Return when a model's folder was changed, in seconds since 1970; 0 where there is none."""
    try:
        return int(Path(folder).stat().st_mtime)
    except OSError:
        return 0


async def list_models(call: Call) -> None:
    """List every model and adapter that requests may name."""
    entries = [entry for handle in models_for(call) for entry in await card_of(handle)]
    await call.answer(200, {"object": "list", "data": entries})


def models_for(call: Call) -> list[ModelHandle]:
    """Return the models that the caller's key may use, loaded or not, in the configuration's order."""
    allowed = call.caller.models
    return [handle for handle in call.state.models.list() if allowed is None or handle.config.id in allowed]


async def get_model(call: Call) -> None:
    """Answer one model or adapter."""
    name = call.path["id"]
    if not name:  # not the model that a request without a name means
        await list_models(call)
        return
    handle, adapter = call.state.models.resolve(name, call.caller)
    wanted = handle.config.id if adapter is None else f"{handle.config.id}:{adapter}"
    for entry in await card_of(handle):
        if entry["id"] == wanted:
            await call.answer(200, entry)
            return
    raise ServeError(
        404, "not_found_error", "model_not_found", f"the model {name[:128]!r} does not exist", param="model"
    )


async def embeddings(call: Call) -> None:
    """Answer 501: no model here computes embeddings."""
    raise ServeError(
        501, "not_implemented", "unsupported", "/v1/embeddings is not offered: the models here generate text"
    )


async def tokenize(call: Call) -> None:
    """Answer the tokens of a text or a conversation.

    Accepts vLLM's fields (prompt or messages), llama.cpp's (content, with_pieces) and TabbyAPI's (text).
    """
    body = await call.json()
    flags = ("add_special", "add_bos_token", "parse_special", "encode_special_tokens")
    options = _options(call, body, {"prompt", "content", "text", "with_pieces", "return_token_strs", *flags})
    handle, _ = call.state.models.resolve(str(body.get("model") or ""), call.caller)
    text = handle.text
    named = [name for name in ("prompt", "content", "text", "messages") if body.get(name) is not None]
    if len(named) > 1:
        raise ServeError.invalid(f"{' and '.join(named)} are given: give one of them", named[1])
    given = body.get("prompt", body.get("content", body.get("text")))
    if body.get("messages") is not None or isinstance(given, list):
        _, ids = await _rendered(call, handle, body, body.get("messages") or given, options)
    elif isinstance(given, str):
        special = _flag(body, "parse_special", _flag(body, "encode_special_tokens", True))
        # vLLM and TabbyAPI put the BOS in front unless told otherwise, llama.cpp does not.
        default = "content" not in body
        ids = await text.encode_long(given, special=special, bos=_adds_bos(body, default))
    else:
        raise ServeError.invalid("prompt, content or messages must be given", "prompt", "missing_field")
    limit = (await handle.engine()).card.max_seq_len
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "length": len(ids), "max_model_len": limit}
    if _flag(body, "return_token_strs", False):
        answer["token_strs"] = [text.piece(i).decode("utf-8", "replace") for i in ids]
    if _flag(body, "with_pieces", False):
        answer["tokens"] = [{"id": i, "piece": text.piece(i).decode("utf-8", "replace")} for i in ids]
    await call.answer(200, answer)


def _options(call: Call, body: Mapping[str, Any], own: set[str]) -> dict[str, Any]:
    """Return the options of the chat template. Fields outside of them and `own` are unknown. Raises ServeError 400."""
    return variables_of(
        call, read_request(call, body, TEMPLATE, frozenset(own | {"model", "messages", "tools", "tool_choice"}))
    )


async def _rendered(
    call: Call, handle: ModelHandle, body: Mapping[str, Any], messages: Any, options: Mapping[str, Any]
) -> tuple[str, list[int]]:
    """Return the prompt of a conversation, and its ids. Raises ServeError 400."""
    limits = call.state.config.server.limits
    plain, specs = tools_of(body.get("tools"), limits)
    choice, _ = tool_choice_of(body.get("tool_choice"), specs)
    checked = messages_of(messages, limits)
    async with call.state.renders.turn(call.caller.name):
        prompt, ids = await handle.text.render(checked, plain if plain and choice != "none" else None, options)
    front = handle.text.encode("", bos=True) if _adds_bos(body, False) else []
    return handle.text.decode(front, special=True) + prompt, [*front, *ids]


def _adds_bos(body: Mapping[str, Any], default: bool) -> bool:
    """Whether a BOS comes first. Raises ServeError 400."""
    return _flag(body, "add_special_tokens", _flag(body, "add_special", _flag(body, "add_bos_token", default)))


def _flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ServeError.invalid(f"{name} must be true or false", name)
    return value


async def detokenize(call: Call) -> None:
    """Answer the text of tokens."""
    body = await call.json()
    read_request(call, body, {}, frozenset({"model", "tokens", "decode_special_tokens"}))
    handle, _ = call.state.models.resolve(str(body.get("model") or ""), call.caller)
    ids = await checked_ids(body.get("tokens"), handle.text.vocab_size, "tokens", "a list of token ids")
    text = await handle.text.decode_long(ids, special=_flag(body, "decode_special_tokens", True))
    await call.answer(200, {"prompt": text, "content": text, "text": text})


async def apply_template(call: Call) -> None:
    """Answer the prompt that a conversation is rendered to."""
    body = await call.json()
    options = _options(call, body, {"add_special", "add_bos_token"})
    handle, _ = call.state.models.resolve(str(body.get("model") or ""), call.caller)
    text, ids = await _rendered(call, handle, body, body.get("messages"), options)
    await call.answer(200, {"prompt": text, "tokens": len(ids)})
