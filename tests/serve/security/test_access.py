"""Permissions: keys, adapters' folders, tenants, pages of other sites."""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from lora_folder import write_adapter

from exl_generate import bundled
from exl_serve.api.app import ROUTES, SAFE_METHODS
from exl_serve.api.auth import Authenticator
from exl_serve.api.keys import KeyFile
from exl_serve.config.model import Auth, ModelConfig, ServeConfig, ServerConfig
from exl_serve.engine.load import load as load_engine
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS

KEYS = {name: "exl-" + letter * 43 for name, letter in (("ann", "a"), ("bob", "b"), ("boss", "c"))}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    scopes = {"boss": '"infer", "admin", "metrics"'}
    entries = (
        f'[[key]]\nname = "{name}"\nkey = "{key}"\nscopes = [{scopes.get(name, chr(34) + "infer" + chr(34))}]\n'
        for name, key in KEYS.items()
    )
    path.write_text("".join(entries))
    return path


@contextmanager
def live(
    engines: dict[str, EngineThread], models: list[ModelConfig], config: ServeConfig | None = None, auth: Any = None
) -> Iterator[str]:
    server = LiveServer(engines, models, config, auth)
    try:
        yield server.url
    finally:
        server.close()


def test_a_key_is_compared_with_every_entry(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    compare: Callable[[bytes, bytes], bool] = hmac.compare_digest

    def count(one: bytes, other: bytes) -> bool:
        nonlocal compared
        compared += 1
        return compare(one, other)

    file = KeyFile(key_file)
    monkeypatch.setattr(hmac, "compare_digest", count)
    for given in (*KEYS.values(), "exl-" + "z" * 43, ""):
        compared = 0
        file.find(given, 0)
        assert compared == len(KEYS)


# ---- adapters ------------------------------------------------------------------------------------------------------


def test_adapters_come_from_allowed_folders_only(fable: EngineThread, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "root-of-others"
    write_adapter(root / "good", fable)
    write_adapter(outside / "bad", fable)
    (root / "link").symlink_to(outside / "bad")
    (root / "empty").mkdir()
    model = ModelConfig(id="fable", path=fable.card.folder, device="cpu", adapter_roots=(str(root),))
    thread = EngineThread(model)
    try:
        with live({"fable": thread}, [model]) as url, httpx.Client(base_url=url, timeout=HANG_SECONDS) as http:

            def load(path: str, name: str = "one") -> tuple[int, str]:
                answer = http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
                return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["code"]

            for path in (
                str(outside / "bad"),
                f"{root}/../root-of-others/bad",
                f"{root}/good/../../root-of-others/bad",
                f"{root}/link",
                "/etc",
                "/",
                "good",
                "",
            ):
                assert load(path) in ((403, "adapter_root"), (400, "missing_field")), path
            assert load(f"{root}/good\0") == (400, "invalid_value")
            assert load(f"{root}/missing") == load(f"{root}/empty") == (404, "adapter_not_found")
            assert http.get("/v1/lora/list").json()["data"] == []
            for name in ("", "a:b", "x" * 129):
                assert load(f"{root}/good", name)[0] == 400, name

            assert load(f"{root}/good") == (200, "")
            assert load(f"{root}/good") == (409, "conflict")
            assert [one["id"] for one in http.get("/v1/lora/list").json()["data"]] == ["one"]
            body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
            plain, under = (
                http.post("/v1/completions", json=body | {"model": name}).json()["choices"][0]["text"]
                for name in ("fable", "fable:one")
            )
            assert plain != under, "the adapter changes the tokens"
            assert http.post("/v1/unload_lora_adapter", json={"lora_name": "one"}).status_code == 200
            gone = http.post("/v1/completions", json=body | {"model": "fable:one"})
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    finally:
        thread.close()


def test_names_of_models_are_no_paths(fable: EngineThread) -> None:
    with live({"fable": fable}, [ModelConfig(id="fable", path=fable.card.folder)]) as url:
        for name in (fable.card.folder, "../fable", "fable/../fable", "fable\0", "fable:../../x", "/etc/passwd"):
            answer = httpx.post(
                f"{url}/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 1}, timeout=HANG_SECONDS
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found"), name


# ---- tenants -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("salted", [True, False])
def test_with_salts_no_key_finds_the_pages_of_another(key_file: Path, fable: EngineThread, salted: bool) -> None:
    auth = Authenticator(Auth(key_file=str(key_file), per_key_salt=salted))
    text = f"The heron and the otter met at the {'salt' if salted else 'open'} lake. " * 30
    with live({"fable": fable}, [ModelConfig(id="fable", path=fable.card.folder)], auth=auth) as url:

        def cached(name: str) -> int:
            answer = httpx.post(
                f"{url}/v1/completions",
                json={"prompt": text, "max_tokens": 1},
                headers={"x-api-key": KEYS[name]},
                timeout=HANG_SECONDS,
            )
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        # Prompts of other tests may have the first tokens in common.
        few = 8
        assert cached("ann") < few
        assert cached("ann") >= 256
        assert (cached("bob") < few) == salted


@pytest.fixture
def slow(fable: EngineThread) -> Iterator[EngineThread]:
    """An engine whose requests last until they are cancelled."""
    config = ModelConfig(id="slow", path=fable.card.folder, device="cpu", engine="free")
    thread = EngineThread(config, loaded=load_engine(config)._replace(floor=lambda jobs: 0.1))
    yield thread
    thread.close()


def test_one_key_neither_sees_nor_ends_the_requests_of_another(key_file: Path, slow: EngineThread) -> None:
    auth = Authenticator(Auth(key_file=str(key_file)))
    model = ModelConfig(id="slow", path=slow.card.folder)
    body = {"prompt": "secret of ann", "max_tokens": 900, "stream": True, "ignore_eos": True}
    with live({"slow": slow}, [model], auth=auth) as url:
        headers = {"x-api-key": KEYS["ann"], "x-request-id": "req-of-ann"}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=HANG_SECONDS) as stream:
            assert stream.status_code == 200, stream.read()
            lines = stream.iter_lines()
            next(lines)

            def ask(method: str, path: str, key: str) -> httpx.Response:
                return httpx.request(method, url + path, headers={"x-api-key": KEYS[key]}, timeout=HANG_SECONDS)

            def seen(key: str) -> list[str]:
                return [one["id"] for one in ask("GET", "/v1/requests", key).json()["data"]]

            assert (seen("ann"), seen("bob"), seen("boss")) == (["req-of-ann"], [], ["req-of-ann"])
            answer = ask("DELETE", "/v1/requests/req-of-ann", "bob")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")
            assert seen("ann") == ["req-of-ann"]
            assert "secret" not in ask("GET", "/v1/requests", "boss").text
            assert ask("DELETE", "/v1/requests/req-of-ann", "ann").status_code == 200
            assert "cancelled" in "".join(lines)
            assert seen("boss") == []


# ---- pages of other sites ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_a_form_changes_nothing(fable: EngineThread, kind: str) -> None:
    with live({"fable": fable}, [ModelConfig(id="fable", path=fable.card.folder)]) as url:
        for route in ROUTES:
            if route.method in SAFE_METHODS:
                continue
            place = re.sub(r"\{.*?\}", "x", route.path)
            answer = httpx.request(
                route.method,
                url + place,
                content=b'{"prompt": "x"}',
                headers={"content-type": kind},
                timeout=HANG_SECONDS,
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type"), route


def test_only_named_origins_may_read_answers() -> None:
    config = ServeConfig(server=ServerConfig(cors_origins=("https://chat.example",)))
    model = ModelConfig(id="free", path=str(bundled.default_model_dir()), device="cpu", engine="free")
    thread = EngineThread(model)
    try:
        with live({"free": thread}, [model], config) as url, httpx.Client(base_url=url, timeout=HANG_SECONDS) as http:
            allowed = {"access-control-allow-origin": "https://chat.example", "vary": "origin"}
            body = {"prompt": "x", "max_tokens": 1}
            for method, content in (("GET", None), ("OPTIONS", None), ("POST", body)):
                path = "/v1/models" if method == "GET" else "/v1/completions"
                answer = http.request(method, path, json=content, headers={"origin": "https://chat.example"})
                assert answer.status_code in (200, 204)
                assert allowed.items() <= dict(answer.headers).items()
                for origin in ("https://chat.example.evil", "http://chat.example", "https://chat.example:8443", "null"):
                    other = http.request(method, path, json=content, headers={"origin": origin})
                    assert "access-control-allow-origin" not in other.headers
                    assert method != "POST" or other.status_code == 403
    finally:
        thread.close()


def test_pages_of_named_origins_send_and_read_any_header(fable: EngineThread) -> None:
    """OpenAI's library in a browser sends a dozen headers of its own."""
    config = ServeConfig(server=ServerConfig(cors_origins=("https://chat.example",)))
    asked = "authorization,content-type,x-stainless-lang,x-stainless-os"
    with live({"fable": fable}, [ModelConfig(id="fable", path=fable.card.folder)], config) as url:
        for origin, allowed in (("https://chat.example", asked), ("https://other.example", None)):
            headers = {
                "origin": origin,
                "access-control-request-method": "POST",
                "access-control-request-headers": asked,
            }
            answer = httpx.options(url + "/v1/chat/completions", headers=headers, timeout=HANG_SECONDS)
            assert answer.headers.get("access-control-allow-headers") == allowed
            answer = httpx.get(url + "/v1/models", headers={"origin": origin}, timeout=HANG_SECONDS)
            assert answer.headers.get("access-control-expose-headers") == (allowed and "*")


def test_the_page_may_load_nothing_of_others(fable: EngineThread) -> None:
    with live({"fable": fable}, [ModelConfig(id="fable", path=fable.card.folder)]) as url:
        for path in ("/", "/ui/app.js", "/ui/style.css"):
            headers = httpx.get(url + path, timeout=HANG_SECONDS).headers
            policy = {part.split()[0]: part.split()[1:] for part in headers["content-security-policy"].split(";")}
            assert policy == {
                "default-src": ["'none'"],
                "script-src": ["'self'"],
                "style-src": ["'self'"],
                "connect-src": ["'self'"],
                "img-src": ["'self'", "data:", "blob:"],
                "frame-ancestors": ["'none'"],
                "base-uri": ["'none'"],
                "form-action": ["'none'"],
            }
            assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
