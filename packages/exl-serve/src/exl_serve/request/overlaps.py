"""Find out whether the branches of a `oneOf` can match one value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

__all__ = ["Overlaps"]

MOST_STEPS = 5000
"""Schemas and constants that are looked at for one request: the event loop waits meanwhile."""
MOST_DEPTH = 16
KINDS = frozenset({"null", "boolean", "number", "string", "array", "object"})
EITHER = ("oneOf", "anyOf")

Parts = list[Mapping[str, Any]]


class Overlaps:
    """Compares the branches of the schemas of one request. After too many steps all that is left counts as an overlap.

    A discriminated union has none: its branches require a member with other constants, or are of other types.
    """

    def __init__(self) -> None:
        self._left = MOST_STEPS

    def has(self, schema: Mapping[str, Any], root: Any) -> bool:
        """Return whether a value might match two branches of the schema's `oneOf`; references begin at `root`."""
        branches = schema.get("oneOf")
        if not isinstance(branches, list):
            return True
        base = {name: value for name, value in schema.items() if name != "oneOf"}
        pairs = ((one, other) for at, one in enumerate(branches) for other in branches[at + 1 :])
        return not all(self._none([base, *pair], root) for pair in pairs)

    def _none(self, schemas: Sequence[Any], root: Any, depth: int = 0) -> bool:
        """Return whether types, constants and required members show that no value matches all schemas."""
        if self._left < 0 or depth > MOST_DEPTH:
            return False
        parts = _joined(schemas, root)
        if parts is None:
            return True
        kinds = KINDS.intersection(*map(_kinds, parts))
        self._left -= len(parts) + sum(len(part["enum"]) for part in parts if isinstance(part.get("enum"), list))
        values = _values(parts) if self._left >= 0 else None
        if values is not None:
            values = [one for one in values if _kind(one) in kinds]
        if not kinds or values == [] or (kinds == {"object"} and self._no_object(parts, root, depth + 1)):
            return True
        for at, part in enumerate(parts):
            for name in EITHER:
                if isinstance(part.get(name), list):
                    rest: Parts = [*parts[:at], {k: v for k, v in part.items() if k != name}, *parts[at + 1 :]]
                    return all(self._none([*rest, one], root, depth + 1) for one in part[name])
        if values is None or not all(isinstance(one, dict) for one in values):
            return False
        rest = [{k: v for k, v in part.items() if k not in ("const", "enum")} for part in parts]
        return all(self._none([_object_of(one), *rest], root, depth + 1) for one in values)

    def _no_object(self, parts: Parts, root: Any, depth: int) -> bool:
        required = (part.get("required") for part in parts)
        names = {name for given in required if isinstance(given, list) for name in given if isinstance(name, str)}
        return any(self._none([_member(part, name) for part in parts], root, depth) for name in sorted(names))


def _joined(schemas: Sequence[Any], root: Any) -> Parts | None:
    """Return the schemas with those that they refer to by `$ref` and `allOf`; None if one of them is false."""
    found: Parts = []
    waiting, seen = list(schemas), set()
    while waiting:
        one = waiting.pop()
        if one is False:
            return None
        if not isinstance(one, Mapping):
            continue
        found.append({name: value for name, value in one.items() if name not in ("allOf", "$ref")})
        if isinstance(one.get("allOf"), list):
            waiting += one["allOf"]
        reference = one.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            waiting.append(_target(reference, root))
    return found


def _target(reference: str, root: Any) -> Any:
    """Return the schema that a reference inside of the document names; True, which is any value, for other ones."""
    if not reference.startswith("#"):
        return True
    found = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return True
    return found if reference == "#" or reference.startswith("#/") else True


def _kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list):
        return KINDS
    return frozenset("number" if name == "integer" else name for name in names if isinstance(name, str))


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _values(parts: Parts) -> list[Any] | None:
    """Return the values that all `const` and `enum` allow; None if there are no such keywords."""
    found: dict[str, Any] | None = None
    for part in parts:
        for given in ([part["const"]] if "const" in part else None, part.get("enum")):
            if isinstance(given, list):
                named = {_name(one): one for one in given}
                found = named if found is None else {name: one for name, one in found.items() if name in named}
    return None if found is None else list(found.values())


def _name(value: Any) -> str:
    """Return a text that is the same for equal values: 1 and 1.0, objects in any order."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _object_of(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of this object alone."""
    members = {name: {"const": one} for name, one in value.items()}
    return {"type": "object", "required": list(value), "properties": members, "additionalProperties": False}


def _member(schema: Mapping[str, Any], name: str) -> Any:
    """Return the schema of a member of an object; True where it is not known."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)
