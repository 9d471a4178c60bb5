"""Outputs of each family, written after its syntax, cut near every marker.

The expected events are part of the corpus. They were not made from the table of formats, but no output was recorded
from a model. Broken outputs whose reading no document settles (five, and those with NaN) have the events that the
reader gives.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from exl_serve.engine.events import Finished, Tokens, Usage
from exl_serve.stream.channels import OutputFamily
from exl_serve.stream.events import Content, Finish, Reasoning, ToolArgs, ToolBegin, ToolEnd
from exl_serve.stream.families.table import FORMATS
from exl_serve.stream.family import ChannelSettings, ToolSpec

CORPUS = Path(__file__).parent / "corpus"
TEXT, NUMBER, ANY = {"type": "string"}, {"type": "number"}, {"type": "object"}
TOOLS = (
    ToolSpec("get_weather", "", {"type": "object", "properties": {"city": TEXT, "days": {"type": "integer"}}}),
    ToolSpec(
        "search",
        "",
        {
            "type": "object",
            "properties": {
                "query": TEXT,
                "filters": ANY,
                "tags": {"type": "array", "items": TEXT},
                "limit": NUMBER,
                "exact": {"type": "boolean"},
            },
        },
    ),
    ToolSpec("clock", "", {"type": "object", "properties": {}}),
)
SIGNS = re.compile(r"<[|/｜]?[\w▁|｜/=]+[|｜]?>|\[/?[A-Z_]+\]|```\w*|[{}\[\]()]|; |=|\n")
"""Places of all families' syntaxes where a text may be cut badly."""


def not_json(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def parsed(text: str) -> Any:
    """Return a JSON value, with numbers that are no integers as they are written."""
    return json.loads(text, parse_float=str, parse_constant=not_json)


def read(form: str, specials: list[str], pieces: list[str], finish: str) -> dict[str, Any]:
    """Return what a client gets of an answer in these pieces; each spelling of `specials` is a token."""
    special = {spelled: 100 + at for at, spelled in enumerate(specials)}
    settings = ChannelSettings(tools=TOOLS, tool_choice="auto")
    machine = OutputFamily(FORMATS[form], special, lambda i: b"").machine(0, settings, "r")
    events = []
    pattern = "|".join(map(re.escape, sorted(specials, key=len, reverse=True)))
    for number, piece in enumerate(pieces, 1000):
        parts = re.split(f"({pattern})", piece) if specials else [piece]
        ids = tuple(special.get(part, number) for part in parts if part)
        if piece:
            events += machine.feed(Tokens(0, ids, piece))
    reason: Any = "length" if finish == "length" else "stop_token"
    events += machine.feed(Finished(0, reason, 2, Usage(prompt_tokens=1, completion_tokens=1)))
    calls: list[list[Any]] = []
    for event in events:
        if isinstance(event, ToolBegin):
            calls.append([event.name, "", False])
        elif isinstance(event, ToolArgs):
            calls[event.index][1] += event.text
        elif isinstance(event, ToolEnd):
            calls[event.index][2] = True
    assert isinstance(events[-1], Finish)
    return {
        "content": "".join(event.text for event in events if isinstance(event, Content)).strip(),
        "reasoning": "".join(event.text for event in events if isinstance(event, Reasoning)).strip(),
        "calls": [{"name": name, "arguments": parsed(said)} for name, said, closed in calls if closed],
        "open": next(({"name": name, "arguments": said} for name, said, closed in calls if not closed), None),
        "finish": events[-1].reason,
    }


def cuts(output: str, specials: list[str]) -> list[list[str]]:
    """Return the output whole, by single characters, and in two pieces at each place near a sign; a special token is
    in one piece.
    """
    pattern = "|".join(map(re.escape, sorted(specials, key=len, reverse=True)))
    inside = {
        at
        for found in (re.finditer(pattern, output) if specials else ())
        for at in range(found.start() + 1, found.end())
    }
    near = {
        at
        for found in SIGNS.finditer(output)
        for at in range(max(1, found.start() - 1), min(len(output), found.end() + 2))
    }
    ends = [0, *(at for at in range(1, len(output)) if at not in inside), len(output)]
    letters = [output[a:b] for a, b in itertools.pairwise(ends)]
    return [[output], letters, *([output[:at], output[at:]] for at in sorted(near - inside))]


def test_every_family_has_a_corpus() -> None:
    assert {path.stem for path in CORPUS.glob("*.json")} == set(FORMATS) - {"none"}


@pytest.mark.parametrize("form", sorted(set(FORMATS) - {"none"}))
def test_outputs_are_read_as_documented(form: str) -> None:
    corpus = parsed((CORPUS / f"{form}.json").read_text())
    assert len(corpus["outputs"]) >= 30
    for row in corpus["outputs"]:
        wanted = {"content": "", "reasoning": "", "calls": [], "open": None} | row
        about, output, as_text = (wanted.pop(key, None) for key in ("about", "output", "as_text"))
        ways: list[list[str]] = [corpus["specials"], []]
        for specials in ways:
            if as_text is not None and not specials:  # markers of no call stay text
                wanted["content"] = as_text
            for pieces in cuts(output, specials):
                assert read(form, specials, pieces, row["finish"]) == wanted, (about, pieces)
