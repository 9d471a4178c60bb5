"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exl_serve.api.conversation import Conversation, prepare
from exl_serve.api.generation import answer_id, serve
from exl_serve.api.http import Call, now
from exl_serve.api.prepare import prompt_logprobs_of, read_request, settings_of, stream_options
from exl_serve.errors import ServeError
from exl_serve.request.fields import COMMON, CONVERSATION, PROMPT_LOGPROBS, SAMPLING, Field, by_name
from exl_serve.request.formats import format_of
from exl_serve.request.internal import ids_of
from exl_serve.request.messages import ImagePart, check_results, messages_of, tool_choice_of, tools_of
from exl_serve.request.rules import anything, boolean, integer, one_of, scalar, scalars, string
from exl_serve.stream.chunks import Chat, FunctionChat

__all__ = ["CHAT", "FIELDS", "SERVICE_TIER", "chat_completions", "variables_of"]

CHAT: tuple[Field, ...] = (
    Field(
        "max_tokens",
        integer(1, 1 << 24),
        "1 to what the context leaves",
        ("max_completion_tokens", "max_length"),
        meaning="most new tokens; absent: the server's `default_max_tokens`, or all that the context leaves",
    ),
    Field("logprobs", boolean, "true or false", meaning="the log-probability of each token"),
    Field(
        "top_logprobs",
        integer(0, 20),
        "0 to 20, with `logprobs`",
        meaning="the most probable candidates for each token",
    ),
    PROMPT_LOGPROBS,
    Field("reasoning_effort", scalar, "as the template takes it", meaning="a variable of the chat template"),
    Field(
        "verbosity",
        one_of("low", "medium", "high"),
        "`low`, `medium`, `high`",
        meaning="a variable of the chat template, absent for `medium`; most templates have none",
    ),
    Field(
        "add_generation_prompt", boolean, "true or false", meaning="begin the assistant's message; true where absent"
    ),
    Field(
        "continue_final_message",
        boolean,
        "true or false",
        meaning="go on with the last message instead of answering it",
    ),
    Field(
        "echo",
        boolean,
        "true or false",
        meaning="the answer begins with the last message, where that is the assistant's",
    ),
    Field(
        "add_special_tokens", boolean, "true or false", meaning="true: a BOS in front of what the chat template writes"
    ),
    Field(
        "documents",
        anything,
        "a list of objects with texts, at most 1,024",
        meaning="texts to answer from, for chat templates that take `documents`",
    ),
    Field(
        "chat_template",
        string(1 << 20),
        "a Jinja template, if the server has `allow_request_templates`",
        meaning="instead of the model's chat template",
    ),
    Field(
        "reasoning_field",
        one_of("reasoning_content", "reasoning", "both", "none"),
        "`reasoning_content`, `reasoning`, `both`, `none`",
        meaning="name of the answer's field with the reasoning; absent: the server's `reasoning_field`",
    ),
    Field("include_reasoning", boolean, "true or false", meaning="false: as `reasoning_field` none"),
)
"""Fields of chat alone."""
FIELDS = by_name(COMMON, SAMPLING, CONVERSATION, CHAT)
MAX_DOCUMENTS = 1024
SERVICE_TIER = "default"
"""The tier of every request, as answers name it."""
RESERVED = frozenset(
    {
        *("messages", "tools", "bos_token", "eos_token", "add_generation_prompt", "documents", "chat_template"),
        *("parse_special_in_content", "parse_special", "tokenizer", "self", "known_variables"),
    }
)
"""Names that the server sets itself, or that are not variables of a template."""


async def chat_completions(call: Call) -> None:
    """Answer with the next message of a conversation.

    Raises ServeError for every fault that is known before the first token.
    """
    body = await call.json(media=True)
    call.asks("chat", body)
    fields = read_request(call, body, FIELDS, frozenset({"messages", "functions", "function_call"}))
    state = call.state
    limits = state.config.server.limits
    usage, continuous = stream_options(fields)
    n = fields.get("n", 1)
    if n > limits.max_n:
        raise ServeError.invalid(f"n is {n}; at most {limits.max_n} are made", "n")
    old = body.get("functions") is not None and "tools" not in fields
    if old:
        fields["parallel_tool_calls"] = False  # the answer's shape has room for one
    images: list[ImagePart] = []
    messages = messages_of(body.get("messages"), limits, images)
    if state.config.server.strict_fields:
        check_results(messages)
    plain, specs = tools_of(_old_or_new(body, fields, "tools"), limits)
    choice, callable_tools = tool_choice_of(_old_or_new(body, fields, "tool_choice"), specs)
    logprobs = _logprobs(fields)
    scored = prompt_logprobs_of(call, fields)
    if images:
        _check_fields_with_images(fields)
    wanted = format_of(fields, limits)
    asked = Conversation(
        messages,
        plain,
        callable_tools,
        choice,
        wanted,
        variables_of(call, fields),
        fields.get("max_tokens"),
        n,
        logprobs,
        images,
        scored,
        fields.get("truncate_prompt_tokens"),
        fields.get("add_special_tokens", False),
    )
    prepared = await prepare(call, fields, asked)
    target = prepared.target
    head = {
        "id": answer_id("chatcmpl-"),
        "created": now(),
        "model": target.name,
        "system_fingerprint": target.fingerprint,
    }
    if "service_tier" in fields:
        head["service_tier"] = SERVICE_TIER
    answer = (FunctionChat if old else Chat)(
        head,
        n,
        target.handle.text,
        include_usage=usage,
        continuous_usage=continuous,
        logprobs=logprobs is not None,
        return_ids=fields.get("return_token_ids", False),
        reasoning_field=_reasoning_field(fields, state.config.server.reasoning_field),
        prompt_logprobs=scored is not None,
        settings=settings_of(call, prepared.request),
        tokens_as_ids=fields.get("return_tokens_as_token_ids", False),
        truncated=prepared.truncated,
    )
    answer.prompt_ids = [ids_of(prepared.request.prompt)] if fields.get("return_token_ids", False) else ()
    if fields.get("echo", False) and messages[-1]["role"] == "assistant":
        answer.echo = str(messages[-1]["content"])
    await serve(
        call,
        prepared.generation,
        answer,
        stream=fields.get("stream", False),
        images=images,
        interval=fields.get("stream_interval", 1),
    )


