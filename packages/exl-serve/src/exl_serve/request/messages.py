"""Messages and tools of a chat request, checked, in the form that chat templates use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exl_serve.config.model import Limits
from exl_serve.errors import ServeError
from exl_serve.request.body import LongUrl, check_depth
from exl_serve.request.rules import check_kinds
from exl_serve.request.tool_schemas import followed
from exl_serve.stream.family import ToolSpec

__all__ = ["ImagePart", "check_results", "content_of", "messages_of", "tool_choice_of", "tools_of"]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
WITH_IMAGES = ("user", "tool")
"""Roles whose messages may hold images."""
_ELSEWHERE = ("reasoning_content", "reasoning", "thinking", "refusal")
"""Fields of which an assistant's message has one instead of a content."""
_REFUSED_PARTS = ("input_audio", "video_url", "file", "input_file")


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image of a conversation, as the client sent it. `param` is its place in the request."""

    url: str | LongUrl
    detail: str
    param: str


def messages_of(value: Any, limits: Limits, images: list[ImagePart] | None = None) -> list[dict[str, Any]]:
    """Return the messages in the form of chat templates.

    Images are appended to `images`, in order; without `images` they are rejected. Raises ServeError 400
    `invalid_messages`, `unsupported_modality`, `remote_images_disabled` or `image_invalid`.
    """
    if not isinstance(value, list) or not value:
        raise ServeError.invalid("messages must be a list of at least one message", "messages", "invalid_messages")
    if len(value) > limits.max_messages:
        raise _bad("messages", f"{len(value)} messages; at most {limits.max_messages} are taken")
    renewed = _without_function_calls(value)
    return [_message(one, f"messages[{at}]", limits, images) for at, one in enumerate(renewed)]


def check_results(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ServeError 400 for the result of a call that no message before it has."""
    calls: set[str] = set()
    for at, one in enumerate(messages):
        calls.update(call["id"] for call in one.get("tool_calls", ()) if isinstance(call.get("id"), str))
        id = one.get("tool_call_id")
        if one["role"] == "tool" and id is not None and id not in calls:
            param = f"messages[{at}].tool_call_id"
            raise _bad(param, f"no call before it has the id {str(id)[:64]!r}")


def _without_function_calls(messages: list[Any]) -> list[Any]:
    """Return messages in which `function_call` and the role `function`, OpenAI's form of 2023, are tool calls and
    their results.
    """
    found: list[Any] = []
    id = ""
    for at, one in enumerate(messages):
        role = one.get("role") if isinstance(one, dict) else None
        if role == "assistant" and one.get("function_call") is not None and not one.get("tool_calls"):
            id = f"call{at:05}"  # nine letters and digits: templates of Mistral demand that
            call = {"id": id, "type": "function", "function": one["function_call"]}
            found.append({key: value for key, value in one.items() if key != "function_call"} | {"tool_calls": [call]})
        elif role == "function":
            found.append(one | {"role": "tool"} | ({"tool_call_id": id} if id else {}))
        else:
            found.append(one)
    return found


def _bad(param: str, what: str) -> ServeError:
    return ServeError.invalid(f"{param}: {what}", param, "invalid_messages")


