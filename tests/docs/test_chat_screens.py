"""The screens in the guide to chat are wrapped as `exl chat` wraps at terminals of 80 and 160 columns.

The words of an answer depend on the CPU's instruction set, so they are not compared with the guide.
"""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from preloaded import run
from terminal import Terminal

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "chat.md").read_text(encoding="utf-8")
SCREENS = re.findall(r"^```text\n(\$ exl chat.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)


def answers(screen: str) -> list[list[str]]:
    """The lines of each answer: those between a message and the statistics."""
    found = re.findall(r"^(?:> |  ).*\n((?:(?![>$ ]|\[\d).*\n)+)\[\d+ prompt", screen, re.MULTILINE)
    return [block.splitlines() for block in found]


@pytest.fixture(scope="module")
def session() -> tuple[list[str], str]:
    """The guide's first command and its first message."""
    command = shlex.split(re.findall(r"^\$ exl (.*)$", SCREENS[0], re.MULTILINE)[0])
    return ["-m", "exl_generate", *command], re.findall(r"^> (.*)$", SCREENS[0], re.MULTILINE)[0] + "\n"


@pytest.fixture(scope="module")
def answer(session: tuple[list[str], str]) -> str:
    """The first answer as a pipe gets it, without breaks of lines."""
    command, message = session
    done = run(command, stdin=message)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_breaks(lines: list[str], columns: int) -> None:
    """Each line holds as many words as fit."""
    assert all(len(line) <= columns for line in lines)
    for line, following in pairwise(lines):
        if line and following:
            assert len(line) + 1 + len(following.split()[0]) > columns


@pytest.mark.parametrize("columns", [80, pytest.param(160, marks=pytest.mark.full)])
def test_an_answer_is_wrapped_at_the_terminals_width(
    columns: int, session: tuple[list[str], str], answer: str, tmp_path: Path
) -> None:
    command, message = session
    sizes = {"COLUMNS": str(columns), "LINES": "50", "XDG_STATE_HOME": str(tmp_path)}
    with Terminal(*command, env=sizes, torn_down=False) as terminal:
        terminal.until("> ")
        terminal.type(message.encode())
        shown = terminal.until("prompt tokens").replace("\r", "").splitlines()
    lines = shown[1:-1]  # between the message and the statistics
    assert " ".join(lines).split() == answer.split()
    check_breaks(lines, columns)


@pytest.mark.parametrize(("screen", "columns"), list(zip(SCREENS, (80, 160), strict=True)))
def test_a_screen_of_the_guide_is_wrapped_at_its_width(screen: str, columns: int) -> None:
    assert len(answers(screen)) == 3
    assert all(len(line) <= columns for line in screen.splitlines())
    for lines in answers(screen):
        check_breaks(lines, columns)
