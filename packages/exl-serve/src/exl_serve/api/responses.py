"""POST /v1/responses, without a store: every request holds its whole conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exl_serve.api.chat import SERVICE_TIER, variables_of
from exl_serve.api.conversation import Conversation, Prepared, prepare
from exl_serve.api.generation import answer_id, serve
from exl_serve.api.http import Call, now
from exl_serve.api.prepare import read_request, resolve
from exl_serve.config.model import Limits
from exl_serve.errors import ServeError
from exl_serve.request.internal import Sampling
from exl_serve.request.messages import messages_of, tool_choice_of, tools_of
from exl_serve.request.response_tools import ResponseTools, tool_choice_as_chat, tools_as_chat
from exl_serve.request.responses import FIELDS, OWN, Asked, asked_of
from exl_serve.stream.responses import Responses

__all__ = ["input_tokens", "no_response", "responses"]

_NAMES = {
    **{"messages": "input", "max_tokens": "max_output_tokens", "prompt": "input"},
    **{"reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity"},
}
"""Fields of chat that errors name, and what they are here."""


async def responses(call: Call) -> None:
    """Answer a list of items.

    Raises ServeError for every fault that is known before the first token.
    """
    fields, asked, tools, conversation = await _read(call, asks=True)
    try:
        prepared = await prepare(call, fields, conversation)
        head = _head(fields, asked, tools, conversation.choice, prepared.request.sampling)
        await _serve(call, fields, asked, tools, prepared, head)
    except ServeError as error:
        raise _renamed(error) from None


async def _serve(
    call: Call,
    fields: Mapping[str, Any],
    asked: Asked,
    tools: ResponseTools,
    prepared: Prepared,
    head: Mapping[str, Any],
) -> None:
    answer = Responses(
        {**head, "model": prepared.target.name},
        prepared.target.handle.text,
        logprobs=asked.logprobs is not None,
        namespaces=tools.namespaces,
        carried=asked.carried,
    )
    await serve(
        call,
        prepared.generation,
        answer,
        stream=fields.get("stream", False),
        images=asked.images,
        interval=fields.get("stream_interval", 1),
    )


async def input_tokens(call: Call) -> None:
    """Answer the number of tokens of the rendered prompt; nothing is generated."""
    fields, _, _, conversation = await _read(call)
    if conversation.images:
        param = conversation.images[0].param
        raise ServeError.invalid(f"{param}: images are not counted here", param, "unsupported_modality")
    target = await resolve(call, fields)
    plain = conversation.tools if conversation.choice != "none" else None
    _, ids = await target.handle.text.render(conversation.messages, plain, conversation.variables)
    await call.answer(200, {"object": "response.input_tokens", "input_tokens": len(ids)})


async def no_response(call: Call) -> None:
    """Answer 404: no response is stored."""
    name = call.path["id"][:64]
    raise ServeError(
        404,
        "invalid_request_error",
        "response_not_found",
        f"there is no response {name!r}: this server keeps none",
        param="id",
    )


async def _read(call: Call, *, asks: bool = False) -> tuple[dict[str, Any], Asked, ResponseTools, Conversation]:
    """Read and check the body. `asks`: it asks for an answer, so the content log and traces have the request."""
    body = await call.json(media=True)
    if asks:  # before the checks: a refused request is recorded too
        call.asks("chat", body)
    fields = read_request(call, body, FIELDS, OWN)
    limits = call.state.config.server.limits
    asked = asked_of(body, fields, limits)
    tools = tools_as_chat(fields.get("tools"))
    try:
        plain, specs = tools_of(tools.chat, limits, tools.paths)
    except ServeError as error:
        raise _renamed(error) from None
    choice, callable_tools = tool_choice_of(tool_choice_as_chat(fields.get("tool_choice")), specs)
    given = dict(fields)
    given["verbosity"] = asked.verbosity
    if asked.effort is not None:
        given["reasoning_effort"] = asked.effort
    conversation = Conversation(
        _checked(asked, limits),
        plain,
        callable_tools,
        choice,
        asked.wanted,
        variables_of(call, given),
        fields.get("max_output_tokens"),
        1,
        asked.logprobs,
        asked.images,
        truncate=-1 if fields.get("truncation") == "auto" else None,
    )
    return fields, asked, tools, conversation


def _checked(asked: Asked, limits: Limits) -> list[dict[str, Any]]:
    """Return the messages in chat's form. Contents with images were checked with their items."""
    texts = [{**one, "content": ""} if isinstance(one["content"], list) else one for one in asked.messages]
    checked = messages_of(texts, limits)
    return [
        {**one, "content": given["content"]} if isinstance(given["content"], list) else one
        for one, given in zip(checked, asked.messages, strict=True)
    ]


def _head(
    fields: Mapping[str, Any], asked: Asked, tools: ResponseTools, choice: str, sampling: Sampling
) -> dict[str, Any]:
    """Return the part of the response that is known before its first token."""
    return {
        "id": answer_id("resp_"),
        "object": "response",
        "created_at": now(),
        "background": False,
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "max_tool_calls": fields.get("max_tool_calls"),
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": {"effort": asked.effort, "summary": None},
        "service_tier": SERVICE_TIER,
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": asked.format, "verbosity": asked.verbosity},
        "tool_choice": _choice(fields.get("tool_choice", "auto"), choice),
        "tools": [_tool(one) for one in tools.shown],
        "top_logprobs": asked.logprobs or 0,
        "top_p": sampling.top_p or 1.0,
        "truncation": fields.get("truncation", "disabled"),
        "user": fields.get("user"),
        "metadata": fields.get("metadata", {}),
    }


def _choice(given: Any, choice: str) -> Any:
    """Return a tool choice in this API's form, also if it came in chat's form."""
    if not isinstance(given, Mapping):
        return given
    if given["type"] != "allowed_tools":
        return {"type": "function", "name": choice}
    names = [one.get("function", one)["name"] for one in given.get("allowed_tools", given)["tools"]]
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": choice, "tools": tools}


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    if given["type"] == "namespace":
        return dict(given)
    return {"description": None, "parameters": {}, "strict": False} | dict(given)


def _renamed(error: ServeError) -> ServeError:
    """Return the error with this API's name of the field."""
    if error.param is not None:
        error.param = _NAMES.get(error.param, error.param.replace("].function.", "]."))
    return error
