"""Translate the caller's source (schema, pattern, grammar, options) to llguidance's grammar text.

Like all modules that it imports, this one needs the standard library and llguidance only: the process in which grammars
are tried translates them as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from exl_filters.drafts import of_one_draft
from exl_filters.errors import FilterCompileError
from exl_filters.lark_rules import endless_rules
from exl_filters.library import caught, llguidance
from exl_filters.schema_checks import allowed_escapes, check_schema

__all__ = ["BOUNDED_WHITESPACE", "grammar_text", "plain_source", "rules_of", "text_source", "the_one_source"]

BOUNDED_WHITESPACE = r"[ ]|\n[ \t]{0,20}"
"""Whitespace of JSON by default: at most one space, or a newline and indentation, wherever JSON allows whitespace.

Models run away into unbounded whitespace. This pattern still takes compact, single-spaced and indented JSON.
"""


# Characters of a grammar or schema. The largest schema of JSONSchemaBench has about half as many.
MAX_SOURCE = 1_000_000
# llguidance accepts JSON nested 127 deep.
MAX_DEPTH = 120
MAX_WHITESPACE = 1000


def the_one_source(sources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the one entry that is not None. Raises `FilterCompileError` when there is not exactly one."""
    given = {name: value for name, value in sources.items() if value is not None}
    if len(given) != 1:
        raise FilterCompileError(f"give exactly one of {', '.join(sources)}; got {', '.join(given) or 'none'}")
    return given


def text_source(source: Mapping[str, Any]) -> dict[str, Any]:
    """Check the entry's type and size and return it as texts, a schema as JSON: for another process."""
    ((kind, value),) = source.items()
    if kind == "json_schema":
        return {kind: _schema_text(value)}
    return {kind: _options(value) if kind == "choice" else _string(kind, value)}


def plain_source(source: Mapping[str, Any]) -> dict[str, Any]:
    """Check the entry and return it as plain data: a schema unwrapped, options without repeats."""
    ((kind, value),) = source.items()
    if kind == "json_schema":
        return {kind: _schema(value)}
    return {kind: _options(value) if kind == "choice" else _string(kind, value)}


def grammar_text(
    source: Mapping[str, Any],
    *,
    whitespace: str,
    no_forcing: bool,
    leading_space: bool,
) -> str:
    """Return llguidance's grammar for the one entry of `source`, as `plain_source` returns it."""
    ((kind, value),) = source.items()
    if kind == "llg":
        return _checked_llg(value)
    if kind == "json_schema":
        body = f"%json {json.dumps(_with_whitespace(value, whitespace))}"
    elif kind == "regex":
        body = f"/{_slashes_escaped(value)}/"
    elif kind == "choice":
        body = " | ".join(json.dumps(option) for option in value)
    else:
        if kind in ("gbnf", "ebnf"):
            value = _converted(value)
        return str(_lark(kind, value, leading_space))
    space = '" "? ' if leading_space else ""
    lark = f"{_options_line(no_forcing)}start: {space}({body})\n" if kind == "choice" else ""
    if kind == "regex":
        lark = f"{_options_line(no_forcing)}start: {space}REGEX\nREGEX: {body}\n"
    lark = lark or f"{_options_line(no_forcing)}start: {space}{body}\n"
    return str(llguidance().LLMatcher.grammar_from_lark(lark))


def rules_of(name: str, source: Mapping[str, Any], *, whitespace: str = "bounded") -> str:
    """Return the lines of a Lark grammar that define the rule `name` as a JSON schema, a pattern or a choice.

    For a part of a larger Lark grammar. A pattern also defines the terminal of the same name in capitals.

    Args:
        name: The rule, in small letters.
        source: One entry, json_schema, regex or choice, as `ExLlamaV2GrammarFilter` takes it.
        whitespace: Whitespace in JSON, as `ExLlamaV2GrammarFilter` takes it.

    Raises:
        FilterCompileError: the source cannot be enforced, or is of another kind.
    """
    ((kind, value),) = plain_source(source).items()
    if kind == "json_schema":
        return f"{name}: %json {json.dumps(_with_whitespace(value, whitespace))}"
    if kind == "choice":
        return f"{name}: {' | '.join(json.dumps(option) for option in value)}"
    if kind == "regex":
        return f"{name}: {name.upper()}\n{name.upper()}: /{_slashes_escaped(value)}/"
    raise FilterCompileError(f"{kind} is a grammar of its own; rules are made of json_schema, regex or choice")


def _options_line(no_forcing: bool) -> str:
    return '%llguidance {"no_forcing": true}\n' if no_forcing else ""


def _string(kind: str, value: Any) -> str:
    # A blank is a valid pattern, but not a valid grammar.
    if not isinstance(value, str) or not (value if kind == "regex" else value.strip()):
        raise FilterCompileError(f"{kind} must be a non-empty string; got {value!r:.60}")
    return _of_size(kind, value)


def _of_size(kind: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FilterCompileError(f"{kind} has an unpaired surrogate at {error.start}, which has no UTF-8") from error
    if len(text) > MAX_SOURCE:
        raise FilterCompileError(f"{kind} has {len(text)} characters; the limit is {MAX_SOURCE}: make it smaller")
    return text


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise FilterCompileError(f"json_schema is nested more than {MAX_DEPTH} deep: use $defs and $ref")
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]


def _schema_text(value: Any) -> str:
    """Return the JSON text of a schema."""
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise FilterCompileError(f"json_schema is not JSON: {error}") from error
    return _of_size("json_schema", text)


