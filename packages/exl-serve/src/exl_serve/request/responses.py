"""Bodies of POST /v1/responses: convert items to the messages of a chat, and rename fields to those of chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from exl_serve.config.model import Limits
from exl_serve.errors import ServeError
from exl_serve.request.carried import carried_text
from exl_serve.request.fields import COMMON, CONVERSATION, SAMPLING, Field, by_name
from exl_serve.request.formats import format_of, schema_of
from exl_serve.request.internal import Constraint
from exl_serve.request.messages import ImagePart, content_of
from exl_serve.request.response_tools import full_name
from exl_serve.request.rules import anything, check_kinds, integer, one_of, string

__all__ = [
    "FIELDS",
    "NEUTRAL",
    "OF_CHAT",
    "OWN",
    "RESPONSE",
    "Asked",
    "asked_of",
]

RESPONSE: tuple[Field, ...] = (
    Field(
        "max_output_tokens",
        integer(1, 1 << 24),
        "1 to what the context leaves",
        meaning="most new tokens; absent: the server's `default_max_tokens`, or all that the context leaves",
    ),
    Field("instructions", string(1 << 20), "a text", meaning="the system message"),
    Field(
        "text",
        anything,
        "`format`: `text`, `json_object` or `json_schema`; `verbosity`: `low`, `medium`, `high`",
        meaning="the form of the answer; `verbosity` as chat's field",
    ),
    Field(
        "reasoning",
        anything,
        "`effort`; `summary`: `auto`",
        meaning="`effort` is a variable of the chat template; no summary is made, the answer has the whole reasoning",
    ),
    Field(
        "max_tool_calls",
        integer(1, 1 << 24),
        "1 or more",
        meaning="not used: it limits calls of tools that a server runs, and this one runs none",
    ),
    Field("client_metadata", anything, "anything", meaning="not used"),
    Field(
        "truncation",
        one_of("disabled", "auto"),
        "`disabled`, `auto`",
        meaning="auto: of a conversation that is too long the oldest messages are left out; the header "
        "x-exl-truncated-tokens counts their tokens",
    ),
    Field(
        "include",
        anything,
        "`message.output_text.logprobs`, `reasoning.encrypted_content`",
        meaning="what else the answer holds; the latter is the text of the reasoning in base64, for clients that send "
        "back nothing else of it",
    ),
    Field(
        "top_logprobs",
        integer(0, 20),
        "0 to 20, with `message.output_text.logprobs` in `include`",
        meaning="the most probable candidates for each token",
    ),
)
"""Fields of responses alone."""
OF_CHAT = frozenset(
    {
        *("n", "response_format", "stream_options", "return_token_ids", "return_tokens_as_token_ids"),
        "truncate_prompt_tokens",
    }
)
"""Fields of chat that responses do not have."""
FIELDS = by_name(tuple(one for one in COMMON if one.name not in OF_CHAT), SAMPLING, CONVERSATION, RESPONSE)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "prompt": (None,),
    "background": (None, False),
    "context_management": (None,),
}
"""Fields that are not offered, with the values that change nothing: nothing is kept or run in the background."""
OWN = frozenset({"input", "stream_options", *NEUTRAL})
"""Fields that this module reads."""
LOGPROBS = "message.output_text.logprobs"
CARRIED = "reasoning.encrypted_content"
"""Values of `include`."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The content of a body besides sampling and tools."""

    messages: list[dict[str, Any]]
    images: list[ImagePart]
    wanted: Constraint | None
    #: as the answer repeats it
    format: dict[str, Any]
    verbosity: str
    effort: str | None
    logprobs: int | None
    #: items of reasoning have an `encrypted_content`
    carried: bool


