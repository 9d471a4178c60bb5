"""JSON schemas of a factory's parameters, from its signature and annotations."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union

__all__ = ["params_schema"]

_SIMPLE = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "array",
}


def params_schema(factory: Any, *, skip: int) -> dict[str, Any]:
    """Return an object schema of the parameters after the first `skip`; parameters without a usable annotation stay
    open.
    """
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return {"type": "object"}
    target = factory.__init__ if inspect.isclass(factory) else factory
    try:
        hints = typing.get_type_hints(target)
    except Exception:  # annotations of plugins may name anything
        hints = {}
    properties: dict[str, Any] = {}
    required = []
    open_ended = False
    for parameter in list(signature.parameters.values())[skip:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            open_ended = open_ended or parameter.kind is parameter.VAR_KEYWORD
            continue
        schema = _type_schema(hints.get(parameter.name))
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif isinstance(parameter.default, str | int | float | bool | type(None)):
            schema["default"] = parameter.default
        properties[parameter.name] = schema
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": open_ended}


def _type_schema(hint: Any) -> dict[str, Any]:
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        parts = [_type_schema(a) for a in args]
        return {"anyOf": parts} if all(parts) else {}
    if origin in (list, set, frozenset, tuple, Sequence):
        items = _type_schema(args[0]) if args else {}
        return {"type": "array", "items": items} if items else {"type": "array"}
    if origin in (dict, Mapping):
        return {"type": "object"}
    return {}
