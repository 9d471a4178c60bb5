"""Chat streams as clients see them, and requests whose answers are constrained."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx

__all__ = ["joined", "list_schema", "note_tool"]


def _list_of(name: str, least: int, most: int, longest: int | None) -> dict[str, Any]:
    item: dict[str, Any] = {"type": "string"} if longest is None else {"type": "string", "maxLength": longest}
    return {
        "type": "object",
        "properties": {name: {"type": "array", "items": item, "minItems": least, "maxItems": most}},
        "required": [name],
        "additionalProperties": False,
    }


def list_schema(least: int, most: int, longest: int | None = None) -> dict[str, Any]:
    """Return fields that ask for a JSON object with a list of so many strings, of at most `longest` characters."""
    schema = {"name": "list", "schema": _list_of("items", least, most, longest)}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def note_tool(least: int, most: int, longest: int | None = None) -> dict[str, Any]:
    """Return fields that ask for a call of a tool with a list as in `list_schema`."""
    function = {"name": "note", "parameters": _list_of("lines", least, most, longest)}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def joined(
    url: str, body: Any, seen: Callable[[int], None] = lambda events: None, *, seconds: float = 600.0
) -> dict[str, Any]:
    """Return a chat stream, joined: its status, texts, calls and ends by choice, and the error that it told.

    `seen` is called with the number of events so far. An error that the status reports is that of no stream: it is
    done.
    """
    told: dict[str, Any] = {"status": 0, "texts": {}, "calls": {}, "ends": {}, "error": None, "done": False}
    events = 0
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body | {"stream": True}, timeout=seconds) as answer:
        told["status"] = answer.status_code
        if answer.status_code != 200:
            answer.read()
            return told | {"error": answer.json()["error"], "done": True}
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                told["done"] = True
            elif line.startswith("data: "):
                chunk = json.loads(line[6:])
                told["error"] = chunk.get("error", told["error"])
                for choice in chunk.get("choices", []):
                    _add(told, choice)
                events += 1
                seen(events)
    return told


def _add(told: dict[str, Any], choice: dict[str, Any]) -> None:
    index, delta = choice["index"], choice["delta"]
    told["texts"][index] = told["texts"].get(index, "") + (delta.get("content") or "")
    for call in delta.get("tool_calls") or []:
        said = call["function"]
        part = (said.get("name") or "") + (said.get("arguments") or "")
        told["calls"][index] = told["calls"].get(index, "") + part
    told["ends"][index] = choice["finish_reason"] or told["ends"].get(index)
