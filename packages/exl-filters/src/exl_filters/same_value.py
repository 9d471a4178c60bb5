"""Find the parts of a JSON schema that may describe the same value.

`allOf`, `$ref` and the chosen branch of `anyOf` describe the same value. So do the members of one name, and the items,
of parts that do. llguidance intersects such parts; for bounds and divisors of numbers, the result depends on both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

__all__ = ["parts_of_values"]

Part = dict[str, Any]
# A place in a schema, and parts there that constrain one value together.
_Together = tuple[str, list[Part]]

# Combinations of branches distinguished at one value; beyond, all branches count as chosen.
MOST_WAYS = 64
# Values distinguished; beyond, the answer is unknown.
MOST_VALUES = 5_000
MOST_PARTS = 500_000


class _Unknown(Exception):  # noqa: N818 - no error: the values cannot be compared
    """A reference that is not understood here, or too many values."""


def parts_of_values(schema: Part, parts: list[Part]) -> list[_Together] | None:
    """For each value that a schema describes, return the parts that may constrain it together; None for unknown.

    `parts` are all parts of the schema. Errs on the side of too many parts together.
    """
    try:
        return list(_values(schema, _anchors(schema, parts)))
    except (_Unknown, RecursionError):
        return None


def _values(schema: Part, names: dict[str, Part]) -> Iterator[_Together]:
    todo: list[_Together] = [("#", [schema])]
    seen: set[frozenset[int]] = set()
    parts = 0
    while todo:
        at, start = todo.pop()
        key = frozenset(map(id, start))
        if key in seen:
            continue
        seen.add(key)
        for together in _ways(schema, names, start):
            parts += len(together)
            if len(seen) > MOST_VALUES or parts > MOST_PARTS:
                raise _Unknown
            yield at, together
            todo.extend((f"{at}/{name}", inner) for name, inner in _inner(together) if inner)


def _ways(schema: Part, names: dict[str, Part], start: list[Part]) -> Iterator[list[Part]]:
    """Yield the parts that constrain a value together with `start`, for each choice of branches."""
    todo: list[tuple[list[Part], list[Part], frozenset[int]]] = [(list(start), [], frozenset())]
    ways = 1
    while todo:
        open_, together, held = todo.pop()
        held_here = set(held)
        together = list(together)
        choices: list[list[Part]] = []
        while open_:
            part = open_.pop()
            if id(part) in held_here:
                continue
            held_here.add(id(part))
            together.append(part)
            open_.extend(_referred(schema, names, part))
            open_.extend(_schemas(part.get("allOf")))
            for keyword in ("anyOf", "oneOf"):
                branches = _schemas(part.get(keyword))
                if ways * len(branches) > MOST_WAYS:
                    open_.extend(branches)
                elif branches:
                    ways *= len(branches)
                    choices.append(branches)
        if not choices:
            if _some_type(together):
                yield together
            continue
        todo.extend((list(chosen), together, frozenset(held_here)) for chosen in itertools.product(*choices))


def _some_type(together: list[Part]) -> bool:
    """Whether a value may have the types of all these parts."""
    left: set[str] | None = None
    for part in together:
        given = part.get("type")
        kinds = {given} if isinstance(given, str) else set(map(str, given)) if isinstance(given, list) else None
        if kinds is not None:
            kinds |= {"integer"} if "number" in kinds else set()
            left = kinds if left is None else left & kinds
    return left is None or bool(left)


def _inner(together: list[Part]) -> Iterator[tuple[str, list[Part]]]:
    """Yield the values inside a value of these parts, each with the parts that constrain it."""
    named = {name for part in together for name in _members(part, "properties")}
    patterns = [sub for part in together for sub in _members(part, "patternProperties").values()]
    others = [(part, part["additionalProperties"]) for part in together if _is(part.get("additionalProperties"))]
    for name in named:
        own = [_members(part, "properties").get(name) for part in together]
        rest = [sub for part, sub in others if name not in _members(part, "properties")]
        yield f"properties/{name}", [sub for sub in own if _is(sub)] + patterns + rest
    if patterns:
        yield "patternProperties", patterns + [sub for part, sub in others if not _members(part, "patternProperties")]
    yield "additionalProperties", [sub for _, sub in others]
    rows = [_row(part) for part in together]
    for index in range(max((len(row) for row, _ in rows), default=0)):
        found = [row[index] if index < len(row) else rest for row, rest in rows]
        yield f"prefixItems/{index}", [sub for sub in found if _is(sub)]
    yield "items", [rest for _, rest in rows if _is(rest)]


def _row(part: Part) -> tuple[list[Any], Any]:
    """Return the schemas of the first items, and the schema of the rest."""
    items = part.get("items")
    if isinstance(items, list):
        return items, part.get("additionalItems")
    first = part.get("prefixItems")
    return (first if isinstance(first, list) else []), items


def _members(part: Part, keyword: str) -> dict[str, Any]:
    found = part.get(keyword)
    return {name: sub for name, sub in found.items() if _is(sub)} if isinstance(found, dict) else {}


def _schemas(value: Any) -> list[Part]:
    return [sub for sub in value if _is(sub)] if isinstance(value, list) else []


def _is(value: Any) -> bool:
    return isinstance(value, dict)


def _referred(schema: Part, names: dict[str, Part], part: Part) -> list[Part]:
    """Return the parts that a part refers to."""
    if "$dynamicRef" in part or "$recursiveRef" in part:
        raise _Unknown
    target = part.get("$ref")
    if not isinstance(target, str):
        return []
    if not target.startswith("#"):
        raise _Unknown
    if target[1:2] != "/" and target != "#":
        if target[1:] not in names:
            raise _Unknown
        return [names[target[1:]]]
    found: Any = schema
    for step in unquote(target[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, dict) and step in found:
            found = found[step]
        else:
            raise _Unknown
    return [found] if _is(found) else []


def _anchors(schema: Part, parts: list[Part]) -> dict[str, Part]:
    """Return the parts by their `$anchor`. A repeated name, or a part with an `$id` (paths then start anew), is
    unknown.
    """
    found: dict[str, Part] = {}
    for part in parts:
        name = part.get("$anchor")
        if isinstance(name, str) and found.setdefault(name, part) is not part:
            raise _Unknown
        if part is not schema and any(isinstance(part.get(key), str) for key in ("$id", "id")):
            raise _Unknown
    return found
