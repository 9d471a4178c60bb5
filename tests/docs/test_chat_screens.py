"""The screens in the guide to chat are what `exl chat` shows at terminals of 80 and 160 columns."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from preloaded import run

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "chat.md").read_text(encoding="utf-8")
SCREENS = re.findall(r"^```text\n(\$ exl chat.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)


def answers(screen: str) -> list[list[str]]:
    """The lines of each answer: those between a message and the statistics."""
    found = re.findall(r"^(?:> |  ).*\n((?:(?![>$\[ ]).*\n)+)\[\d+ prompt", screen, re.MULTILINE)
    return [block.splitlines() for block in found]


@pytest.fixture(scope="module")
def answer() -> str:
    """The first answer as a pipe gets it, without breaks of lines."""
    command = shlex.split(re.findall(r"^\$ exl (.*)$", SCREENS[0], re.MULTILINE)[0])
    message = re.findall(r"^> (.*)$", SCREENS[0], re.MULTILINE)[0] + "\n"
    done = run(["-m", "exl_generate", *command], stdin=message)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("screen", "columns"), list(zip(SCREENS, (80, 160), strict=True)))
def test_a_screen_is_wrapped_at_its_width(screen: str, columns: int, answer: str) -> None:
    first = answers(screen)[0]
    assert " ".join(first).split() == answer.split()
    assert all(len(line) <= columns for line in screen.splitlines())
    for lines in answers(screen):
        for line, following in pairwise(lines):
            if line and following:
                assert len(line) + 1 + len(following.split()[0]) > columns