def _schema(value: Any) -> dict[str, Any]:
    """Return the schema as a private copy of JSON data, unwrapped from `{"name": ..., "schema": ...}`."""
    text = _schema_text(value)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FilterCompileError(f"json_schema is not JSON: {error}") from error
    if isinstance(schema, dict) and isinstance(schema.get("schema"), dict | bool) and "name" in schema:
        schema = schema["schema"]
    if schema is True:
        schema = {}
    if schema is False:
        raise FilterCompileError("the schema false allows nothing")
    if not isinstance(schema, dict):
        raise FilterCompileError(f"json_schema must be an object or a boolean; got {schema!r:.60}")
    _check_depth(schema)
    return schema


def _with_whitespace(schema: dict[str, Any], whitespace: str) -> dict[str, Any]:
    """Add llguidance's options to the schema; they replace any that the schema holds."""
    schema = of_one_draft(schema)
    check_schema(schema)
    options = {**_whitespace(whitespace), "json_allowed_escapes": allowed_escapes(schema), "lenient": False}
    return {**schema, "x-guidance": options}


def _whitespace(rule: str) -> dict[str, Any]:
    if rule == "bounded":
        return {"whitespace_pattern": BOUNDED_WHITESPACE}
    if rule == "compact":
        return {"whitespace_flexible": False}
    if rule == "any":
        return {"whitespace_flexible": True}
    if len(rule) > MAX_WHITESPACE:
        raise FilterCompileError(f"whitespace has {len(rule)} characters; the limit is {MAX_WHITESPACE}")
    try:
        re.compile(rule)
    except (re.error, RecursionError, OverflowError) as error:
        raise FilterCompileError(
            f'whitespace is "bounded", "compact", "any" or a pattern; {rule!r}: {error}'
        ) from error
    return {"whitespace_pattern": rule}


def _options(value: Any) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise FilterCompileError(f"choice must be a list of at least one string; got {value!r:.60}")
    if not all(isinstance(option, str) for option in value):
        raise FilterCompileError(f"choice must hold strings; got {value!r:.60}")
    _of_size("choice", "".join(value))
    return list(dict.fromkeys(value))


def _slashes_escaped(pattern: str) -> str:
    """Escape unescaped slashes and line breaks, for a pattern between slashes."""
    breaks = {"\n": r"\n", "\r": r"\r", "/": r"\/"}

    def escaped(found: re.Match[str]) -> str:
        # A backslash before a line break means that line break.
        return breaks.get(found[0]) or breaks.get(found[0][1:] if found[0] != r"\/" else "") or found[0]

    return re.sub(r"\\.|[/\n\r]", escaped, pattern, flags=re.DOTALL)


def _converted(text: str) -> str:
    llguidance()
    from llguidance.gbnf_to_lark import any_to_lark

    return str(caught(lambda: any_to_lark(text)))


def _lark(kind: str, text: str, leading_space: bool) -> Any:
    module = llguidance()
    if leading_space:
        raise FilterCompileError(
            f"leading_space goes with json_schema, regex and choice; write it into the {kind} grammar"
        )
    return module.LLMatcher.grammar_from_lark(_checked_lark(text))


def _checked_lark(text: str) -> str:
    """Return the grammar with forcing off. Raises `FilterCompileError` where a rule has no finite text, or a schema is
    not enforced whole.

    llguidance follows forced text to its end, and never returns where there is no end: with `r: /x*/ r`; or with `A B`
    where `A: /a+/` takes every a and `B: /ab/` wants one more. The mask that hangs may come late in a text. JSON
    schemas, single patterns and choices have no such case.
    """
    endless = endless_rules(text)
    if endless:
        raise FilterCompileError(
            f"the rule {endless[0]!r} has no finite text: each of its alternatives needs such a rule again; add an "
            "alternative that does not"
        )
    return _with_no_forcing(_with_checked_schemas(text))


def _with_checked_schemas(text: str) -> str:
    """Return a Lark grammar whose JSON schemas are enforced whole, but for those with llguidance's option `lenient`."""
    parts, end = [], 0
    for found in re.finditer(r"%json[ \t\r\n]*(?=\{)", text):
        if found.start() < end:
            continue
        try:
            schema, after = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            continue  # llguidance has an error for it, or it is in a text
        options = schema.pop("x-guidance", {})
        if isinstance(options, dict) and options.get("lenient") is True:
            continue
        read = of_one_draft(schema)
        check_schema(read)
        if read is not schema:
            parts += [text[end : found.end()], json.dumps({**read, "x-guidance": options})]
            end = after
    return "".join([*parts, text[end:]])


def _checked_llg(text: str) -> str:
    """Check llguidance's own form: JSON that may hold Lark, or Lark."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return _checked_lark(text)
    for grammar in data.get("grammars", ()) if isinstance(data, dict) else ():
        if isinstance(grammar, dict) and isinstance(grammar.get("lark_grammar"), str):
            grammar["lark_grammar"] = _checked_lark(grammar["lark_grammar"])
    return json.dumps(data)


def _with_no_forcing(text: str) -> str:
    """Set the option in the grammar's `%llguidance` line (llguidance takes one such line), or in a new one."""
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
        raise FilterCompileError(f"the grammar's %llguidance line is not JSON: {error}") from error
    return f"{text[: found.start()]}%llguidance {json.dumps(options)}{text[found.end() :]}"
