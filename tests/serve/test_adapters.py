"""Adapters that replace one another in a running server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from held import Held
from lora_folder import write_adapter

from exl_serve.config.model import ModelConfig
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer


@pytest.fixture
def engine(fable: EngineThread, tmp_path: Path) -> Iterator[EngineThread]:
    """The bundled model, which may load the adapters `first` and `second`."""
    write_adapter(tmp_path / "first", fable)
    write_adapter(tmp_path / "second", fable, -0.08)
    model = ModelConfig(id="fable", path=fable.card.folder, device="cpu", adapter_roots=(str(tmp_path),))
    thread = EngineThread(model)
    yield thread
    thread.close()


@pytest.fixture
def http(engine: EngineThread) -> Iterator[httpx.Client]:
    """A client of that model."""
    live = LiveServer({"fable": engine}, [ModelConfig(id="fable", path=engine.card.folder, device="cpu")])
    with httpx.Client(base_url=live.url, timeout=120) as client:
        yield client
    live.close()


def load(http: httpx.Client, name: str, folder: Path, **more: Any) -> int:
    body = {"lora_name": name, "lora_path": str(folder), **more}
    return http.post("/v1/load_lora_adapter", json=body).status_code


def complete(http: httpx.Client, name: str) -> str:
    body = {"prompt": "Once upon a time there was a little fox " * 40, "max_tokens": 12, "temperature": 0}
    answer = http.post("/v1/completions", json=body | {"model": f"fable:{name}", "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_an_adapter_replaces_one_of_its_name(http: httpx.Client, tmp_path: Path) -> None:
    assert load(http, "mine", tmp_path / "first") == 200
    old = complete(http, "mine")
    assert load(http, "mine", tmp_path / "second") == 409
    assert load(http, "mine", tmp_path / "nowhere", load_inplace=True) == 404
    assert complete(http, "mine") == old  # a failed load changes nothing
    assert load(http, "mine", tmp_path / "second", load_inplace=True) == 200
    new = complete(http, "mine")  # no cached page of the old one is used
    assert load(http, "fresh", tmp_path / "second", load_inplace=True) == 200
    assert old != new == complete(http, "fresh")
    assert {one["id"] for one in http.get("/v1/lora/list").json()["data"]} == {"mine", "fresh"}
    assert load(http, "mine", tmp_path / "first", load_inplace="yes") == 400


def test_an_adapter_in_use_is_not_replaced(
    http: httpx.Client, engine: EngineThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(http, "mine", tmp_path / "first") == 200
    held = Held(engine, monkeypatch, steps=3)
    body = {"model": "fable:mine", "prompt": "Once", "max_tokens": 40, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        with httpx.Client(base_url=http.base_url, timeout=120) as operator:
            assert load(operator, "mine", tmp_path / "second", load_inplace=True) == 409
        held.release()
        assert "data: [DONE]" in list(lines)
    assert load(http, "mine", tmp_path / "second", load_inplace=True) == 200


def test_tabbyapi_s_body_loads_adapters_by_the_names_of_their_folders(http: httpx.Client) -> None:
    wanted = [{"name": "first", "scaling": 0.5}, {"name": "nowhere"}, {"name": "second", "scaling": None}]
    answer = http.post("/v1/lora/load", json={"loras": wanted, "skip_queue": False})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert (told["success"], told["failure"]) == (["first", "second"], ["nowhere"])
    assert "'nowhere'" in told["errors"]["nowhere"]
    listed = http.get("/v1/lora/list").json()["data"]
    assert {one["id"]: one["scaling"] for one in listed} == {"first": 0.5, "second": 1.0}
    half = complete(http, "first")
    assert http.post("/v1/lora/load", json={"loras": [{"name": "first"}]}).json()["success"] == ["first"]
    assert complete(http, "first") != half, "the scaling changes the tokens"
    assert http.post("/v1/lora/unload", json={"lora_name": "second"}).status_code == 200
    assert [one["id"] for one in http.get("/v1/lora/list").json()["data"]] == ["first"]
    assert http.post("/v1/lora/unload", headers={"content-type": "application/json"}).json() == {"success": ["first"]}
    assert http.get("/v1/lora/list").json()["data"] == []


def test_all_adapters_are_unloaded_or_none(
    http: httpx.Client, engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    body: dict[str, Any] = {"loras": [{"name": "first"}, {"name": "second"}]}
    assert http.post("/v1/lora/load", json=body).json()["success"] == ["first", "second"]
    held = Held(engine, monkeypatch, steps=3)
    body = {"model": "fable:second", "prompt": "Once", "max_tokens": 40, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        with httpx.Client(base_url=http.base_url, timeout=120) as operator:
            answer = operator.post("/v1/lora/unload", json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
            assert [one["id"] for one in operator.get("/v1/lora/list").json()["data"]] == ["first", "second"]
        held.release()
        assert "data: [DONE]" in list(lines)
    assert http.post("/v1/lora/unload", json={}).json() == {"success": ["first", "second"]}
    assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["fable"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"loras": []}, "loras"),
        ({"loras": "first"}, "loras"),
        ({"loras": ["first"]}, "loras"),
        ({"loras": [{"name": "first"}] * 65}, "loras"),
        ({"loras": [{"name": "first"}, {"name": "first"}]}, "loras"),
        ({"loras": [{"scaling": 1}]}, "name"),
        ({"loras": [{"name": "first", "scaling": "1"}]}, "loras[0].scaling"),
        ({"loras": [{"name": "first", "scaling": 101}]}, "loras[0].scaling"),
        ({"loras": [{"name": "first"}], "lora_name": "a"}, "loras"),
        ({"loras": [{"name": "first"}], "skip_queue": True}, "skip_queue"),
    ],
)
def test_a_body_of_tabbyapi_that_is_wrong_loads_nothing(server: LiveServer, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{server.url}/v1/lora/load", json={"model": "fable", **body}, timeout=120)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_names_lead_out_of_no_folder(http: httpx.Client, fable: EngineThread, tmp_path: Path) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    write_adapter(outside, fable)
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "empty").mkdir()
    names = [f"../{outside.name}", str(outside), "link", "empty", "a\0b"]
    told = http.post("/v1/lora/load", json={"loras": [{"name": name} for name in names]}).json()
    assert told["failure"] == names
    assert http.get("/v1/lora/list").json()["data"] == []
    assert [("outside of the folders" in told["errors"][name]) for name in names] == [True, True, True, False, False]
