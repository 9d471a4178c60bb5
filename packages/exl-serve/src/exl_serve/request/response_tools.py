"""Tools of POST /v1/responses, in the form of chat completions: functions, alone or in namespaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from exl_serve.errors import ServeError
from exl_serve.request.rules import check_kinds

__all__ = ["LEFT_OUT", "ResponseTools", "full_name", "tool_choice_as_chat", "tools_as_chat"]

LEFT_OUT = frozenset({"web_search", "image_generation"})
"""Types of tools that run at OpenAI, and that clients offer next to their functions with every request.

The model is not told of them, and the header of unknown fields names them. Alone they are rejected.
"""


@dataclass(slots=True)
class ResponseTools:
    """The functions of a request."""

    #: in the form of chat completions, with their full names
    chat: list[dict[str, Any]] = field(default_factory=list)
    #: where each of them is in the request
    paths: list[str] = field(default_factory=list)
    #: the tools that are offered, as the answer repeats them
    shown: list[dict[str, Any]] = field(default_factory=list)
    #: (namespace, name) by full name
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)


def full_name(namespace: str, name: str) -> str:
    """Return the name by which the model calls a function of a namespace."""
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def tools_as_chat(value: Any) -> ResponseTools:
    """Return the tools of a request. Raises ServeError 400."""
    found = ResponseTools()
    if value is None:
        return found
    if not isinstance(value, list):
        raise ServeError.invalid("tools must be a list of tools", "tools")
    for at, tool in enumerate(value):
        param = f"tools[{at}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind in LEFT_OUT:
            continue
        if kind == "namespace":
            _add_namespace(found, tool, param)
        else:
            _add_function(found, tool, kind, param)
        found.shown.append(tool)
    if value and not found.shown:
        raise _not_offered("tools[0]", value[0]["type"])
    return found


def _add_namespace(found: ResponseTools, tool: Mapping[str, Any], param: str) -> None:
    name, inner = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not name:
        raise ServeError.invalid(f"{param}.name must be the namespace's name", f"{param}.name")
    if not isinstance(inner, list) or not inner:
        raise ServeError.invalid(f"{param}.tools must be a list of at least one function", f"{param}.tools")
    check_kinds(tool, param, description=str)
    for at, one in enumerate(inner):
        kind = one.get("type") if isinstance(one, dict) else None
        _add_function(found, one, kind, f"{param}.tools[{at}]", name)


def _add_function(found: ResponseTools, tool: Any, kind: Any, param: str, namespace: str | None = None) -> None:
    if kind != "function":
        raise _not_offered(param, kind)
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise ServeError.invalid(f"{param}.name must be the function's name", f"{param}.name")
    check_kinds(tool, param, description=str, strict=bool)
    inner = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    if namespace is not None:
        inner["name"] = full_name(namespace, name)
        found.namespaces[inner["name"]] = (namespace, name)
    found.chat.append({"type": "function", "function": inner})
    found.paths.append(param)


def _not_offered(param: str, kind: Any) -> ServeError:
    return ServeError.unsupported(
        f"{param}.type",
        f"{param} is {str(kind)[:64]!r}: tools are functions here, alone or in a namespace; no other is offered",
    )


def tool_choice_as_chat(value: Any) -> Any:
    """Return the tool choice in the form of chat completions. Raises ServeError 400."""
    if isinstance(value, dict) and value.get("type") not in ("function", "allowed_tools"):
        kind = str(value.get("type"))[:64]
        raise ServeError.unsupported(
            "tool_choice.type", f"tool_choice.type {kind!r} is not offered: function or allowed_tools"
        )
    return value
