"""Members of a request's objects that nothing reads: they are named as unknown fields are.

Messages, functions and documents are not looked at: chat templates get them whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from exl_serve.request.overlaps import Overlaps
from exl_serve.request.response_tools import LEFT_OUT
from exl_serve.request.tool_schemas import not_followed

__all__ = ["unknown_members"]

MOST = 20
"""Names that are looked for."""
_FORMATS: dict[str, frozenset[str]] = {
    "text": frozenset({"type"}),
    "json_object": frozenset({"type"}),
    "json_schema": frozenset({"type", "json_schema"}),
    "structural_tag": frozenset({"type", "structures", "triggers", "format"}),
}
_SCHEMA = frozenset({"name", "description", "schema", "strict"})
_FLAT = frozenset({"type", "name", "description", "parameters", "strict"})
_NESTED = frozenset({"type", "function"})
"""Members of a tool as responses and as chat have it."""
_STRUCTURE = frozenset({"begin", "schema", "end"})
_PARTS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("text", "input_text"), frozenset({"type", "text"})),
    # As answers of /v1/responses have it.
    "output_text": frozenset({"type", "text", "annotations", "logprobs"}),
    "refusal": frozenset({"type", "text", "refusal"}),
    **dict.fromkeys(("image_url", "input_image"), frozenset({"type", "image_url", "detail"})),
}
_IMAGE = frozenset({"url", "detail"})
_ITEMS: dict[str, frozenset[str]] = {
    "message": frozenset({"type", "role", "content", "id", "status", "phase"}),
    "function_call": frozenset({"type", "id", "call_id", "name", "namespace", "arguments", "status"}),
    "function_call_output": frozenset({"type", "id", "call_id", "output", "status"}),
    "reasoning": frozenset({"type", "id", "summary", "content", "encrypted_content", "status"}),
}
_PLAIN: dict[str, frozenset[str]] = {
    "stream_options": frozenset({"include_usage", "continuous_usage_stats", "include_obfuscation"}),
    "reasoning": frozenset({"effort", "summary", "generate_summary"}),
    "text": frozenset({"format", "verbosity"}),
    "tool_choice": frozenset({"type", "function", "name", "allowed_tools", "mode", "tools"}),
    "function_call": frozenset({"name"}),
}
"""Objects by the field that holds one."""


def unknown_members(body: Mapping[str, Any]) -> list[str]:
    """Return the paths of members that nothing reads, at most `MOST`. null counts as absent; faults are not errors."""
    return list(islice(_members(body), MOST))


def _members(body: Mapping[str, Any]) -> Iterator[str]:
    for name, known in _PLAIN.items():
        yield from _others(body.get(name), name, known)
    yield from _of_format(body.get("response_format"), "response_format")
    structured = body.get("structured_outputs")
    if isinstance(structured, dict):
        yield from _of_structures(structured.get("structural_tag"), "structured_outputs.structural_tag")
    text = body.get("text")
    if isinstance(text, dict) and isinstance(shape := text.get("format"), dict):
        known = _SCHEMA | {"type"} if shape.get("type") == "json_schema" else frozenset({"type"})
        yield from _others(shape, "text.format", known)
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        yield from _others(choice.get("function"), "tool_choice.function", frozenset({"name"}))
        allowed = choice.get("allowed_tools")
        yield from _others(allowed, "tool_choice.allowed_tools", frozenset({"mode", "tools"}))
        for at, tool in enumerate(_listed(allowed.get("tools") if isinstance(allowed, dict) else choice.get("tools"))):
            path = f"tool_choice.allowed_tools.tools[{at}]"
            yield from _others(tool, path, frozenset({"type", "function", "name"}))
            yield from _others(tool.get("function"), f"{path}.function", frozenset({"name"}))
        if isinstance(choice.get("function"), dict) and choice.get("name") is not None:
            yield "tool_choice.name"
    overlaps = Overlaps()
    for at, tool in enumerate(_listed(body.get("tools"))):
        yield from _of_tool(tool, f"tools[{at}]", overlaps)
    for at, function in enumerate(_listed(body.get("functions"))):
        yield from _of_schema(function, f"functions[{at}]", overlaps)
    for at, message in enumerate(_listed(body.get("messages"))):
        yield from _of_content(message.get("content"), f"messages[{at}].content")
    for at, item in enumerate(_listed(body.get("input"))):
        kind = item.get("type", "message")
        yield from _others(item, f"input[{at}]", _ITEMS.get(kind) if isinstance(kind, str) else None)
        for name in ("content", "output"):
            if kind != "reasoning":
                yield from _of_content(item.get(name), f"input[{at}].{name}")


def _others(value: Any, path: str, known: frozenset[str] | None) -> Iterator[str]:
    """Yield the paths of an object's members outside of `known`; none of another value, or of an unknown kind."""
    if isinstance(value, dict) and known is not None:
        for name, one in value.items():
            if name not in known and one is not None:
                yield f"{path}.{name}"


def _listed(value: Any) -> list[dict[str, Any]]:
    """Return a list whose entries are all objects; an empty one for anything else, which has an error of its own."""
    return value if isinstance(value, list) and all(isinstance(one, dict) for one in value) else []


def _of_tool(tool: Mapping[str, Any], path: str, overlaps: Overlaps) -> Iterator[str]:
    kind = tool.get("type")
    if isinstance(kind, str) and kind in LEFT_OUT:
        yield path
    elif kind == "namespace":
        # Its description has no place in the form in which models see functions.
        yield from _others(tool, path, frozenset({"type", "name", "tools"}))
        for at, one in enumerate(_listed(tool.get("tools"))):
            yield from _of_tool(one, f"{path}.tools[{at}]", overlaps)
    elif isinstance(function := tool.get("function"), dict):
        yield from _others(tool, path, _NESTED)
        yield from _of_schema(function, f"{path}.function", overlaps)
    else:
        yield from _others(tool, path, _FLAT)
        yield from _of_schema(tool, path, overlaps)


def _of_schema(function: Mapping[str, Any], path: str, overlaps: Overlaps) -> Iterator[str]:
    """Yield the keywords of a tool's schema that calls need not follow: those of a strict one are errors."""
    if isinstance(function.get("parameters"), dict) and not function.get("strict"):
        yield from not_followed(function["parameters"], f"{path}.parameters", overlaps)


def _of_format(value: Any, path: str) -> Iterator[str]:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return
    yield from _others(value, path, _FORMATS.get(kind))
    if kind == "json_schema":
        yield from _others(value.get("json_schema"), f"{path}.json_schema", _SCHEMA)
    elif kind == "structural_tag":
        yield from _of_structures(value, path)


def _of_structures(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for at, one in enumerate(_listed(value.get("structures"))):
            yield from _others(one, f"{path}.structures[{at}]", _STRUCTURE)


def _of_content(value: Any, path: str) -> Iterator[str]:
    for at, part in enumerate(_listed(value)):
        kind = part.get("type")
        yield from _others(part, f"{path}[{at}]", _PARTS.get(kind) if isinstance(kind, str) else None)
        yield from _others(part.get("image_url"), f"{path}[{at}].image_url", _IMAGE)
