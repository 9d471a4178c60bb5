"""Lark grammars of tool calls whose syntax is not one JSON value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from exl_serve.errors import ServeError
from exl_serve.stream.families.table import Format, Named, Python, Tags
from exl_serve.stream.family import ToolSpec
from exl_serve.stream.readers import value_kind

__all__ = ["answer_rules", "call_grammar", "forced_grammar", "json_rule", "marker_rule", "text_until"]

_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One space after colons and commas, as most models were trained: unbounded space may never end."""
_SPACE = "/[ \\t\\r\\n]{0,4}/"
_UNENFORCED = (
    "$ref", "anyOf", "oneOf", "allOf", "not", "if", "minProperties", "maxProperties", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_UNENFORCED_IN_TEXTS = ("format", "anyOf", "oneOf", "allOf", "not", "if", "$ref", "$dynamicRef", "$recursiveRef")
"""Keywords that are not enforced in a text without quotes."""


def marker_rule(text: str, special: Mapping[str, int]) -> str:
    """Return the rule of a marker: its special token, else its text."""
    return f"<[{special[text]}]>" if text in special else json.dumps(text, ensure_ascii=False)


def json_rule(schema: Any, root: Mapping[str, Any], *, strict: bool) -> str:
    """Return the rule of a JSON value by a schema, whose references begin at `root`.

    `strict`: a schema that cannot be enforced whole is an error of the engine.
    """
    whole = dict(schema) if isinstance(schema, Mapping) else {}
    if schema is False:
        whole = {"not": {}}
    whole |= {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"%json {json.dumps(whole | {'x-guidance': _options(strict)})}"


def _options(strict: bool) -> dict[str, Any]:
    """Return llguidance's options for a schema; with `lenient`, filters do not check that all of it is enforced."""
    return _SPACED if strict else _SPACED | {"lenient": True}


def call_grammar(form: Format, tools: Sequence[ToolSpec], special: Mapping[str, int], *, many: bool) -> str:
    """Return the grammar of a region after its opening marker: calls of the tools, by their schemas.

    Raises ServeError 400 for a schema that this syntax cannot follow.
    """
    if form.inside is None:
        return _json_grammar(form, tools, special, many)
    rules = _Rules(form, special)
    for at, tool in enumerate(tools):
        rules.tool(at, tool)
    return rules.text([f"call_{at}" for at in range(len(tools))], many)


def answer_rules(
    form: Format, tools: Sequence[ToolSpec], special: Mapping[str, int], *, many: bool, pattern: bool = False
) -> str:
    """Return the rules of an answer that is `content`, a rule defined elsewhere, or regions of calls with their
    markers.

    A format whose calls may begin without a marker has the marker here: it distinguishes the call from content.
    `pattern`: the content is the terminal `CONTENT` of any pattern, so that its texts that begin as a call are left
    out. Raises ServeError 400 for a schema that this syntax cannot follow.
    """
    assert form.call is not None
    begin = form.call[0]
    told = pattern and begin not in special
    return "\n".join(
        [
            f"answer: {'PLAIN' if told else 'content'} | _LINES calls",
            *([rf"PLAIN: CONTENT & ~/\n*{_regex(begin)}(?s:.)*/"] if told else []),
            *_region_rules(form, tools, special, many=many),
        ]
    )


def forced_grammar(
    form: Format,
    tools: Sequence[ToolSpec],
    special: Mapping[str, int],
    *,
    many: bool,
    thinking: Literal["over", "open", "possible"],
) -> str:
    """Return the grammar of an answer that is calls alone, after its reasoning.

    `thinking`: "over", the answer begins after the first region's opening marker; "open", inside reasoning;
    "possible", the answer may begin with reasoning. Raises ServeError 400 for a schema that this syntax cannot follow.
    """
    assert form.call is not None
    if form.leading:  # has no marker, and no reasoning
        return call_grammar(form, tools, special, many=many)
    rules = _region_rules(form, tools, special, many=many)
    if thinking == "over" or form.think is None:
        closing = _closing(form, special)
        more = "(_LINES region)*" if many and _several_regions(form) else ""
        more = f"({closing} {more})?" if closing and more else more
        return "\n".join([f"start: inside {more}", *rules])
    begin, end = form.think
    thought = "thinking" if thinking == "open" else f"({marker_rule(begin, special)} thinking)?"
    return "\n".join([f"start: {thought} _LINES calls", *text_until("thinking", end, special), *rules])


def _several_regions(form: Format) -> bool:
    """Whether several calls are several regions."""
    several = form.listed or form.leading or isinstance(form.inside, Python)
    return not (several or (isinstance(form.inside, Named) and form.inside.begin))


def _closing(form: Format, special: Mapping[str, int]) -> str:
    """Return the closing marker of a region, or "" where `call_grammar` has it."""
    end = "" if form.call is None else form.call[1]
    named = isinstance(form.inside, Named) and form.inside.begin
    tagged = isinstance(form.inside, Tags) and not form.inside.end
    if not end or named or tagged or form.leading or isinstance(form.inside, Python):
        return ""
    return f"_SPACE {marker_rule(end, special)}"


def _region_rules(form: Format, tools: Sequence[ToolSpec], special: Mapping[str, int], *, many: bool) -> list[str]:
    """Return the rule `calls`, regions of calls with their markers, and the rules that it needs."""
    begin = "" if form.call is None else form.call[0]
    inside = call_grammar(form, tools, special, many=many).removeprefix("start: ")
    more = "(_LINES region)*" if many and _several_regions(form) else ""
    return [
        r"_LINES: /\n{0,2}/",  # the reader drops line breaks before and between calls
        f"calls: region {more}",
        f"region: {marker_rule(begin, special)} inside {_closing(form, special)}",
        f"inside: {inside}",
    ]


def text_until(name: str, marker: str, special: Mapping[str, int]) -> list[str]:
    """Return the rules of any text and the marker after it. Rule `name`; a text that is a token cannot be in it."""
    if marker in special:
        return [f"{name}: {name.upper()} {marker_rule(marker, special)}", f"{name.upper()}: /(?s:.)*/"]
    closing = _regex(marker)
    return [
        f"{name}[lazy]: {name.upper()}",
        f"{name.upper()}: /(?s:.)*{closing}/ & ~/(?s:.)*{closing}(?s:.)+/",
    ]


def _json_grammar(form: Format, tools: Sequence[ToolSpec], special: Mapping[str, int], many: bool) -> str:
    """Return the grammar of a region whose calls are JSON objects."""
    name, arguments = form.names[0], form.arguments[0]
    lines = []
    for at, tool in enumerate(tools):
        schema = {
            "type": "object",
            "properties": {name: {"const": tool.name}, arguments: tool.parameters or {"type": "object"}},
            "required": [name, arguments],
            "additionalProperties": False,
            "x-guidance": _options(tool.strict),
        }
        # References in a tool's schema begin at its own root.
        schema |= {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
        lines.append(f"call_{at}: %json {json.dumps(schema)}")
    more = '("," _SPACE call)*' if many else ""
    start = f'_SPACE "[" call {more} "]"' if form.listed else "_SPACE call"
    if form.separator and many:
        end = "" if form.call is None else marker_rule(form.call[1], special)
        start += f" (_SPACE {json.dumps(form.separator)} _SPACE call)* (_SPACE {end})?"
    one = " | ".join(f"call_{at}" for at in range(len(tools)))
    return "\n".join([f"start: {start}", f"call: {one}", f"_SPACE: {_SPACE}", *lines])


class _Rules:
    def __init__(self, form: Format, special: Mapping[str, int]) -> None:
        self._form, self._special = form, special
        self._lines: list[str] = []

    def _mark(self, text: str) -> str:
        return marker_rule(text, self._special) if text else ""

    def text(self, calls: list[str], many: bool) -> str:
        form = self._form
        closing = self._mark(form.call[1]) if form.call is not None else ""
        one = "call"
        if isinstance(form.inside, Python) and form.listed:
            more = '("," _SPACE call)*' if many else ""
            start = f'_SPACE "[" call {more} "]"'
        elif isinstance(form.inside, Python):
            start = f"_SPACE call {'(_SPACE call)*' if many else ''} _SPACE {closing}"
        elif isinstance(form.inside, Tags):
            start = f"_SPACE call {'' if form.inside.end else '_SPACE ' + closing}"
        elif isinstance(form.inside, Named) and form.inside.begin:
            start = f"call {'(_SPACE call)*' if many else ''} _SPACE {closing}"
        else:
            start = one
        head = [f"start: {start}", f"call: {' | '.join(calls)}", f"_SPACE: {_SPACE}"]
        return "\n".join([*head, *self._lines])

    def tool(self, at: int, tool: ToolSpec) -> None:
        inside, name = self._form.inside, json.dumps(tool.name)
        if isinstance(inside, Named):
            word = f"{json.dumps(inside.word)} {self._mark(inside.word_end)}" if inside.word_end else ""
            after = f"{json.dumps(inside.after)} " if inside.after else ""
            ident = f"({self._mark(inside.ident)} /[a-zA-Z0-9]{{1,64}}/)? " if inside.ident else ""
            self._lines += [
                f"call_{at}: {self._mark(inside.begin)} {word} {name} {ident}{self._mark(inside.separator)} "
                f"json_{at} {after}{self._mark(inside.end)}",
                f"json_{at}: {json_rule(tool.parameters or {'type': 'object'}, tool.parameters, strict=tool.strict)}",
            ]
            return
        properties, required = _parameters(at, tool)
        names = sorted(properties, key=lambda key: key not in required)
        if isinstance(inside, Tags):
            parts = [f"par_{at}_{i}{'' if key in required else '?'}" for i, key in enumerate(names)]
            newline = '"\\n"' if inside.lines else '"\\n"?'
            end = self._mark(inside.end)
            self._lines.append(
                f"call_{at}: {self._mark(inside.name_begin)} {name} {self._mark(inside.name_end)} {newline} "
                f"{' '.join(parts)} {end}"
            )
            for i, key in enumerate(names):
                self._tagged(f"{at}_{i}", key, properties[key], inside, tool)
            return
        for i, key in enumerate(names):
            self._lines.append(f"par_{at}_{i}: {json.dumps(key + '=')} value_{at}_{i}")
            self._lines.append(f"value_{at}_{i}: {json_rule(properties[key], tool.parameters, strict=tool.strict)}")
        pairs = _comma_separated([f"par_{at}_{i}" for i in range(len(names))], len(required))
        self._lines.append(f'call_{at}: {name} "(" {pairs} ")"')

    def _tagged(self, at: str, key: str, schema: Any, tags: Tags, tool: ToolSpec) -> None:
        newline = '"\\n"' if tags.lines else ""
        after = newline or '"\\n"?'
        between = f"{after if tags.value_begin else ''} {self._mark(tags.value_begin)} {newline}"
        end = f"{newline} {self._mark(tags.value_end)}"
        if value_kind(schema) == "json":
            self._lines.append(f"value_{at}: {json_rule(schema, tool.parameters, strict=tool.strict)} {end}")
        else:
            if tool.strict:
                _check_text(schema, f"{tool.param}.properties.{key}")
            literal = None if tags.value_end in self._special else ("\n" if tags.lines else "") + tags.value_end
            self._lines += _plain_text(at, schema, end, literal)
        self._lines.append(
            f"par_{at}: {self._mark(tags.key_begin)} {json.dumps(key, ensure_ascii=False)} {self._mark(tags.key_end)} "
            f"{between} value_{at} {after}"
        )


def _check_text(schema: Mapping[str, Any], path: str) -> None:
    """Raise ServeError 400 for a keyword that is not enforced in a text without quotes."""
    unenforced = list(_UNENFORCED_IN_TEXTS)
    if "enum" in schema or "const" in schema:
        unenforced += ["minLength", "maxLength", "pattern"]
    if "enum" in schema:
        unenforced.append("const")
    found = next((keyword for keyword in unenforced if keyword in schema), None)
    if found is not None:
        raise ServeError.invalid(
            f"{path}.{found}: calls of this model have this parameter as a text without quotes, where {found} is not "
            "enforced: leave it out, or strict",
            "tools",
            "invalid_tool_schema",
        )


def _plain_text(at: str, schema: Mapping[str, Any], end: str, literal: str | None) -> list[str]:
    """Return rules for a raw string up to the marker after it; `literal`: that marker, if it is text."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        texts = [one for one in values if isinstance(one, str)]
        return [f"value_{at}: ({' | '.join(json.dumps(one, ensure_ascii=False) for one in texts)}) {end}"]
    closing = "" if literal is None else _regex(literal)
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    parts = [f"/(?s:.){{{least},{most}}}{closing}/"]
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        head = "" if pattern.startswith("^") else "(?s:.)*"
        ends = re.search(r"(?<!\\)(?:\\\\)*\$$", pattern) is not None  # not with \$
        tail = "" if ends else "(?s:.)*"
        core = (pattern[:-1] if ends else pattern).removeprefix("^").replace("/", "\\/")
        parts.append(f"/{head}({core}){tail}{closing}/")
    if literal is None:
        return [f"value_{at}: TEXT_{at} {end}", f"TEXT_{at}: {' & '.join(parts)}"]
    # The first marker ends the text.
    parts.append(f"~/(?s:.)*{_regex(literal.strip())}(?s:.)+/")
    return [f"value_{at}[lazy]: TEXT_{at}", f"TEXT_{at}: {' & '.join(parts)}"]


def _regex(text: str) -> str:
    return re.escape(text).replace("\\\n", "\\n").replace("/", "\\/")


def _comma_separated(parts: list[str], required: int) -> str:
    """Return the first `required` parts, then any of the others in their order, separated by commas."""
    if required:
        optional = " ".join(f'(", " {part})?' for part in parts[required:])
        return ' ", " '.join(parts[:required]) + " " + optional
    ways = [" ".join([part, *(f'(", " {one})?' for one in parts[i + 1 :])]) for i, part in enumerate(parts)]
    return f"({' | '.join(ways)})?" if ways else ""


def _parameters(at: int, tool: ToolSpec) -> tuple[dict[str, Any], list[str]]:
    schema = tool.parameters
    found = next((key for key in _UNENFORCED if key in schema), None)
    if found is not None:
        raise ServeError.invalid(
            f"tools[{at}].function.parameters.{found}: calls of this model are written parameter by parameter, and "
            f"{found} applies to all of them together; describe them under properties",
            "tools",
            "invalid_tool_schema",
        )
    properties = dict(schema.get("properties") or {})
    required = [key for key in schema.get("required") or () if isinstance(key, str)]
    properties |= {key: {} for key in required if key not in properties}
    return properties, list(dict.fromkeys(required))
