"""The commands of README.md and of docs/guides/serving.md that start a server, in a container and as a service."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import yaml
from guide_commands import DEPLOY, ROOT, Machine, shell
from served import SECONDS, Served

from exl_generate import bundled
from exl_serve.testing.waiting import until

ADDRESS = "http://127.0.0.1:8000"
GUIDE = (ROOT / "docs/guides/serving.md").read_text(encoding="utf-8")


def block(text: str, title: str, language: str) -> str:
    """The first block of a language after a text."""
    found = re.search(rf"^```{language}\n(.*?)^```", text[text.index(title) :], re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_readme_serves_in_a_few_lines(served: Callable[..., Served], tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first, *others = block(readme, "Serve OpenAI's API", "bash").splitlines()
    words = shlex.split(first, comments=True)
    assert words[:4] == ["uv", "run", "exl", "serve"]
    server = served(*words[4:]).up()
    assert len(others) < 3
    for command in others:
        assert ADDRESS in command
        assert '"content"' in shell(command.replace(ADDRESS, server.url).replace("curl -s", "curl -s -f"), tmp_path)


def answers(server: Served, status: int, key: str | None = None) -> None:
    """Ask a server of the guide for tokens."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"prompt": "Once", "max_tokens": 2}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=SECONDS)
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    "title",
    [
        "## Several clients",
        *(
            pytest.param(one, marks=pytest.mark.full)
            for one in ("# Serving models", "## Behind a proxy", "## What is logged")
        ),
    ],
)
def test_a_command_of_the_guide_serves(served: Callable[..., Served], tmp_path: Path, title: str) -> None:
    """With the bundled model as DIR, and a free port."""
    make_key, _ = block(GUIDE, "## Several clients", "bash").splitlines()
    words = shlex.split(block(GUIDE, title, "bash").splitlines()[-1].removeprefix("uv run "))
    assert words[:4] == ["exl", "serve", "-m", "DIR"]
    key = re.search(r"key: (\S+)", shell(make_key, tmp_path)) if "keys.toml" in words else None
    here = {"DIR": str(bundled.default_model_dir()), "keys.toml": str(tmp_path / "keys.toml")}
    here["log.content=content.jsonl"] = f"log.content={tmp_path / 'content.jsonl'}"
    server = served(*[here.get(word, word) for word in words[2:]]).up()
    server.url = server.url.replace("//0.0.0.0:", "//127.0.0.1:")
    if "keys.toml" in words:
        assert key is not None
        answers(server, 401)
    answers(server, 200, None if key is None else key[1])
    if title == "## What is logged":
        file = tmp_path / "content.jsonl"
        until(lambda: file.exists() and '"Once"' in file.read_text())  # a line follows its answer


@pytest.mark.parametrize("serves", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_container_of_the_guide(served: Callable[..., Served], tmp_path: Path, *, serves: bool) -> None:
    """Its files are there and agree, and the container's command serves with them."""
    machine = Machine(tmp_path, "docker", "sudo")
    deploy = machine.folder / DEPLOY
    (deploy / "serve.toml").write_text(block(GUIDE, "## In a container", "toml"))
    told = machine.run(block(GUIDE, "## In a container", "bash"))
    build, up = machine.calls("docker")
    assert build[:2] == ["build", "-f"]
    assert (machine.folder / build[2]).is_file()
    assert up[:2] == ["compose", "-f"]
    service = yaml.safe_load((machine.folder / up[2]).read_text())["services"]["exl-serve"]
    assert build[3:] == ["-t", service["image"], "."]
    (owner,) = machine.calls("sudo")
    assert owner[:2] == ["chown", "10001"]
    keys = machine.folder / owner[2]
    assert keys == deploy / "keys.toml"
    inside = {
        "/etc/exl/serve.toml": str(deploy / "serve.toml"),
        "/run/secrets/exl-keys": str(keys),
        "0.0.0.0": "127.0.0.1",
    }
    assert tomllib.loads((deploy / "serve.toml").read_text())["model"][0]["path"].startswith("/models/")
    if not serves:
        return
    (deploy / "serve.toml").write_text(f'[[model]]\nid = "mine"\npath = "{bundled.default_model_dir()}"\n')
    server = served(*[inside.get(word, word) for word in service["command"]])
    key = re.search(r"key: (\S+)", told)
    assert key is not None
    server.up()
    body = {"model": "mine", "prompt": "Once", "max_tokens": 2}
    for headers, status in (({}, 401), ({"authorization": f"Bearer {key[1]}"}, 200)):
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=SECONDS)
        assert answer.status_code == status


def test_the_service_of_the_guide(tmp_path: Path) -> None:
    """Every file of its commands is there, and its unit reads the configuration that they install."""
    machine = Machine(tmp_path, "sudo")
    (machine.folder / "serve.toml").write_text(block(GUIDE, "## In a container", "toml"))
    machine.run(block(GUIDE, "## As a service", "bash"))
    calls = machine.calls("sudo")
    unit = (machine.folder / DEPLOY / "exl-serve.service").read_text()
    installed = [call for call in calls if call[0] == "install"]
    assert all((machine.folder / call[-2]).is_file() for call in installed)
    assert installed[0][-1] in unit
    assert f"User={calls[0][-1]}\n" in unit
    assert calls[-1] == ["systemctl", "enable", "--now", Path(installed[1][-2]).stem]


def test_the_command_of_a_cluster_says_how_to_get_ray(tmp_path: Path) -> None:
    """tests/install/ray_cluster.py runs it with Ray."""
    command = block(GUIDE, "## On a Ray cluster", "bash")
    (tmp_path / "serve.toml").write_text(f'[[model]]\nid = "mine"\npath = "{bundled.default_model_dir()}"\n')
    assert "exl-serve[ray]" in shell(f"! {command}", tmp_path)
