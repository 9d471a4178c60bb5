"""Commands of the guides, run as a person does, with stand-ins for programs that change the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["DEPLOY", "ROOT", "Machine", "shell"]

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = Path("packages/exl-serve/deploy")
PROGRAMS = str(Path(sys.executable).parent)
RECORDS = """#!/bin/sh
echo "$0" "$@" >> "{file}"
"""


def shell(commands: str, folder: Path, **environment: str) -> str:
    """Run commands as a person does; returns what they print."""
    done = subprocess.run(
        ["sh", "-e", "-c", commands],
        cwd=folder,
        env=os.environ | {"PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


class Machine:
    """A copy of the deployment files; stand-ins for programs that change the machine note their calls."""

    def __init__(self, folder: Path, *programs: str) -> None:
        self.folder = folder / "source"
        shutil.copytree(ROOT / DEPLOY, self.folder / DEPLOY)
        self._calls, tools = folder / "calls", folder / "tools"
        tools.mkdir()
        for program in programs:
            (tools / program).write_text(RECORDS.format(file=self._calls))
            (tools / program).chmod(0o755)
        self._path = os.pathsep.join([str(tools), PROGRAMS, os.environ["PATH"]])

    def run(self, commands: str) -> str:
        """Run the commands in the copy's root."""
        return shell(commands, self.folder, PATH=self._path)

    def calls(self, program: str) -> list[list[str]]:
        """The arguments of each call of a program."""
        lines = [line.split() for line in self._calls.read_text().splitlines()]
        return [words[1:] for words in lines if Path(words[0]).name == program]
