"""The bar of the command line while a model loads."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from exl_generate.cli.models import load

pytestmark = pytest.mark.covers("core: loading")

MODEL = Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5"


class Terminal(io.StringIO):
    """A stream that claims to be a terminal and records what is drawn."""

    def isatty(self) -> bool:
        return True


def test_a_bar_on_terminals_and_silence_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load(MODEL)
    loaded.generator("fp16", 256)
    assert loaded.model.loaded
    assert capsys.readouterr() == ("", "")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    again = load(MODEL)
    again.generator("fp16", 256)
    modules = len(again.model.modules)
    assert "loading " in terminal.getvalue()
    assert f"{modules}/{modules}" in terminal.getvalue()
    assert capsys.readouterr().out == ""
