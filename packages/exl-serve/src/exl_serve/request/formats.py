"""Formats that an answer must follow: OpenAI's response_format, and the names of vLLM, llama.cpp and TabbyAPI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from exl_serve.config.model import Limits
from exl_serve.errors import ServeError
from exl_serve.request.body import check_depth
from exl_serve.request.internal import Constraint
from exl_serve.request.rules import check_kinds
from exl_serve.request.structural import structural_of

__all__ = ["format_of", "schema_of"]

_NULLS = (":null", ",null", "[null")
"""How a null begins that is no part of a word in compact JSON."""


def format_of(fields: Mapping[str, Any], limits: Limits) -> Constraint | None:
    """Return the format that a request asks for. Raises ServeError 400 for more than one, or a malformed one."""
    found = [made for name in _READERS if name in fields and (made := _READERS[name](fields[name], limits)) is not None]
    if len(found) > 1:
        names = " and ".join(made.param for made in found)
        raise ServeError.invalid(f"{names} ask for two formats at once: give one", found[1].param)
    return found[0] if found else None


def _response_format(value: Any, limits: Limits) -> Constraint | None:
    param = "response_format"
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise ServeError.invalid(f"{param} must be an object with a type", param)
    kind = value["type"]
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(kind="json_object", source="", param=param)
    if kind == "json_schema":
        inner = value.get("json_schema")
        if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict | bool):
            raise ServeError.invalid(
                f"{param}.json_schema must be an object with a schema", f"{param}.json_schema.schema"
            )
        check_kinds(inner, f"{param}.json_schema", name=str, description=str, strict=bool)
        return schema_of(inner["schema"], f"{param}.json_schema.schema", limits)
    if kind == "structural_tag":
        return structural_of(value, param, limits)
    raise ServeError.unsupported(
        f"{param}.type", f"{param}.type {kind[:32]!r} is not offered: text, json_object, json_schema, structural_tag"
    )


def schema_of(value: Any, param: str, limits: Limits) -> Constraint:
    """Return the constraint of a JSON schema, or of its text. Raises ServeError 400."""
    value = _read(value, param, limits)
    if not isinstance(value, dict | bool):
        raise ServeError.invalid(f"{param} must be a JSON schema: an object or a boolean", param, "invalid_schema")
    source = _written(value)
    size = len(source.encode())
    if size > limits.max_schema_bytes:
        raise ServeError.invalid(
            f"{param} has {size} bytes; a schema has at most {limits.max_schema_bytes}",
            param,
            "schema_too_complex",
        )
    return Constraint(kind="json_schema", source=source, param=param)


def _read(value: Any, param: str, limits: Limits) -> Any:
    """Return what the JSON of a text holds; any other value as it is. Raises ServeError 400."""
    if not isinstance(value, str):
        return value
    check_depth(value, limits.max_depth)
    try:
        return json.loads(value)
    except ValueError as error:
        raise ServeError.invalid(f"{param} is not JSON: {error}", param, "invalid_schema") from None


def _written(schema: Any) -> str:
    """Return the JSON of a parsed schema. The event loop waits meanwhile, and msgspec is the faster writer."""
    try:
        source = msgspec.json.encode(schema).decode()
    except (OverflowError, ValueError):  # integers of more than 64 bits, lone surrogates
        return json.dumps(schema)
    # An infinite number would be a null.
    return json.dumps(schema) if any(null in source for null in _NULLS) else source


def _structured(value: Any, limits: Limits) -> Constraint:
    param = "structured_outputs"
    known = {
        **{"json": schema_of, "regex": _regex, "choice": _choice, "grammar": _grammar},
        "structural_tag": _structural,
    }
    given = [] if not isinstance(value, dict) else [name for name, one in value.items() if one is not None]
    if len(given) != 1 or given[0] not in known:
        raise ServeError.invalid(f"{param} must be an object with exactly one of {', '.join(known)}", param)
    return known[given[0]](value[given[0]], f"{param}.{given[0]}", limits)


def _structural(value: Any, param: str, limits: Limits) -> Constraint:
    """Return the constraint of structural tags, which may come as JSON in a text."""
    return structural_of(_read(value, param, limits), param, limits)


def _regex(value: Any, param: str, limits: Limits) -> Constraint:
    if not isinstance(value, str) or not 0 < len(value) <= limits.max_regex_bytes:
        raise ServeError.invalid(f"{param} must be a pattern of 1 to {limits.max_regex_bytes} characters", param)
    return Constraint(kind="regex", source=value, param=param)


def _choice(value: Any, param: str, _: Limits) -> Constraint:
    texts = list(value) if isinstance(value, list | tuple) else []
    if not texts or not all(isinstance(one, str) for one in texts):
        raise ServeError.invalid(f"{param} must be a list of texts", param)
    return Constraint(kind="choice", source=json.dumps(texts), param=param)


def _grammar(value: Any, param: str, limits: Limits) -> Constraint:
    if not isinstance(value, str) or not 0 < len(value) <= limits.max_schema_bytes:
        raise ServeError.invalid(f"{param} must be a grammar of 1 to {limits.max_schema_bytes} characters", param)
    # llama.cpp's EBNF names its start `root ::=`; Lark's rules are `start: ...`.
    return Constraint(kind="gbnf" if "::=" in value else "lark", source=value, param=param)


_READERS: dict[str, Any] = {
    "response_format": _response_format,
    "structured_outputs": _structured,
    "guided_json": lambda value, limits: schema_of(value, "guided_json", limits),
    "guided_regex": lambda value, limits: _regex(value, "guided_regex", limits),
    "guided_choice": lambda value, limits: _choice(value, "guided_choice", limits),
    "guided_grammar": lambda value, limits: _grammar(value, "guided_grammar", limits),
}
