"""The commands and programs of docs/guides/serving.md run against a server, and its tables are current."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from preloaded import run

from exl_generate import bundled
from exl_serve.config.model import ModelConfig
from exl_serve.request.reference import render
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs/guides/serving.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = ModelConfig(id="fable", path=str(bundled.default_model_dir()), device="cpu")
    engine = EngineThread(config)
    live = LiveServer({"fable": engine}, [config])
    yield live.url
    live.close()
    engine.close()


def test_shell_commands(url: str) -> None:
    commands = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("curl")]
    assert len(commands) == 8
    for command in commands:
        done = subprocess.run(
            command.replace("http://127.0.0.1:8000", url).replace("curl -s", "curl -s -f"),
            shell=True,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert done.stdout or "metrics" in command


def test_python_programs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which has imported the client library."""
    # The program with an image is run by tests/serve/test_images.py, which has a model for it.
    programs = [program for program in blocks("py") if "photo.png" not in program]
    assert programs
    for program in programs:
        source = program.replace("http://127.0.0.1:8000", url)
        exec(compile(source, "<guide>", "exec"), {"__name__": "__main__"})  # noqa: S102
        assert '"name"' in capsys.readouterr().out


def test_the_command_that_begins_it_all() -> None:
    assert blocks("bash")[0].strip() == "uv run exl serve -m DIR"
    done = run(["-m", "exl_serve", "--help"])
    assert done.returncode == 0, done.stderr
    for option in (
        "--model",
        "--host",
        "--port",
        "--key-file",
        "--no-auth",
        "--workers",
        "--trusted-proxy",
        "--prompt-wait",
    ):
        assert option in done.stdout


def test_every_field_has_a_meaning() -> None:
    rows = re.findall(r"^\| `.*`[^|]*\|[^|]*\|[^|]*\|(.*)\|$", render(), re.MULTILINE)
    assert len(rows) > 80
    assert all(meaning.strip() for meaning in rows)


def test_the_page_of_fields_is_current() -> None:
    assert (ROOT / "docs/serving/fields.md").read_text(encoding="utf-8") == render()
