"""Rules for the values of a request's fields: each checks a value, and is a JSON schema as well."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from exl_serve.errors import ServeError

__all__ = [
    "Rule",
    "anything",
    "biases",
    "boolean",
    "check_kinds",
    "ids",
    "integer",
    "listed",
    "number",
    "one_of",
    "scalar",
    "scalars",
    "string",
    "strings",
]

_IDS = re.compile("^([0-9]{1,9}(, ?[0-9]{1,9})*)?$")
"""Token ids with commas between them, or none."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The allowed values of a field.

    `check(param, value)` returns the clean value or raises ServeError; `schema` is the same rule as a JSON schema,
    without null.
    """

    check: Callable[[str, Any], Any]
    schema: Mapping[str, Any]

    def __call__(self, param: str, value: Any) -> Any:
        """Return the clean value. Raises ServeError 400."""
        return self.check(param, value)


def _refuse(param: str, value: object, wanted: str) -> ServeError:
    return ServeError.invalid(f"{param} is {_shown(value)}; it must be {wanted}", param)


def _shown(value: object) -> str:
    """Return a value as a short text. A list or an object may be as large as a body, so it is only named."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value[:64] if isinstance(value, str) else value)
    return text if len(text) <= 64 else text[:61] + "..."


def number(low: float, high: float) -> Rule:
    """Accept a finite number from low to high."""

    def check(param: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _refuse(param, value, f"a number from {low:g} to {high:g}")
        if not low <= value <= high:
            raise _refuse(param, value, f"a number from {low:g} to {high:g}")
        return float(value)

    return Rule(check, {"type": "number", "minimum": low, "maximum": high})


def integer(low: int, high: int) -> Rule:
    """Accept a whole number; 3.0 counts as one."""

    def check(param: str, value: Any) -> int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not low <= value <= high:
            raise _refuse(param, value, f"a whole number from {low} to {high}")
        return int(value)

    return Rule(check, {"type": "integer", "minimum": low, "maximum": high})


def _boolean(param: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(param, value, "true or false")
    return value


boolean = Rule(_boolean, {"type": "boolean"})


def string(most: int) -> Rule:
    """Accept a string of at most `most` characters."""

    def check(param: str, value: Any) -> str:
        if not isinstance(value, str) or len(value) > most:
            raise _refuse(param, value, f"a string of at most {most} characters")
        _check_text(param, value)
        return value

    return Rule(check, {"type": "string", "maxLength": most})


def _check_text(param: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ServeError.invalid(f"{param} holds a lone surrogate, which has no UTF-8", param) from None


def strings(most: int, length: int) -> Rule:
    """Accept a string, or a list of at most `most` strings, none of them empty."""

    def check(param: str, value: Any) -> tuple[str, ...]:
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or len(found) > most:
            raise _refuse(param, value, f"a string, or a list of at most {most} strings")
        for at, one in enumerate(found):
            if not isinstance(one, str) or not 0 < len(one) <= length:
                raise _refuse(f"{param}[{at}]", one, f"a string of 1 to {length} characters")
            _check_text(f"{param}[{at}]", one)
        return tuple(found)

    one_text = {"type": "string", "minLength": 1, "maxLength": length}
    return Rule(check, {"anyOf": [one_text, {"type": "array", "items": one_text, "maxItems": most}]})


def listed(texts: Rule) -> Rule:
    """Accept what `texts` does, and a JSON list of texts as one text, with or without its brackets: TabbyAPI's clients
    send that. What is no JSON is a text.
    """

    def check(param: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str) and value.startswith(("[", '"')):
            try:
                value = json.loads(value if value.startswith("[") else f"[{value}]")
            except RecursionError:
                raise _refuse(param, value, "a text, or a list of texts") from None
            except ValueError:
                pass  # a text that begins so
        found: tuple[str, ...] = texts(param, value)
        return found

    return Rule(check, texts.schema)


def ids(most: int) -> Rule:
    """Accept a token id, a list of at most `most` token ids, or the list as a text with commas, as TabbyAPI does."""

    def check(param: str, value: Any) -> tuple[int, ...]:
        if isinstance(value, str) and len(value) <= 11 * most and _IDS.fullmatch(value):
            value = [int(one) for one in value.split(",")] if value else []
        found = [value] if isinstance(value, int | float) else value
        if not isinstance(found, list) or len(found) > most:
            raise _refuse(param, value, f"a list of at most {most} token ids")
        one = integer(0, (1 << 31) - 1)
        return tuple(one(f"{param}[{at}]", entry) for at, entry in enumerate(found))

    token = {"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1}
    text = {"type": "string", "pattern": _IDS.pattern}
    return Rule(check, {"anyOf": [token, {"type": "array", "items": token, "maxItems": most}, text]})


def biases(most: int) -> Rule:
    """Accept {token id: bias from -100 to 100}; -100 bans, as in OpenAI's API."""

    def check(param: str, value: Any) -> dict[int, float]:
        if not isinstance(value, dict) or len(value) > most:
            raise _refuse(param, value, f"an object of at most {most} token ids with their biases")
        found: dict[int, float] = {}
        for key, bias in value.items():
            if not key.isascii() or not key.isdecimal() or len(key) > 9:
                raise _refuse(f"{param}.{key[:32]}", key, "a token id")
            amount = number(-100, 100)(f"{param}.{key}", bias)
            found[int(key)] = -math.inf if amount == -100 else amount
        return found

    schema = {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": most,
    }
    return Rule(check, schema)


def one_of(*words: str) -> Rule:
    """Accept one of these words."""

    def check(param: str, value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise _refuse(param, value, f"one of {', '.join(words)}")
        return value

    return Rule(check, {"enum": list(words)})


def _scalar(param: str, value: Any) -> Any:
    if isinstance(value, str):
        _check_text(param, value)
    elif value is not None and not isinstance(value, int | float):
        raise _refuse(param, value, "a text, a number, true or false")
    return value


scalar = Rule(_scalar, {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}]})
"""Accepts a text, a number, true or false."""


def scalars(param: str, value: Any) -> Any:
    """Return a scalar, or a list of scalars and such lists. Raises ServeError 400 for an object anywhere in it."""
    if isinstance(value, list):
        return [scalars(f"{param}[{at}]", one) for at, one in enumerate(value)]
    return scalar(param, value)


def check_kinds(given: Mapping[str, Any], param: str, **kinds: type) -> None:
    """Raise ServeError 400 where a member is not of its kind, a text or true or false; null counts as absent."""
    for name, kind in kinds.items():
        if given.get(name) is not None and not isinstance(given[name], kind):
            wanted = "true or false" if kind is bool else "a text"
            raise ServeError.invalid(f"{param}.{name} must be {wanted}", f"{param}.{name}")


anything = Rule(lambda param, value: value, {})
"""Accepts any value; the field's reader checks it."""
