"""The part of a tool's schema that a grammar can follow."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from exl_serve.request.overlaps import Overlaps

__all__ = ["followed", "not_followed"]

_NOT_FOLLOWED = frozenset(
    {
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef"),
    }
)
"""Keywords that only forbid values, and that no grammar here can follow: without them more values are allowed."""
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"}
)
_DRAFTS = frozenset(
    {
        *(f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7)),
        *(f"https://json-schema.org/draft/{name}/schema" for name in ("2019-09", "2020-12")),
    }
)
_LOOKING_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9bB]")
"""Look-around, back references and word boundaries of a pattern."""
_DATA = frozenset({"const", "enum", "default", "examples"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose value has names of the author's choice as keys."""


def followed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without the keywords that a grammar cannot follow, and with anyOf for oneOf.

    It allows all values that the whole allows.
    """
    found = {name: _inside(name, value) for name, value in schema.items() if not _is_left_out(name, value, schema)}
    if not isinstance(found.get("oneOf"), list):
        return found
    if "anyOf" not in found:
        return {"anyOf" if name == "oneOf" else name: value for name, value in found.items()}
    both = found.get("allOf")
    found["allOf"] = [*(both if isinstance(both, list) else ()), {"anyOf": found.pop("oneOf")}]
    return found


def not_followed(
    schema: Mapping[str, Any], path: str, overlaps: Overlaps, root: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield the paths of the keywords that `followed` leaves out, but for those that forbid nothing.

    `root`: where references begin, if that is not the schema.
    """
    root = schema if root is None else root
    for name, value in schema.items():
        if _is_left_out(name, value, schema):
            if not _forbids_nothing(name, value, schema):
                yield f"{path}.{name}"
        elif name not in _DATA:
            if _looks_around(name, value) or (name == "oneOf" and overlaps.has(schema, root)):
                yield f"{path}.{name}"
            for step, one in _schemas_of(name, value):
                yield from not_followed(one, f"{path}.{name}{step}", overlaps, root)


def _inside(name: str, value: Any) -> Any:
    if name in _DATA:
        return value
    if name in _NAMED and isinstance(value, Mapping):
        kept = {
            key: one for key, one in value.items() if name != "patternProperties" or not _LOOKING_AROUND.search(key)
        }
        return {key: followed(one) if isinstance(one, Mapping) else one for key, one in kept.items()}
    if isinstance(value, Mapping):
        return followed(value)
    if isinstance(value, list):
        return [followed(one) if isinstance(one, Mapping) else one for one in value]
    return value


def _looks_around(name: str, value: Any) -> bool:
    """Whether the keyword is patternProperties with a name that looks around."""
    return name == "patternProperties" and isinstance(value, Mapping) and any(map(_LOOKING_AROUND.search, value))


def _schemas_of(name: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the schemas of a keyword, each with the rest of its path."""
    if isinstance(value, Mapping) and name in _NAMED:
        yield from ((f".{key}", one) for key, one in value.items() if isinstance(one, Mapping))
    elif isinstance(value, Mapping):
        yield "", value
    elif isinstance(value, list):
        yield from ((f"[{at}]", one) for at, one in enumerate(value) if isinstance(one, Mapping))


def _is_left_out(name: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if name == "format":
        return isinstance(value, str) and value not in _FORMATS and schema.get("type") not in ("integer", "number")
    if name == "pattern":
        return isinstance(value, str) and _LOOKING_AROUND.search(value) is not None
    if name == "$schema":  # https://json-schema.org/draft-07/schema# is a common error
        return isinstance(value, str) and value.removesuffix("#") not in _DRAFTS
    if name == "additionalProperties":  # it would forbid the members whose pattern is left out
        return _looks_around("patternProperties", schema.get("patternProperties"))
    return name in _NOT_FOLLOWED


def _forbids_nothing(name: str, value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a keyword that is left out changes nothing, such as the one that every name of a member is a text."""
    if name == "propertyNames":
        return value in (True, {}, {"type": "string"})
    if name in ("then", "else"):
        return "if" not in schema
    if name in ("minContains", "maxContains"):
        return "contains" not in schema
    if name in ("unevaluatedItems", "unevaluatedProperties", "additionalProperties"):
        return value is True or value == {}
    return value is False if name == "uniqueItems" else value == {} and name.startswith("depend")
