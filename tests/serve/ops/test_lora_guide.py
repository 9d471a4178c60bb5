"""The program and the requests of docs/guides/lora.md use the adapters that they name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from guide_commands import ROOT, shell
from lora_folder import write_adapter
from preloaded import run
from served import Served

from exl_generate import bundled
from exl_serve.testing.local import EngineThread

PAGE = (ROOT / "docs/guides/lora.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(fable: EngineThread, tmp_path: Path) -> Path:
    """A folder with three adapters, which change what the bundled model says."""
    for name, value in (("french", 0.05), ("german", -0.08), ("spanish", 0.09)):
        write_adapter(tmp_path / name, fable, value)
    return tmp_path


def test_the_program_gives_each_job_its_adapter(folder: Path) -> None:
    (program,) = blocks("py")
    done = run(["-c", program], folder=folder)
    assert done.returncode == 0, done.stderr
    texts = dict(re.findall(r"^(french|german|none) (.*)$", done.stdout, re.MULTILINE))
    assert sorted(texts) == ["french", "german", "none"]
    assert len(set(texts.values())) == 3


def ask(server: Served, command: str, folder: Path) -> str:
    """Run a command of the page, which has to succeed, and return the output."""
    command = command.replace("http://127.0.0.1:8000", server.url).replace("/srv/adapters", str(folder))
    return shell(command.replace("curl -s", "curl -s -f"), folder)


def test_a_request_names_its_adapter(served: Callable[..., Served], folder: Path) -> None:
    start, *requests = blocks("bash")[0].splitlines()
    shutil.copytree(bundled.default_model_dir(), folder / "mine")
    words = start.replace("/srv/models", str(folder)).replace("=", f"={folder}/").split()
    assert words[:2] == ["exl", "serve"]
    server = served(*words[2:]).up()
    answers = [ask(server, one.replace('"max_tokens"', '"temperature": 0, "max_tokens"'), folder) for one in requests]
    assert len({json.loads(answer)["choices"][0]["text"] for answer in answers}) == len(requests) == 3


def test_adapters_are_loaded_and_unloaded_while_the_server_runs(served: Callable[..., Served], folder: Path) -> None:
    load, unload = blocks("bash")[1].splitlines()
    (roots,) = re.findall(r"`(adapter_roots = .*?)`", PAGE)
    roots = roots.replace("/srv/adapters", str(folder))
    model = f'[[model]]\nid = "mine"\npath = "{bundled.default_model_dir()}"\n{roots}\n'
    (folder / "serve.toml").write_text(model)
    server = served("--config", str(folder / "serve.toml")).up()
    listed = f"curl -s {server.url}/v1/lora/list"
    ask(server, load, folder)
    assert '"spanish"' in ask(server, listed, folder)
    ask(server, unload, folder)
    assert '"spanish"' not in ask(server, listed, folder)
