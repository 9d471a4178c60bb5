"""Commands that other packages add to `exl`."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from exl_generate.cli import plugins
from exl_generate.cli.app import app
from exl_generate.errors import RequestError

extra = typer.Typer(help="An extra command.")


@extra.callback(invoke_without_command=True)
def _extra(name: str = "you") -> None:
    typer.echo(f"hello {name}")


wrong = 7


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    import sys

    sys.modules["plugin_of_a_test"] = sys.modules[__name__]
    found: list[EntryPoint] = []

    def add(name: str, value: str) -> None:
        found.append(EntryPoint(name, value, plugins.GROUP))

    monkeypatch.setattr(plugins, "entry_points", lambda group: EntryPoints(found))
    yield add
    del sys.modules["plugin_of_a_test"]


def test_a_package_adds_a_command(installed) -> None:
    installed("greet", "plugin_of_a_test:extra")
    assert "greet" in CliRunner().invoke(app, ["--help"]).output
    done = CliRunner().invoke(app, ["greet", "--name", "them"])
    assert (done.exception, done.output) == (None, "hello them\n")


@pytest.mark.parametrize("value", ["plugin_of_a_test:wrong", "plugin_of_a_test:absent", "no_such_module_here:x"])
def test_a_broken_package_breaks_its_command_alone(installed, value: str) -> None:
    installed("greet", value)
    listed = CliRunner().invoke(app, ["--help"])
    assert listed.exit_code == 0
    assert "generate" in listed.output
    done = CliRunner().invoke(app, ["greet", "--name", "x"])
    assert isinstance(done.exception, RequestError)
    assert "reinstall or remove" in str(done.exception)


def test_built_in_commands_stay(installed) -> None:
    installed("info", "plugin_of_a_test:extra")
    assert "hello" not in CliRunner().invoke(app, ["info", "--help"]).output


@pytest.mark.parametrize("command", [[], ["chat"], ["info"]])
def test_help_shows_no_type_of_flags(command: list[str]) -> None:
    done = CliRunner().invoke(app, [*command, "--help"])
    assert done.exit_code == 0
    assert "--help" in done.output
    assert "<bool>" not in done.output
    assert re.search(r"<(str|path|int|float)\b", done.output) or command == []
