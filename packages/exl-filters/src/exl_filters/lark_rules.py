"""Find rules of a Lark grammar without a finite text: each of their alternatives needs such a rule again.

llguidance follows forced text to its end, and may never return where there is none. The mask that hangs may come late
in a text. So such grammars are rejected before they are compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

__all__ = ["endless_rules"]

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|//[^\n]*|\#[^\n]*)
      | (?P<text>"(?:\\.|[^"\\\n])*"i?|/(?![/*])(?:\\.|[^/\\\n])+/[imslux]*|<[^>\n]*>)
      | (?P<directive>%(?:json|regex|lark|llguidance|ignore|import|declare))
      | (?P<head>[!?]*[A-Za-z_]\w*(?:\[(?:[^\]"\n]|"[^"\n]*")*\])?(?:\.\d+)?[ \t]*:(?!:))
      | (?P<name>[A-Za-z_]\w*)
      | (?P<repeat>[*+?]|\{[ \t]*(?P<least>\d*)[ \t]*(?:,[ \t]*\d*[ \t]*)?\}|~[ \t]*(?P<times>\d+)(?:\.\.\d+)?)
      | (?P<sign>\.\.|->|[|()~&\[\],])""",
    re.VERBOSE,
)

MOST_PASSES = 50

# The alternatives of an expression; each lists the names and groups that it requires.
_Ways = list[list["str | _Ways"]]


class _Unknown(Exception):  # noqa: N818 - not an error: the text is not understood here
    """The grammar uses syntax that this parser does not read."""


def endless_rules(text: str) -> list[str] | None:
    """Return the rules without a finite text, in order. None: not understood, or too many passes."""
    try:
        rules = _rules(text)
    except (_Unknown, RecursionError):
        return None
    ends: set[str] = set()
    left = list(rules)
    for _ in range(MOST_PASSES):
        # Passes alternate in direction: a chain of rules in either order is then settled in two passes.
        left.reverse()
        kept = []
        for name in left:
            if _ends(rules[name], ends, rules):
                ends.add(name)
            else:
                kept.append(name)
        if len(kept) == len(left):
            return [name for name in rules if name not in ends]
        left = kept
    return None


def _ends(ways: _Ways, ends: set[str], rules: dict[str, _Ways]) -> bool:
    """Whether one alternative needs only rules that are known to end, or that are defined elsewhere."""
    return any(
        all(n in ends or n not in rules if isinstance(n, str) else _ends(n, ends, rules) for n in way) for way in ways
    )


def _rules(text: str) -> dict[str, _Ways]:
    """Return the alternatives of every rule."""
    rules: dict[str, _Ways] = {}
    tokens = list(_tokens(text))
    at = 0
    while at < len(tokens):
        kind, value = tokens[at]
        if kind == "line":
            at += 1
            continue
        if kind != "head":
            raise _Unknown
        ways, at = _expression(tokens, at + 1)
        rules.setdefault(value, []).extend(ways)
    return rules


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, value): head, name, text, repeat (value: "0" or "1", the least number), sign, line (a directive)."""
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise _Unknown
        kind, at = str(found.lastgroup), found.end()
        if kind in ("least", "times"):
            kind = "repeat"
        if kind == "directive":
            word = found[0]
            if word in ("%json", "%regex", "%lark"):
                at = _after_braces(text, at)
                yield "text", word
            else:
                end = text.find("\n", at)
                at = len(text) if end < 0 else end
                yield "line", word
        elif kind == "repeat":
            counted = found["least"] if found["least"] is not None else found["times"]
            least = counted if counted is not None else ("1" if found[0] == "+" else "0")
            yield "repeat", "0" if not least or int(least) == 0 else "1"
        elif kind == "head":
            yield "head", re.match(r"[!?]*(\w+)", found[0])[1]  # type: ignore[index]
        elif kind != "space":
            yield kind, found[0]


def _after_braces(text: str, at: int) -> int:
    """Return the position after the JSON object that follows."""
    start = re.compile(r"[ \t\r\n]*").match(text, at)
    assert start is not None
    try:
        return json.JSONDecoder().raw_decode(text, start.end())[1]
    except ValueError:
        raise _Unknown from None


def _expression(tokens: list[tuple[str, str]], at: int) -> tuple[_Ways, int]:
    """Parse the alternatives from `at` on, up to a closing bracket, the next rule or directive, or the end."""
    ways: _Ways = [[]]
    while at < len(tokens):
        kind, value = tokens[at]
        if kind in ("head", "line") or value in (")", "]"):
            break
        at += 1
        if value == "|":
            ways.append([])
        elif value == "->":
            at += 1
        elif value in ("(", "["):
            inner, at = _expression(tokens, at)
            if at >= len(tokens) or tokens[at][1] not in (")", "]"):
                raise _Unknown
            optional, at = _optional(tokens, at + 1)
            if not optional and value == "(":
                ways[-1].append(inner)
        elif kind == "name":
            optional, at = _optional(tokens, at)
            if not optional:
                ways[-1].append(value)
        elif kind not in ("text", "repeat") and value not in ("&", "~", ".."):
            raise _Unknown
    return ways, at


def _optional(tokens: list[tuple[str, str]], at: int) -> tuple[bool, int]:
    """Whether the operators after an atom make it optional; and the position after them."""
    optional = False
    while at < len(tokens) and tokens[at][0] == "repeat":
        optional = optional or tokens[at][1] == "0"
        at += 1
    return optional, at