def asked_of(body: Mapping[str, Any], fields: Mapping[str, Any], limits: Limits) -> Asked:
    """Read a body. Raises ServeError 400, with the path of the field."""
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if not any(value == one and type(value) is type(one) for one in neutral):
            raise ServeError.unsupported(name, f"{name} is not offered: responses are not kept; send the whole input")
    options = body.get("stream_options")
    if options not in (None, {}, {"include_obfuscation": False}):
        raise ServeError.unsupported("stream_options", "stream_options: include_obfuscation is not offered")
    for name in ("tools", "tool_choice", "text", "reasoning", "metadata"):  # which the answer repeats
        _check_texts(fields.get(name), name)
    _check_metadata(fields.get("metadata", {}))
    verbosity = _verbosity(fields.get("text"))
    wanted, shape = _text_format(fields.get("text"), limits)
    other = format_of(fields, limits)
    if wanted is not None and other is not None:
        raise ServeError.invalid(f"{wanted.param} and {other.param} ask for two formats at once: give one", other.param)
    messages, images = _messages(body.get("input"), fields.get("instructions"), limits)
    effort = _effort(fields.get("reasoning"))
    include = _include(fields)
    logprobs = _logprobs(fields, include)
    return Asked(messages, images, wanted or other, shape, verbosity, effort, logprobs, CARRIED in include)


def _check_texts(value: Any, param: str) -> None:
    """Raise ServeError 400 for a lone surrogate anywhere in the value."""
    if isinstance(value, str):
        string(len(value))(param, value)
    elif isinstance(value, list):
        for at, one in enumerate(value):
            _check_texts(one, f"{param}[{at}]")
    elif isinstance(value, dict):
        for key, one in value.items():
            _check_texts(key, param)
            _check_texts(one, f"{param}.{key[:64]}")


def _check_metadata(value: Any) -> None:
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise ServeError.invalid("metadata must be an object of strings", "metadata")


def _verbosity(value: Any) -> str:
    if value is None:
        return "medium"
    if not isinstance(value, dict):
        raise ServeError.invalid("text must be an object with a format", "text")
    given = value.get("verbosity")
    return "medium" if given is None else str(one_of("low", "medium", "high")("text.verbosity", given))


def _text_format(value: Mapping[str, Any] | None, limits: Limits) -> tuple[Constraint | None, dict[str, Any]]:
    if value is None:
        return None, {"type": "text"}
    shape = value.get("format")
    if shape is None:
        return None, {"type": "text"}
    kind = shape.get("type") if isinstance(shape, dict) else None
    if kind == "text":
        return None, {"type": "text"}
    if kind == "json_object":
        return Constraint(kind="json_object", source="", param="text.format"), {"type": "json_object"}
    if kind != "json_schema":
        raise ServeError.unsupported(
            "text.format.type", f"text.format.type {str(kind)[:32]!r} is not offered: text, json_object, json_schema"
        )
    check_kinds(shape, "text.format", name=str, description=str, strict=bool)
    made = schema_of(shape.get("schema"), "text.format.schema", limits)
    schema = json.loads(made.source)  # it may come as a text
    _check_texts(schema, "text.format.schema")
    return made, {
        "type": "json_schema",
        "name": shape.get("name") or "schema",
        "description": shape.get("description"),
        "schema": schema,
        "strict": bool(shape.get("strict")),
    }


