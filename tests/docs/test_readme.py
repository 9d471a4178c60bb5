"""Every command and example of the documentation runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from preloaded import run

ROOT = Path(__file__).resolve().parents[2]
FLOAT_MODEL = ROOT / "tests" / "golden" / "data" / "pylib-4m-fp16"
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("docs/**/*.md"))]
# Exercised elsewhere: the tests run this file, CI runs the verbs, installs have tests of their own.
RUN_ELSEWHERE = re.compile(
    r"^(python3? -m pip install|uv (sync|pip|add|build)|pip install|uv run pytest|make |git |cargo )"
)


def blocks(language: str) -> list[Any]:
    """Every block of a language in the documents; those of the README are in the default run."""
    found = []
    for path in DOCUMENTS:
        marks = () if path == ROOT / "README.md" else (pytest.mark.full,)
        text = path.read_text(encoding="utf-8")
        for i, block in enumerate(re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)):
            found.append(pytest.param(block, marks=marks, id=f"{path.relative_to(ROOT)}#{i}"))
    return found


def files() -> dict[str, str]:
    """Programs of the documents that their shell commands start, by their titles."""
    found: dict[str, str] = {}
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        found |= re.findall(r'^```python title="(.*?)"\n(.*?)^```', text, re.DOTALL | re.MULTILINE)
    return found


def environment() -> dict[str, str]:
    bin_dir = str(Path(sys.executable).parent)
    return os.environ | {"PATH": bin_dir + os.pathsep + os.environ["PATH"], "OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize("source", blocks("python"))
def test_python_example(source: str, tmp_path: Path) -> None:
    done = run(["-c", source], folder=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("source", blocks("sh"))
def test_shell_example(source: str, tmp_path: Path) -> None:
    for line in source.strip().splitlines():
        for command in line.split(" && "):
            if RUN_ELSEWHERE.match(command) or command.lstrip().startswith("#"):
                continue
            # In a checkout `uv run` means: in this environment. SRC and DST are a float folder and a new one.
            command = command.replace("uv run ", "").replace("SRC", str(FLOAT_MODEL))
            command = command.replace("DST", str(tmp_path / f"converted-{len(list(tmp_path.iterdir()))}"))
            for name, program in files().items():
                if command.endswith(f" {name}"):
                    (tmp_path / name).write_text(program, encoding="utf-8")
                    command = command.removesuffix(name) + str(tmp_path / name)
            if re.match(r"exl (generate|info|bench|convert) [^|<>&;$*]*$", command):
                done = run(["-m", "exl_generate", *shlex.split(command)[1:]], folder=ROOT, env=environment())
            else:
                done = subprocess.run(
                    command, shell=True, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
                )
            assert done.returncode == 0, f"{command}\n{done.stderr}"
            assert done.stdout.strip(), f"{command} printed nothing"


def test_readme_begins_with_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first, second = re.findall(r"^```sh\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)[:2]
    assert "exl generate" in first
    assert "pytest" in second
