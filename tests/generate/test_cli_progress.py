"""The bar of the command line while a model loads."""

from __future__ import annotations

import io
import sys

import pytest

from exl_generate.cli.models import load

pytestmark = pytest.mark.covers("core.md: loading")


class Terminal(io.StringIO):
    """What calls itself a terminal and keeps what is drawn."""

    def isatty(self) -> bool:
        return True


def test_a_bar_on_terminals_and_silence_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load(None)
    assert loaded.model.loaded
    assert capsys.readouterr() == ("", "")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    modules = len(load(None).model.modules)
    assert "loading " in terminal.getvalue()
    assert f"{modules}/{modules}" in terminal.getvalue()
    assert capsys.readouterr().out == ""
