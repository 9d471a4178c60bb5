"""The help of `exl serve` and of its commands, which exl-generate's command line finds as a plugin."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from exl_generate.cli.app import app


@pytest.mark.parametrize("command", [[], ["key", "new"], ["ray"]])
def test_help_shows_no_type_of_flags(command: list[str]) -> None:
    done = CliRunner().invoke(app, ["serve", *command, "--help"])
    assert done.exit_code == 0
    assert "--help" in done.output
    assert "<bool>" not in done.output
    assert "<str>" in done.output or "<path>" in done.output
