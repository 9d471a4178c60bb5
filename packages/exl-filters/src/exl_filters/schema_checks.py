"""Find schema parts that llguidance would enforce only in part, or at too high a cost, before compiling."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterator
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from exl_filters.errors import FilterCompileError
from exl_filters.same_value import parts_of_values

__all__ = ["DATA", "NAMED", "allowed_escapes", "check_schema", "divisor_of", "schemas_in"]

# Keywords whose value is data, and those whose value has names of the author's choice as keys.
DATA = frozenset({"const", "enum", "default", "examples"})
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
# A divisor compiles to a state machine with as many states: compile time and memory grow with it.
LARGEST_DIVISOR = 100_000
# Characters that these escapes write have no other spelling when the escapes are allowed.
ESCAPES = 'nrbtf\\"'
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Keywords that name a schema, so that a reference other than a path may refer to it.
ANCHORS = frozenset({"$id", "id", "$anchor", "$dynamicAnchor"})


def check_schema(schema: Any) -> None:
    """Raise `FilterCompileError` for llguidance's own options and for parts that it would not enforce.

    minProperties: llguidance counts members, and a name may come twice. Required names come once each, so one more
    member than those can be distinguished.
    """
    anchored = _has_anchored_data(schema, data=False)
    parts: list[dict[str, Any]] = []
    for at, sub in schemas_in(schema, "#"):
        _check_references(anchored, at, sub)
        if "x-guidance" in sub:
            raise FilterCompileError(
                f"{at} has x-guidance = {sub['x-guidance']!r:.60}, which would change the output's form; leave it out "
                "(white space: the filter's argument `whitespace`)"
            )
        _check_least_members(at, sub)
        if not _is_float(sub.get("multipleOf", 1)):
            raise FilterCompileError(
                f"{at}: multipleOf is above the limit of {sys.float_info.max}; leave it out and check the number "
                "afterwards"
            )
        parts.append(sub)
    try:
        _check_numbers("#", parts)
    except FilterCompileError:
        # First assume that all parts hold for one number. Only on failure, find out which of them do.
        values = parts_of_values(schema, parts)
        if values is None:
            raise
        for at, together in values:
            _check_numbers(at, together)


def _check_numbers(at: str, parts: list[dict[str, Any]]) -> None:
    """Check the bounds and divisors of one number."""
    _check_bounds(at, _joined([_bounds_of(part) for part in parts]))
    # Divisors combine to their least common multiple.
    divisor = 1
    for part in parts:
        divisor = math.lcm(divisor, divisor_of(part))
        if divisor > LARGEST_DIVISOR:
            raise FilterCompileError(
                f"{at}: multipleOf {divisor} (without factors 2 and 5; of all that may hold for one number) is above "
                f"the limit of {LARGEST_DIVISOR}; leave it out and check the number afterwards"
            )


def allowed_escapes(schema: Any) -> str:
    r"""Return the escapes for strings, as llguidance's `json_allowed_escapes`.

    Without \u: with it, an open object could hold a member `{"\u0061": ...}` under a name of `properties` or a required
    name without being checked. A schema without names may use it; strings with control characters need it.
    """
    found = list(schemas_in(schema, "#"))
    if not any(_names_members(sub) for _, sub in found):
        return ESCAPES + "u"
    for at, sub in found:
        for keyword in ("const", "enum"):
            if keyword in sub and _needs_u(sub[keyword]):
                raise FilterCompileError(
                    rf"{at}/{keyword}: {sub[keyword]!r:.60} has control characters, written \u00XX; a schema with "
                    "properties disables that escape, which could spell names; leave these characters out"
                )
    return ESCAPES


def schemas_in(schema: Any, at: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all objects in a schema that may be read as schemas, with their places, also under unknown keywords."""
    if isinstance(schema, list):
        for index, value in enumerate(schema):
            yield from schemas_in(value, f"{at}/{index}")
    if not isinstance(schema, dict):
        return
    yield at, schema
    for name, value in schema.items():
        if name in NAMED and isinstance(value, dict):
            for key, sub in value.items():
                yield from schemas_in(sub, f"{at}/{name}/{key}")
        elif name not in DATA and name != "x-guidance":
            yield from schemas_in(value, f"{at}/{name}")


def _names_members(sub: dict[str, Any]) -> bool:
    counted = sub.get("required") and "minProperties" in sub
    return bool(sub.get("properties") or sub.get("patternProperties") or counted)