def _effort(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ServeError.invalid("reasoning must be an object with an effort", "reasoning")
    for name in ("summary", "generate_summary"):
        if value.get(name) not in (None, "auto"):
            raise ServeError.unsupported(
                f"reasoning.{name}", f"reasoning.{name} is not offered: reasoning is returned whole; give auto or none"
            )
    effort = value.get("effort")
    if effort is not None and (not isinstance(effort, str) or not 0 < len(effort) <= 64):
        raise ServeError.invalid("reasoning.effort must be a word such as low, medium or high", "reasoning.effort")
    return effort


def _include(fields: Mapping[str, Any]) -> list[str]:
    include = fields.get("include", [])
    if not isinstance(include, list) or not all(isinstance(one, str) for one in include):
        raise ServeError.invalid("include must be a list of strings", "include")
    other = next((one for one in include if one not in (LOGPROBS, CARRIED)), None)
    if other is not None:
        raise ServeError.unsupported(
            "include", f"include: {other[:64]!r} is not offered; there are {LOGPROBS} and {CARRIED}"
        )
    return include


def _logprobs(fields: Mapping[str, Any], include: list[str]) -> int | None:
    top = fields.get("top_logprobs")
    if LOGPROBS not in include:
        if top:
            raise ServeError.invalid(f"top_logprobs needs {LOGPROBS} in include", "top_logprobs")
        return None
    return top or 0


# ---- items -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Talk:
    """The messages so far. Consecutive items of the assistant are one message."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    reasoning: str = ""
    calls: set[str] = field(default_factory=set)
    images: list[ImagePart] = field(default_factory=list)

    def add(self, message: dict[str, Any]) -> None:
        if message["role"] == "assistant" and self.reasoning:
            message["reasoning_content"] = self.reasoning
        self.reasoning = ""
        self.messages.append(message)

    def call(self, call: dict[str, Any]) -> None:
        self.calls.add(call["id"])
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or self.reasoning:
            self.add({"role": "assistant", "content": ""})
        self.messages[-1].setdefault("tool_calls", []).append(call)


def _messages(value: Any, instructions: str | None, limits: Limits) -> tuple[list[dict[str, Any]], list[ImagePart]]:
    """Return (messages, their images in order)."""
    talk = _Talk()
    if isinstance(value, str):
        talk.add({"role": "user", "content": content_of(value, "input", limits)})
    elif not isinstance(value, list) or not value:
        raise ServeError.invalid("input must be a text, or a list of at least one item", "input", "invalid_messages")
    elif len(value) > limits.max_messages:
        raise _bad("input", f"{len(value)} items; at most {limits.max_messages} are taken")
    else:
        for at, item in enumerate(value):
            _take(talk, item, f"input[{at}]", limits)
    if instructions is not None:
        # Many templates take one system message, in front.
        first = talk.messages[0] if talk.messages else {}
        if first.get("role") in ("system", "developer"):
            first["content"] = f"{instructions}\n\n{first['content']}"
        else:
            talk.messages.insert(0, {"role": "system", "content": instructions})
    if not talk.messages:
        raise _bad("input", "there is no message in it")
    return talk.messages, talk.images


def _take(talk: _Talk, item: Any, param: str, limits: Limits) -> None:
    if not isinstance(item, dict):
        raise _bad(param, "an item is an object with a type")
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            said = "is missing" if role is None else f"is {str(role)[:32]!r}"
            raise _bad(f"{param}.role", f"the role {said}; it must be one of user, assistant, system, developer")
        content = content_of(item.get("content"), f"{param}.content", limits, talk.images if role == "user" else None)
        talk.add({"role": role, "content": content})
    elif kind == "function_call":
        call, name, arguments = (_string(item, key, param) for key in ("call_id", "name", "arguments"))
        if item.get("namespace") is not None:
            name = full_name(_string(item, "namespace", param), name)
        talk.call({"id": call, "type": "function", "function": {"name": name, "arguments": arguments}})
    elif kind == "function_call_output":
        call = _string(item, "call_id", param)
        if call not in talk.calls:
            raise _bad(f"{param}.call_id", f"no function_call before it has the call_id {call[:64]!r}")
        content = content_of(item.get("output"), f"{param}.output", limits, talk.images)
        talk.add({"role": "tool", "tool_call_id": call, "content": content})
    elif kind == "reasoning":
        talk.reasoning += _reasoning(item, param)
    elif kind == "item_reference":
        raise ServeError.unsupported(
            f"{param}.type", f"{param}: items are not kept; send each item itself (store: false, in most clients)"
        )
    else:
        raise ServeError.unsupported(f"{param}.type", f"{param}: items of the type {str(kind)[:64]!r} are not offered")


def _reasoning(item: Mapping[str, Any], param: str) -> str:
    """Return the text of an item of reasoning, from its content or from what an answer has carried."""
    parts = item.get("content") or []
    if not isinstance(parts, list) or not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        raise _bad(f"{param}.content", "a list of parts with a text")
    carried = item.get("encrypted_content")
    if parts or not isinstance(carried, str):
        return "".join(part["text"] for part in parts)
    return carried_text(carried)


def _string(item: Mapping[str, Any], key: str, param: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or (not value and key != "arguments"):
        raise _bad(f"{param}.{key}", "a text is needed")
    return value


def _bad(param: str, what: str) -> ServeError:
    return ServeError.invalid(f"{param}: {what}", param, "invalid_messages")
