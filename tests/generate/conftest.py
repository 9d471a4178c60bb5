"""Helpers shared by the tests of the `exl` command."""

from __future__ import annotations

import io
import sys
from functools import cache
from pathlib import Path

import pytest
import typer

from exl_core import ExLlamaV2
from exl_generate.cli import main

MODEL = str(Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5")
TEMPLATE = "{{ bos_token }}{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}# assistant:"

# The tree of commands has no state; each call of `exl` would build it again.
COMMANDS = cache(typer.main.get_command)


@pytest.fixture
def exl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Call `exl` with arguments (and standard input); returns exit code, standard output, standard error."""

    def call(*args: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(typer.main, "get_command", COMMANDS)
        monkeypatch.setattr(sys, "argv", ["exl", *args])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if weights are read: what is known to be wrong is rejected before."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(ExLlamaV2, "load", load)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fixture model with a chat template."""
    folder = tmp_path_factory.mktemp("chat-model")
    for file in Path(MODEL).iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)