def _check_references(anchored: bool, at: str, sub: dict[str, Any]) -> None:
    """Reject references into data, which is not checked here. anchored: a part of the data has a name."""
    for keyword in REFERENCES:
        target = sub.get(keyword)
        if not isinstance(target, str):
            continue
        path = target[1:] if target.startswith("#") else None
        if path is not None and (not path or path.startswith("/")):
            hidden = _passes_through_data([part for part in path.split("/") if part])
        else:
            hidden = anchored
        if hidden:
            raise FilterCompileError(
                f"{at} has {keyword} {target!r:.60}, which leads into const, enum, default or examples: "
                "these are data; put the schema under $defs"
            )


def _passes_through_data(parts: list[str]) -> bool:
    named = False
    for part in parts:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if not named and (key in DATA or key == "x-guidance"):
            return True
        named = not named and key in NAMED
    return False


def _has_anchored_data(value: Any, data: bool) -> bool:
    """Whether a reference by name could lead into the data."""
    if isinstance(value, list):
        return any(_has_anchored_data(item, data) for item in value)
    if not isinstance(value, dict):
        return False
    if data and any(isinstance(value.get(key), str) for key in ANCHORS):
        return True
    return any(_has_anchored_data(sub, data or key in DATA) for key, sub in value.items())


# Lower bounds and upper bounds of a number, each with whether the bound itself is excluded.
_Bounds = tuple[list[tuple[float, bool]], list[tuple[float, bool]]]


def _bounds_of(sub: dict[str, Any]) -> _Bounds:
    def found(inclusive: str, exclusive: str) -> list[tuple[float, bool]]:
        pairs = ((sub.get(inclusive), sub.get(exclusive) is True), (sub.get(exclusive), True))
        return [(v, out) for v, out in pairs if isinstance(v, int | float) and not isinstance(v, bool)]

    return found("minimum", "exclusiveMinimum"), found("maximum", "exclusiveMaximum")


def _joined(bounds: list[_Bounds]) -> _Bounds:
    return [b for lower, _ in bounds for b in lower], [b for _, upper in bounds for b in upper]


def _check_bounds(at: str, bounds: _Bounds) -> None:
    """Reject a bound that llguidance does not enforce.

    It lets an excluded whole number through where the other bound has the same whole part.
    """
    lower, upper = bounds
    lows, highs = sorted({low for low, _ in lower}), sorted({high for high, _ in upper})
    for low, out in lower:
        if out and low >= 0 and _is_whole(low):
            _check_next(at, "exclusiveMinimum", low, highs, low + 1)
    # The same check, mirrored at zero.
    mirrored = [-low for low in reversed(lows)]
    for high, out in upper:
        if out and high <= 0 and _is_whole(high):
            _check_next(at, "exclusiveMaximum", high, mirrored, 1 - high)


def _check_next(at: str, keyword: str, value: float, others: list[float], end: float) -> None:
    """Raise when one of the ascending `others` lies between |value| and `end`."""
    place = bisect_right(others, abs(value))
    if place < len(others) and others[place] < end:
        other = others[place] if keyword == "exclusiveMinimum" else -others[place]
        raise FilterCompileError(
            f"{at}: {keyword} {value} next to the bound {other} cannot be enforced ({value} itself would be let "
            f"through); give {'min' if keyword == 'exclusiveMinimum' else 'max'}imum with the nearest number wanted"
        )


def _check_least_members(at: str, sub: dict[str, Any]) -> None:
    least, required = sub.get("minProperties"), sub.get("required")
    if not isinstance(least, int | float):
        return
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    if least > len(names) + 1:
        raise FilterCompileError(
            f"{at} has minProperties {least}, which cannot be enforced above {len(names) + 1} here: a name could come "
            "twice; name the members under required"
        )


def divisor_of(sub: dict[str, Any]) -> int:
    """Return the part of `multipleOf` that determines the number of states: its digits without factors 2 and 5.

    For an integer that no float can hold, which `check_schema` rejects: a number above LARGEST_DIVISOR.
    """
    value = sub.get("multipleOf", 1)
    if not _is_float(value):
        return LARGEST_DIVISOR + 1
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return 1
    number = abs(Fraction(str(value)).numerator)
    for factor in (2, 5):
        while number and number % factor == 0:
            number //= factor
    return number or 1


def _is_float(value: Any) -> bool:
    """Whether the value is not an integer beyond the range of floats. Such an integer may have thousands of digits."""
    return not isinstance(value, int) or abs(value) <= sys.float_info.max


def _is_whole(number: float) -> bool:
    """Whether the number, an int or a float, is finite and has no fraction."""
    return isinstance(number, int) or number.is_integer()


def _needs_u(value: Any) -> bool:
    r"""Whether a string in the value has a character that llguidance writes only as \u00XX."""
    if isinstance(value, dict):
        return any(_needs_u(member) for member in value.values())
    if isinstance(value, list):
        return any(_needs_u(item) for item in value)
    return isinstance(value, str) and any(c == "\x7f" or (c < " " and c not in "\n\r\b\t\f") for c in value)