def _check_fields_with_images(fields: Mapping[str, Any]) -> None:
    """Raise ServeError 400 for a field that a conversation with images cannot have."""
    if "prompt_logprobs" in fields:
        raise ServeError.invalid("prompt_logprobs and images exclude each other: leave one out", "prompt_logprobs")
    most = fields.get("truncate_prompt_tokens", -1)
    if most > 0:
        raise ServeError.invalid(
            f"truncate_prompt_tokens is {most}; it must be -1 or absent for a conversation with images, whose tokens "
            "are known only when they are read",
            "truncate_prompt_tokens",
        )


def _reasoning_field(fields: Mapping[str, Any], configured: str) -> str:
    """Return the name of the answer's field with the reasoning. Raises ServeError 400."""
    named: str | None = fields.get("reasoning_field")
    if fields.get("include_reasoning", True):
        return named or configured
    if named not in (None, "none"):
        raise ServeError.invalid(f"include_reasoning is false and reasoning_field is {named}", "include_reasoning")
    return "none"


def _old_or_new(body: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> Any:
    """Return a field, or its form of 2023: functions, function_call. Raises ServeError 400 where both are given."""
    older = {"tools": "functions", "tool_choice": "function_call"}[name]
    old = body.get(older)
    if old is None or old == []:
        return fields.get(name)
    if fields.get(name) is not None:
        raise ServeError.invalid(f"{name} and {older} are given, which say the same: leave {older} out", older)
    if name == "tools":
        return [{"type": "function", "function": one} for one in old] if isinstance(old, list) else old
    return {"type": "function", "function": old} if isinstance(old, dict) else old


def _logprobs(fields: Mapping[str, Any]) -> int | None:
    top = fields.get("top_logprobs")
    if not fields.get("logprobs", False):
        if top:
            raise ServeError.invalid("top_logprobs needs logprobs: set it to true", "top_logprobs")
        return None
    return top or 0


def _documents(value: Any) -> list[dict[str, str]]:
    """Return the documents, which have texts only. Raises ServeError 400."""
    if not isinstance(value, list) or len(value) > MAX_DOCUMENTS:
        raise ServeError.invalid(f"documents must be a list of at most {MAX_DOCUMENTS} objects", "documents")
    for at, one in enumerate(value):
        if not isinstance(one, dict) or not all(isinstance(text, str) for text in one.values()):
            raise ServeError.invalid(f"documents[{at}] must be an object of texts, such as title and text", "documents")
    return value


def variables_of(call: Call, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the chat template. Raises ServeError 400."""
    given = fields.get("chat_template_kwargs", {})
    if not isinstance(given, dict):
        raise ServeError.invalid("chat_template_kwargs must be an object", "chat_template_kwargs")
    taken = RESERVED & set(given)
    if taken:
        raise ServeError.invalid(f"chat_template_kwargs cannot set {', '.join(sorted(taken))}", "chat_template_kwargs")
    if any(not name.isidentifier() or name.startswith("_") for name in given):
        raise ServeError.invalid("chat_template_kwargs names variables: letters, digits and _", "chat_template_kwargs")
    found: dict[str, Any] = {name: scalars(f"chat_template_kwargs.{name}", value) for name, value in given.items()}
    for name in ("enable_thinking", "reasoning_effort"):
        if name in fields:
            found[name] = fields[name]
    if fields.get("verbosity", "medium") != "medium":
        found["verbosity"] = fields["verbosity"]
    if call.state.config.server.strict_fields:
        found["known_variables"] = tuple(found)
    if "documents" in fields:
        found["documents"] = _documents(fields["documents"])
    if "chat_template" in fields:
        if not call.state.config.server.allow_request_templates:
            raise ServeError.unsupported(
                "chat_template", "chat_template is off on this server: set server.allow_request_templates"
            )
        found["chat_template"] = fields["chat_template"]
    going_on = fields.get("continue_final_message", False)
    if going_on and fields.get("add_generation_prompt", False):
        raise ServeError.invalid(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    found["continue_final_message"] = going_on
    found["add_generation_prompt"] = fields.get("add_generation_prompt", not going_on)
    if call.state.config.server.parse_special_in_content:
        found["parse_special_in_content"] = True
    return found
