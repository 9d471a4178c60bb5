"""From what the caller gives (schema, pattern, grammar, options) to llguidance's grammar text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from exl_filters.errors import FilterCompileError
from exl_filters.llg import caught, llguidance

__all__ = ["BOUNDED_WHITESPACE", "grammar_text"]

BOUNDED_WHITESPACE = r"[ ]|\n[ \t]{0,20}"
"""At most one space, or a newline and indentation, at each place where JSON allows whitespace. Unbounded whitespace is
what models
run away into (spec FG-8); this still takes compact, single-spaced and indented JSON."""


def grammar_text(
    source: Mapping[str, Any], *, whitespace: str, no_forcing: bool, leading_space: bool
) -> tuple[str, dict[str, Any]]:
    """llguidance's grammar for the one entry of `source` that is not None, and that entry.

    Raises `FilterCompileError` when there is not exactly one, or it is not of its kind.
    """
    given = {name: value for name, value in source.items() if value is not None}
    if len(given) != 1:
        raise FilterCompileError(f"give exactly one of {', '.join(source)}; got {', '.join(given) or 'none'}")
    ((kind, value),) = given.items()
    if kind == "llg":
        return _string(kind, value), given
    if kind == "json_schema":
        body = f"%json {json.dumps(_schema(value, whitespace))}"
    elif kind == "regex":
        body = f"/{_slashes_escaped(_string(kind, value))}/"
    elif kind == "choice":
        body = " | ".join(json.dumps(option) for option in _options(value))
    else:
        return _lark(kind, _string(kind, value), no_forcing, leading_space), given
    space = '" "? ' if leading_space else ""
    lark = f"{_options_line(no_forcing)}start: {space}({body})\n" if kind == "choice" else ""
    if kind == "regex":
        lark = f"{_options_line(no_forcing)}start: {space}REGEX\nREGEX: {body}\n"
    return llguidance().LLMatcher.grammar_from_lark(lark or f"{_options_line(no_forcing)}start: {space}{body}\n"), given


def _options_line(no_forcing: bool) -> str:
    return '%llguidance {"no_forcing": true}\n' if no_forcing else ""


def _string(kind: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise FilterCompileError(f"{kind} must be a non-empty string; got {value!r:.60}")
    return value


def _schema(value: Any, whitespace: str) -> Any:
    """The schema as JSON data of our own, unwrapped from `{"name": ..., "schema": ...}`, with the whitespace rule put
    in.
    """
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    try:
        schema = json.loads(value) if isinstance(value, str) else json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise FilterCompileError(f"json_schema is no JSON: {error}") from error
    if isinstance(schema, dict) and isinstance(schema.get("schema"), dict | bool) and "name" in schema:
        schema = schema["schema"]
    if schema is True:
        schema = {}
    if schema is False:
        raise FilterCompileError("the schema false allows nothing")
    if not isinstance(schema, dict):
        raise FilterCompileError(f"json_schema must be an object or a boolean; got {schema!r:.60}")
    options = {**_whitespace(whitespace), **schema.get("x-guidance", {})}
    # Never lenient: a keyword that cannot be enforced is an error, whatever the schema's author asks llguidance for.
    options["lenient"] = False
    return {**schema, "x-guidance": options}


def _whitespace(rule: str) -> dict[str, Any]:
    if rule == "bounded":
        return {"whitespace_pattern": BOUNDED_WHITESPACE}
    if rule == "compact":
        return {"whitespace_flexible": False}
    if rule == "any":
        return {"whitespace_flexible": True}
    try:
        re.compile(rule)
    except re.error as error:
        raise FilterCompileError(
            f'whitespace is "bounded", "compact", "any" or a pattern; {rule!r}: {error}'
        ) from error
    return {"whitespace_pattern": rule}


def _options(value: Any) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise FilterCompileError(f"choice must be a list of at least one string; got {value!r:.60}")
    if not all(isinstance(option, str) for option in value):
        raise FilterCompileError(f"choice must hold strings; got {value!r:.60}")
    return list(dict.fromkeys(value))


def _slashes_escaped(pattern: str) -> str:
    """A pattern for use between slashes: unescaped slashes and line breaks written as escapes."""
    escaped = re.sub(r"\\.|/", lambda m: m[0] if m[0] != "/" else r"\/", pattern, flags=re.DOTALL)
    return escaped.replace("\n", r"\n").replace("\r", r"\r")


def _lark(kind: str, text: str, no_forcing: bool, leading_space: bool) -> Any:
    module = llguidance()
    if leading_space:
        raise FilterCompileError(
            f"leading_space goes with json_schema, regex and choice; write it into the {kind} grammar"
        )
    if kind in ("gbnf", "ebnf"):
        from llguidance.gbnf_to_lark import any_to_lark

        text = caught(lambda: any_to_lark(text))
    return module.LLMatcher.grammar_from_lark(_with_no_forcing(text) if no_forcing else text)


def _with_no_forcing(text: str) -> str:
    """The grammar with the option set, in the `%llguidance` line it has (llguidance takes one only) or in a new one."""
    found = re.search(r"^%llguidance[ \t]*(\{.*\})?[ \t]*$", text, re.MULTILINE)
    if found is None:
        if "%llguidance" in text:
            raise FilterCompileError(
                "no_forcing: write it into the grammar's own %llguidance line, which is not on one line"
            )
        return _options_line(True) + text
    try:
        options = {**json.loads(found[1] or "{}"), "no_forcing": True}
    except ValueError as error:
        raise FilterCompileError(f"the grammar's %llguidance line is no JSON: {error}") from error
    return f"{text[: found.start()]}%llguidance {json.dumps(options)}{text[found.end() :]}"
