"""The recipe of docs/guides/lan-server.md: its files exist and agree, its server answers, and its limits hold."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from guide_commands import DEPLOY, ROOT, Machine
from served import SECONDS, Served

from exl_generate import bundled
from exl_serve.api.keys import read_keys
from exl_serve.config.load import ConfigError, parse
from exl_serve.config.model import ServeConfig

PAGE = (ROOT / "docs/guides/lan-server.md").read_text(encoding="utf-8")
PROGRAMS = ("make", "sudo")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """The machine after all commands but the client's; `sudo` and `make` only note their calls."""
    machine = Machine(tmp_path, *PROGRAMS)
    (machine.folder / "serve.toml").write_text(blocks("toml")[1], encoding="utf-8")
    *commands, client = blocks("bash")
    (machine.folder / "told").write_text("".join(machine.run(one) for one in commands), encoding="utf-8")
    assert client.startswith("curl ")
    return machine


def installed(machine: Machine) -> dict[str, list[str]]:
    """Target of each `sudo install` of a file -> its arguments, the source as an existing path."""
    calls = [call for call in machine.calls("sudo") if call[0] == "install" and "-d" not in call]
    assert all((machine.folder / call[-2]).is_file() for call in calls)
    return {call[-1]: call for call in calls}


def test_files_are_where_the_service_and_nginx_read_them(machine: Machine) -> None:
    files = installed(machine)
    unit = (machine.folder / DEPLOY / "exl-serve.service").read_text()
    calls = machine.calls("sudo")
    (user,) = (call[-1] for call in calls if call[0] == "useradd")
    assert f"User={user}\n" in unit
    assert "ExecStart=/usr/local/bin/exl serve --config /etc/exl/serve.toml\n" in unit
    assert ["ln", "-sf", "/opt/exl/bin/exl", "/usr/local/bin/exl"] in calls
    assert ["-u", user, "exl", "serve", "check", "/etc/exl/serve.toml"] in calls
    config = tomllib.loads((machine.folder / "serve.toml").read_text())
    assert files[config["auth"]["key_file"]][1:7] == ["-m", "600", "-o", user, "-g", user]
    assert any(call[0] == "cp" and call[-1] == config["model"][0]["path"] for call in calls)
    nginx = (machine.folder / "nginx.conf").read_text()
    (name,) = re.findall(r"server_name (\S+);", nginx)
    assert config["server"]["cors_origins"] == [f"https://{name}"]
    assert {f"{path}" for path in re.findall(r"ssl_certificate\w* (\S+);", nginx)} <= files.keys()
    assert name in blocks("bash")[-1]
    assert parse(config).server.host == ServeConfig().server.host == "127.0.0.1"


def test_the_shown_entry_is_what_the_commands_write(machine: Machine) -> None:
    shown, written = tomllib.loads(blocks("toml")[0]), tomllib.loads((machine.folder / "keys.toml").read_text())
    (key,) = read_keys(machine.folder / "keys.toml")
    assert key.limits.requests_per_minute == 60
    for entry in (*shown["key"], *written["key"]):
        del entry["sha256"]
    assert shown == written


def test_the_server_rejects_the_placeholder_of_the_shown_entry(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(blocks("toml")[0])
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        read_keys(file)


def test_every_setting_of_the_table_has_the_named_default() -> None:
    defaults: Any = ServeConfig()
    for path, value in re.findall(r"`((?:auth|server|qos)\.[\w.]+)`, (\d+)\b(?! times| MiB)", PAGE):
        found: Any = defaults
        for name in path.split("."):
            found = getattr(found, name)
        assert found == int(value), path
    limits = defaults.server.limits
    assert (limits.max_body_bytes, limits.max_plain_body_bytes) == (32 << 20, 1 << 20)
    assert "8 times `max_batch_size`" in PAGE


def test_the_server_of_the_recipe_and_its_limits(machine: Machine, served: Callable[..., Served]) -> None:
    """The client's command is answered; then each limit that takes no minute to reach gives the named answer."""
    keys, config = machine.folder / "keys.toml", machine.folder / "serve.toml"
    keys.write_text(keys.read_text().replace("requests_per_minute = 60", "requests_per_minute = 2"))
    model = str(bundled.default_model_dir())
    text = config.read_text().replace("/etc/exl/keys.toml", str(keys)).replace("/srv/models/mine", model)
    config.write_text(text)
    server = served("--config", str(config)).up()
    told = re.search(r"^key: (\S+)$", (machine.folder / "told").read_text(), re.MULTILINE)
    assert told is not None
    command = blocks("bash")[-1].replace("--cacert models.lan.pem https://models.lan", server.url)
    assert '"content"' in machine.run(f"KEY={told[1]}; {command}")
    body = {"model": "mine", "prompt": "Once", "max_tokens": 2}

    def ask(key: str, **more: object) -> tuple[int, str, httpx.Response]:
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body | more, headers=headers, timeout=SECONDS)
        return answer.status_code, answer.json().get("error", {}).get("code", ""), answer

    status, _, answer = ask(told[1])
    assert (status, answer.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    status, code, answer = ask(told[1])
    assert (status, code) == (429, "rate_limit_exceeded")
    assert 0 < int(answer.headers["retry-after"]) <= 60
    assert ask("wrong")[:2] == (401, "invalid_api_key")
    for code in ("rate_limit_exceeded", "invalid_api_key", "too_many_requests", "queue_full", "body_too_large"):
        assert f"`{code}`" in PAGE


def test_the_clients_command_reaches_the_name_of_the_certificate() -> None:
    words = shlex.split(blocks("bash")[-1])
    assert words[words.index("--cacert") + 1] == "models.lan.pem"
    assert words[4] == "https://models.lan/v1/chat/completions"
