"""The guide for llama.cpp's users names options, routes and fields that exist, and calls none missing that exists."""

from __future__ import annotations

import re
from pathlib import Path

import typer
from typer.main import get_command

from exl_generate.cli.app import app
from exl_serve.api import chat, completions
from exl_serve.api.app import ROUTES

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "llamacpp.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.+?) \| (.+) \|$", GUIDE, re.MULTILINE)
VERBS = ("generate", "chat", "convert", "info", "bench", "serve")


def options_of(verb: str) -> set[str]:
    """The options of a command, as they are typed."""
    command = get_command(app)
    context = typer.Context(command)
    found = command.get_command(context, verb)  # type: ignore[attr-defined]
    return {option for parameter in found.params for option in parameter.opts}


def test_options_exist() -> None:
    known = set().union(*map(options_of, VERBS))
    named = {option for _, here in ROWS for option in re.findall(r"`(-{1,2}[a-z][a-z-]*[a-z]|-[a-z])\b", here)}
    assert {"--cache", "--device", "--ngram", "-n"} <= named
    assert named - known == set()


def test_options_that_the_guide_calls_missing_are_missing() -> None:
    assert {"--tp"} & (options_of("chat") | options_of("serve")) == set()
    assert {"--tp"} <= options_of("generate") & options_of("bench")
    assert not any("grammar" in option for verb in VERBS for option in options_of(verb))


def test_routes() -> None:
    served = {route.path for route in ROUTES}
    routes = [(re.findall(r"`(/\S+)`", theirs), here) for theirs, here in ROWS if theirs.startswith("`/")]
    same = [path for paths, here in routes if here.startswith("the same") for path in paths]
    missing = [path for paths, here in routes if here == "not offered" for path in paths]
    assert len(same) >= 9
    assert [path for path in same if path not in served] == []
    assert len(missing) >= 7
    assert [path for path in missing if path in served] == []


def test_fields_of_requests_are_known() -> None:
    (listed,) = re.findall(r"same meaning here: (.*)\. Others", GUIDE)
    fields = re.findall(r"`(\w+)`", listed)
    assert len(fields) >= 10
    assert [name for name in fields if name not in {*chat.FIELDS, *completions.FIELDS}] == []
