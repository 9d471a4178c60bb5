"""Completion of the command line in shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXL = shutil.which("exl", path=str(Path(sys.executable).parent))
pytestmark = pytest.mark.skipif(EXL is None, reason="the command is not installed next to this Python")


def completions(line: str) -> set[str]:
    """Return the words that bash offers for the last word of the line."""
    words = line.split(" ")
    env = os.environ | {"_EXL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run([str(EXL)], env=env, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("exl co", {"convert"}),
        ("exl generate --json-s", {"--json-schema"}),
        ("exl generate --cache q", {"q8", "q6", "q4"}),
        pytest.param("exl convert a b --format ", {"exl2", "gptq"}, marks=pytest.mark.full),
    ],
)
def test_commands_options_and_values(line: str, offered: set[str]) -> None:
    assert completions(line) == offered


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_installing_writes_the_script_of_the_shell(tmp_path: Path) -> None:
    """bash stays the parent process, by which the shell is recognized."""
    env = os.environ | {"HOME": str(tmp_path)}
    shown = subprocess.run(
        ["bash", "-c", f"{EXL} --show-completion; true"], env=env, capture_output=True, text=True, check=True
    )
    assert "complete -o default -F _exl_completion exl" in shown.stdout
    subprocess.run(["bash", "-c", f"{EXL} --install-completion; true"], env=env, capture_output=True, check=True)
    script = tmp_path / ".bash_completions" / "exl.sh"
    assert script.read_text().strip() == shown.stdout.strip()
    assert str(script) in (tmp_path / ".bashrc").read_text()