def _message(value: Any, param: str, limits: Limits, images: list[ImagePart] | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(param, "a message is an object with a role")
    role = value.get("role")
    if role not in ROLES:
        said = "is missing" if role is None else f"is {str(role)[:32]!r}"
        raise _bad(f"{param}.role", f"the role {said}; it must be one of {', '.join(ROLES)}")
    found = {key: one for key, one in value.items() if one is not None}
    calls = found.get("tool_calls")
    if calls is not None:
        found["tool_calls"] = _calls(calls, f"{param}.tool_calls", limits)
    if "content" in found:
        taken = images if role in WITH_IMAGES else None
        found["content"] = content_of(found["content"], f"{param}.content", limits, taken)
    elif role == "assistant" and any(found.get(name) for name in _ELSEWHERE):
        found["content"] = content_of(found.get("refusal", ""), f"{param}.refusal", limits)
    elif not found.get("tool_calls"):
        raise _bad(f"{param}.content", "a message has a content, or tool_calls")
    else:
        found["content"] = ""  # templates add it to other text
    return found


def content_of(
    value: Any, param: str, limits: Limits, images: list[ImagePart] | None = None
) -> str | list[dict[str, Any]]:
    """Return the content of a message.

    It is a text, or with images a list of parts `{"type": "text", "text"}`, `{"type": "image"}`. Raises ServeError 400
    as `messages_of` does.
    """
    if isinstance(value, str):
        return _text(value, param)
    if not isinstance(value, list) or len(value) > limits.max_parts:
        raise _bad(param, f"the content is a string, or a list of at most {limits.max_parts} parts")
    parts: list[dict[str, Any]] = []
    for at, part in enumerate(value):
        place = f"{param}[{at}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "input_text", "output_text", "refusal"):
            said = part.get("text", part.get("refusal"))
            if not isinstance(said, str):
                raise _bad(f"{place}.text", "a part of text has a text")
            parts.append({"type": "text", "text": _text(said, place)})
        elif kind in ("image_url", "input_image") and images is not None:
            images.append(_image(part, place))
            parts.append({"type": "image"})
        elif kind in ("image_url", "input_image", *_REFUSED_PARTS):
            raise ServeError.invalid(
                f"{place}: a part of the type {kind} is not taken here", place, "unsupported_modality"
            )
        else:
            raise _bad(place, "a part is an object of the type text or image_url")
    if any(part["type"] == "image" for part in parts):
        return parts
    # Most templates take only a string.
    return "".join(part["text"] for part in parts)


def _image(part: dict[str, Any], place: str) -> ImagePart:
    given = part.get("image_url")
    detail = part.get("detail")
    if isinstance(given, dict):
        detail = given.get("detail", detail)
        given = given.get("url")
    if not isinstance(given, str | LongUrl):
        raise _bad(f"{place}.image_url", "an image has a url")
    if detail not in (None, "auto", "low", "high"):
        raise _bad(f"{place}.image_url.detail", f"the detail is {str(detail)[:32]!r}; it must be auto, low or high")
    if not given.startswith("data:"):
        raise ServeError.invalid(
            f"{place}: this server fetches no images; send the file as data:image/TYPE;base64,DATA",
            place,
            "remote_images_disabled",
        )
    return ImagePart(given, detail or "auto", place)


def _text(value: str, param: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _bad(param, "the text holds a lone surrogate, which has no UTF-8") from None
    return value


def _calls(value: Any, param: str, limits: Limits) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise _bad(param, "tool_calls is a list")
    found = []
    for at, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad(f"{param}[{at}]", "a call is an object with a function that has a name and arguments")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            # Templates write an object as the model would; a text that is not an object, or is nested too deeply, stays
            # a text: a model may have written it.
            try:
                check_depth(arguments, limits.max_depth)
                parsed = json.loads(arguments) if arguments.strip() else {}
            except (ServeError, ValueError):
                parsed = arguments
            arguments = parsed if isinstance(parsed, dict) else arguments
        found.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return found


def tools_of(
    value: Any, limits: Limits, paths: Sequence[str] | None = None
) -> tuple[list[dict[str, Any]], tuple[ToolSpec, ...]]:
    """Return the tools in the form of templates, and their specs.

    The specs of tools that are not strict have the part of their schemas that a grammar can follow. `paths`: where each
    tool is in the request; absent: in the list `tools`. Raises ServeError 400.
    """
    if value is None:
        return [], ()
    if not isinstance(value, list) or len(value) > limits.max_tools:
        raise ServeError.invalid(f"tools must be a list of at most {limits.max_tools} tools", "tools")
    plain: list[dict[str, Any]] = []
    specs: list[ToolSpec] = []
    for at, tool in enumerate(value):
        param = f"tools[{at}]" if paths is None else paths[at]
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            raise ServeError.unsupported(
                f"{param}.type", f"{param}: tools are functions here; no other type is offered"
            )
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ServeError.invalid(f"{param}.function must be an object with a name", f"{param}.function.name")
        check_kinds(function, f"{param}.function", description=str, strict=bool)
        parameters = function.get("parameters")
        parameters = {} if parameters is None else parameters
        if not isinstance(parameters, Mapping):
            raise ServeError.invalid(
                f"{param}.function.parameters must be an object, a JSON schema",
                f"{param}.function.parameters",
                "invalid_tool_schema",
            )
        size = len(json.dumps(parameters))
        if size > limits.max_schema_bytes:
            raise ServeError.invalid(
                f"{param}.function.parameters has {size} bytes; a schema has at most {limits.max_schema_bytes}",
                f"{param}.function.parameters",
                "schema_too_complex",
            )
        if any(spec.name == function["name"] for spec in specs):
            raise ServeError.invalid(f"two tools are called {function['name']!r}", f"{param}.function.name")
        strict = bool(function.get("strict"))
        specs.append(
            ToolSpec(
                function["name"],
                function.get("description") or "",
                parameters if strict else followed(parameters),
                strict,
                f"{param}.function.parameters",
            )
        )
        plain.append({"type": "function", "function": dict(function)})
    return plain, tuple(specs)


def tool_choice_of(value: Any, tools: tuple[ToolSpec, ...]) -> tuple[str, tuple[ToolSpec, ...]]:
    """Return (choice, tools that may be called): none, auto, required, or the name of a tool. Raises ServeError 400."""
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        # Chat completions have an object of this name, responses its members.
        given = value.get("allowed_tools", value)
        return _mode_of(given), _allowed(given, tools)
    return _choice_of(value, tools), tools


def _mode_of(given: Any) -> str:
    mode = given.get("mode", "auto") if isinstance(given, dict) else None
    if mode not in ("auto", "required"):
        raise ServeError.invalid("the mode of allowed_tools must be auto or required", "tool_choice")
    return str(mode)


def _allowed(given: Mapping[str, Any], tools: tuple[ToolSpec, ...]) -> tuple[ToolSpec, ...]:
    """Return the tools that `allowed_tools` names."""
    named = given.get("tools")
    if not isinstance(named, list) or not named:
        raise ServeError.invalid("allowed_tools must have a list of at least one tool", "tool_choice")
    names = [_choice_of(one, tools) for one in named if isinstance(one, dict)]
    if len(names) < len(named):
        raise ServeError.invalid("a tool of allowed_tools must be an object that names a function", "tool_choice")
    return tuple(tool for tool in tools if tool.name in names)


def _choice_of(value: Any, tools: tuple[ToolSpec, ...]) -> str:
    if value is None:
        return "auto" if tools else "none"
    if isinstance(value, dict):
        function = value.get("function")
        name = function.get("name") if isinstance(function, dict) else value.get("name")
        if not isinstance(name, str) or all(tool.name != name for tool in tools):
            raise ServeError.invalid(f"tool_choice names {str(name)[:64]!r}, which is not in tools", "tool_choice")
        return name
    if value not in ("none", "auto", "required"):
        raise ServeError.invalid(
            "tool_choice must be none, auto, required, or an object that names a function", "tool_choice"
        )
    if value == "required" and not tools:
        raise ServeError.invalid("tool_choice is required, and there are no tools", "tool_choice")
    return value if tools else "none"
