"""Structural tags: free text in which each region that begins with a trigger follows a JSON schema."""

from __future__ import annotations

import json
from typing import Any

from exl_serve.config.model import Limits
from exl_serve.errors import ServeError
from exl_serve.request.internal import Constraint
from exl_serve.stream.grammars import json_rule

__all__ = ["structural_of"]

MOST_TEXT = 256
"""Characters of a begin, an end or a trigger."""


def structural_of(value: Any, param: str, limits: Limits) -> Constraint:
    """Return the constraint of `{"structures": [{"begin", "schema", "end"}, ...], "triggers": [text]}`.

    After the trigger the output goes on as one of the structures whose begin starts with it: the rest of the begin, a
    JSON value of the schema, the end. Then anything may follow again. Raises ServeError 400.
    """
    if not isinstance(value, dict):
        raise ServeError.invalid(f"{param} must be an object with structures and triggers", param)
    if "format" in value:
        raise ServeError.unsupported(f"{param}.format", f"{param}.format is not offered: give structures and triggers")
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not 0 < len(structures) <= limits.max_tools:
        raise ServeError.invalid(
            f"{param}.structures must be a list of 1 to {limits.max_tools} objects", f"{param}.structures"
        )
    if not isinstance(triggers, list) or not triggers:
        raise ServeError.invalid(f"{param}.triggers must be a list with a text", f"{param}.triggers")
    if len(triggers) > 1:
        raise ServeError.unsupported(
            f"{param}.triggers", f"{param}.triggers has {len(triggers)} texts; one is offered: what all begins share"
        )
    trigger = _text(triggers[0], f"{param}.triggers[0]")
    rules, size = [], 0
    for at, one in enumerate(structures):
        made, schema = _rule(one, f"{param}.structures[{at}]", at, trigger)
        rules += made
        size += schema
    if size > limits.max_schema_bytes:
        raise ServeError.invalid(
            f"the schemas of {param} have {size} characters; together they have at most {limits.max_schema_bytes}",
            f"{param}.structures",
            "schema_too_complex",
        )
    start = " | ".join(f"tag_{at}" for at in range(len(structures)))
    source = "\n".join([f"start: {start}", *rules])
    parts = tuple(f"{param}.structures[{at}].schema" for at in range(len(structures)))
    return Constraint(kind="lark", source=source, after=trigger, then="rearm", param=param, parts=parts)


def _rule(value: Any, param: str, at: int, trigger: str) -> tuple[list[str], int]:
    """Return the rules of a structure after the trigger, and the characters of its schema."""
    if not isinstance(value, dict):
        raise ServeError.invalid(f"{param} must be an object with begin, schema and end", param)
    begin, end = (_text(value.get(name), f"{param}.{name}", empty=name == "end") for name in ("begin", "end"))
    if not begin.startswith(trigger):
        raise ServeError.invalid(f"{param}.begin does not start with the trigger {trigger!r}", f"{param}.begin")
    schema = value.get("schema", {})
    if not isinstance(schema, dict):
        raise ServeError.invalid(f"{param}.schema must be an object, a JSON schema", f"{param}.schema")
    texts = [json.dumps(text, ensure_ascii=False) if text else "" for text in (begin.removeprefix(trigger), end)]
    rule = f"tag_{at}: {texts[0]} json_{at} {texts[1]}"
    return [rule, f"json_{at}: {json_rule(schema, schema, strict=True)}"], len(json.dumps(schema))


def _text(value: Any, param: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or len(value) > MOST_TEXT or not (value or empty):
        raise ServeError.invalid(f"{param} must be a text of {0 if empty else 1} to {MOST_TEXT} characters", param)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ServeError.invalid(f"{param} holds a lone surrogate, which has no UTF-8", param) from None
    return value
