"""Adapters that replace one another in a running server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from held import Held
from lora_folder import write_adapter

from exl_core import ExLlamaV2Lora
from exl_kernels.errors import UnsupportedError
from exl_serve.config.model import ModelConfig
from exl_serve.engine.adapters import Adapters
from exl_serve.errors import ServeError
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
    assert told["errors"]["nowhere"]["code"] == "adapter_not_found"
    assert "'nowhere'" in told["errors"]["nowhere"]["message"]
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


def _cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:400])


def _instead(name: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(text)

    return write


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (_cut, "truncated"),
    "empty": (_instead("adapter_model.safetensors", ""), "holds 0 bytes"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "neither adapter_model"),
    "no JSON": (_instead("adapter_config.json", "{"), "not valid JSON"),
    "a list": (_instead("adapter_config.json", "[]"), "must hold a JSON object"),
    "a text": (_instead("adapter_config.json", '{"peft_type": "LORA", "r": "x"}'), "not of expected type"),
    "no rank": (_instead("adapter_config.json", '{"peft_type": "LORA", "r": 0, "lora_alpha": 1}'), "r is 0"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_adapter_is_refused_and_the_others_are_loaded(
    http: httpx.Client, fable: EngineThread, tmp_path: Path, damage: str
) -> None:
    act, reason = DAMAGE[damage]
    write_adapter(tmp_path / "bad", fable)
    act(tmp_path / "bad")
    answer = http.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": str(tmp_path / "bad")})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "adapter")
    assert reason in error["message"]
    assert str(tmp_path) not in error["message"]
    told = http.post("/v1/lora/load", json={"loras": [{"name": "first"}, {"name": "bad"}, {"name": "second"}]}).json()
    assert (told["success"], told["failure"]) == (["first", "second"], ["bad"])
    assert told["errors"]["bad"] == {"code": "adapter", "message": error["message"]}


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(PermissionError(13, "Permission denied"), 400, "adapter"), (UnsupportedError("not built"), 501, "unsupported")],
)
def test_an_adapter_that_this_process_cannot_take_does_not_stop_the_others(
    http: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, code: str
) -> None:
    read = ExLlamaV2Lora.from_directory

    def fail(model: Any, folder: str, scaling: float) -> Any:
        if Path(folder).name == "first":
            raise error
        return read(model, folder, scaling)

    monkeypatch.setattr(ExLlamaV2Lora, "from_directory", fail)
    assert load(http, "first", tmp_path / "first") == status
    told = http.post("/v1/lora/load", json={"loras": [{"name": "first"}, {"name": "second"}]}).json()
    assert (told["success"], told["errors"]["first"]["code"]) == (["second"], code)


def test_an_engine_that_fails_is_no_failure_of_an_adapter(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    read = ExLlamaV2Lora.from_directory

    def fail(model: Any, folder: str, scaling: float) -> Any:
        if Path(folder).name == "second":
            raise RuntimeError("the device is lost")
        return read(model, folder, scaling)

    monkeypatch.setattr(ExLlamaV2Lora, "from_directory", fail)
    answer = http.post("/v1/lora/load", json={"loras": [{"name": "first"}, {"name": "second"}]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")


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
        ({"loras": [{"name": "first"}], "lora_path": "a"}, "loras"),
        ({"loras": [{"name": "first"}], "load_inplace": True}, "loras"),
        ({"loras": [{"name": "first"}], "skip_queue": True}, "skip_queue"),
        ({"loras": [{"name": "first"}], "skip_queue": "false"}, "skip_queue"),
        ({"loras": [{"name": "first"}, {"name": "second", "scale": 0.5}]}, "loras[1].scale"),
    ],
)
def test_a_body_of_tabbyapi_that_is_wrong_loads_nothing(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/lora/load", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert http.get("/v1/lora/list").json()["data"] == []


@pytest.mark.parametrize(
    "name", [".", "..", "../{outside}", "/{outside}", "./first", "a/../first", "a\\b", "a\0b", "a:b"]
)
def test_a_name_that_is_a_path_is_refused_whether_it_exists_or_not(
    http: httpx.Client, fable: EngineThread, tmp_path: Path, name: str
) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    given = name.format(outside=str(outside).lstrip("/") if name.startswith("/") else outside.name)
    body = {"loras": [{"name": "second"}, {"name": given}]}
    before = http.post("/v1/lora/load", json=body)
    assert (before.status_code, before.json()["error"]["param"]) == (400, "loras[1].name")
    write_adapter(outside, fable)
    assert http.post("/v1/lora/load", json=body).json() == before.json()
    assert http.get("/v1/lora/list").json()["data"] == []


@pytest.mark.parametrize("name", ["a" * 129, "\u00e9" * 128])
def test_a_name_that_no_folder_can_have_is_refused(http: httpx.Client, name: str) -> None:
    """Two-byte letters: file systems limit the bytes of a name."""
    error = http.post("/v1/lora/load", json={"loras": [{"name": name}]})
    assert (error.status_code, error.json()["error"]["param"]) == (400, "loras[0].name")
    assert str(len(name.encode())) in error.json()["error"]["message"]


@pytest.mark.parametrize(("path", "status"), [("a" * 5000, 404), ("a\0b", 400)])
def test_a_path_that_no_folder_can_have_is_refused(http: httpx.Client, tmp_path: Path, path: str, status: int) -> None:
    body = json.dumps({"lora_name": "a", "lora_path": f"{tmp_path}/{path}"})
    answer = http.post("/v1/load_lora_adapter", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text


def test_the_engine_checks_the_names_of_folders_itself(fable: EngineThread, tmp_path: Path) -> None:
    """Another program may send the engine calls."""
    model = ModelConfig(id="fable", path=fable.card.folder, device="cpu", adapter_roots=(str(tmp_path),))
    with pytest.raises(ServeError) as caught:
        Adapters(None, model).load("../outside", None)
    assert (caught.value.status, caught.value.param) == (400, "loras")


def test_links_lead_out_of_no_folder(http: httpx.Client, fable: EngineThread, tmp_path: Path) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "empty").mkdir()
    body = {"loras": [{"name": "link"}, {"name": "empty"}]}
    before = http.post("/v1/lora/load", json=body).json()
    write_adapter(outside, fable)
    told = http.post("/v1/lora/load", json=body).json()
    assert told == before
    codes = {name: error["code"] for name, error in told["errors"].items()}
    assert codes == {"link": "adapter_root", "empty": "adapter_not_found"}
    assert http.get("/v1/lora/list").json()["data"] == []
