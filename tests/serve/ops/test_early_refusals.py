"""Requests that a limit refuses, before any work is done for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from exl_serve.api.auth import Authenticator
from exl_serve.api.text import FolderText
from exl_serve.config.model import Auth, ModelConfig, ServeConfig
from exl_serve.engine.local import LocalEngine
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS

KEYS = {"few": "requests_per_minute = 2", "narrow": "concurrent = 2", "free": ""}
LONG = "word " * 100_000
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    ("/v1/responses", {"input": LONG}),
]


def secret(name: str) -> str:
    return f"{name}-{'k' * 20}"


@pytest.fixture
def live(scripted: EngineThread, tmp_path: Path) -> Iterator[LiveServer]:
    """A server with a key for each row of `KEYS`."""
    entries = (f'[[key]]\nname = "{name}"\nkey = "{secret(name)}"\nlimits = {{ {KEYS[name]} }}\n' for name in KEYS)
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    file.write_text("".join(entries))
    authenticator = Authenticator(Auth(key_file=str(file)))
    model = ModelConfig(id="scripted", path=scripted.card.folder)
    made = LiveServer({"scripted": scripted}, [model], ServeConfig(), authenticator)
    assert made.state is not None
    made.state.admit = authenticator.admit
    yield made
    made.close()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls that render or tokenize."""
    found: list[str] = []

    def noted(name: str) -> Any:
        real = getattr(FolderText, name)

        def work(*arguments: Any, **options: Any) -> Any:
            found.append(name)
            return real(*arguments, **options)

        return work

    for name in ("render", "encode_long"):
        monkeypatch.setattr(FolderText, name, noted(name))
    return found


def ask(live: LiveServer, name: str, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"authorization": f"Bearer {secret(name)}"}
    return httpx.post(live.url + path, json={"model": "scripted"} | body, headers=headers, timeout=HANG_SECONDS)


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_key_over_its_limit_is_refused_before_its_prompt_is_read(
    live: LiveServer, encoded: list[str], path: str, body: dict[str, Any]
) -> None:
    short = {"prompt": "a", "max_tokens": 2}
    for left in ("1", "0"):
        done = ask(live, "few", "/v1/completions", short)
        assert (done.status_code, done.headers["x-ratelimit-remaining-requests"]) == (200, left)
    encoded.clear()
    refused = ask(live, "few", path, body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert not encoded
    told = {name: refused.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining", "reset")}
    assert (told["limit"], told["remaining"]) == ("2", "0")
    assert 0 < float(told["reset"].removesuffix("s")) <= 60
    assert 1 <= int(refused.headers["retry-after"]) <= 60


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_full_queue_refuses_before_the_prompt_is_read(
    live: LiveServer, encoded: list[str], monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    real = LocalEngine.__dict__["status"].fget

    def full(engine: LocalEngine) -> Any:
        return msgspec.structs.replace(real(engine), queued=8 * engine.card.max_batch_size + 4, queued_prompt_tokens=9)

    assert ask(live, "free", "/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
    encoded.clear()
    monkeypatch.setattr(LocalEngine, "status", property(full))
    refused = ask(live, "free", path, body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    assert not encoded


def test_a_refused_prompt_leaves_no_open_request(live: LiveServer) -> None:
    """Its place is given back though it failed after the limits had admitted it."""
    for path, body in ROUTES * 2:
        refused = ask(live, "narrow", path, body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert ask(live, "narrow", "/v1/completions", {"prompt": "a", "max_tokens": 2, "n": 2}).status_code == 200


@pytest.mark.parametrize("name", ["narrow", "few"])
def test_more_choices_than_a_key_may_ever_have_are_an_error(live: LiveServer, name: str) -> None:
    error = ask(live, name, "/v1/completions", {"prompt": "a", "max_tokens": 2, "n": 3}).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "n")
    assert ask(live, name, "/v1/completions", {"prompt": "a", "max_tokens": 2, "n": 2}).status_code == 200
