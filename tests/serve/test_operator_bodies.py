"""Bodies of the operator's routes: every field is read, named in a header, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from exl_serve.config.model import ModelConfig, ServeConfig, ServerConfig
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/model/load": {"model_name": "scripted"},
    "/v1/model/unload": {},
    "/v1/models/scripted/load": {},
    "/v1/models/scripted/unload": {},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/v1/lora/load": {"loras": [{"name": "a"}]},
    "/v1/lora/unload": {},
    "/reset_prefix_cache": {},
}


@pytest.fixture(scope="module", params=[False, True], ids=["lenient", "strict"])
def http(scripted: EngineThread, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A server whose models are never loaded or unloaded in truth."""
    model = ModelConfig(id="scripted", path=scripted.card.folder, max_batch_size=8)
    config = ServeConfig(server=ServerConfig(strict_fields=request.param))
    live = LiveServer({"scripted": scripted}, [model], config)
    assert live.state is not None

    async def control(name: str, /, **parameters: Any) -> dict[str, Any]:
        return {"id": parameters["model"], "state": "ready"}

    live.state.models.control = control  # type: ignore[method-assign]
    with httpx.Client(base_url=live.url, timeout=HANG_SECONDS) as client:
        client.headers["x-strict"] = str(request.param)
        yield client
    live.close()


@pytest.mark.parametrize("path", ROUTES)
def test_a_field_that_a_route_does_not_read_is_named(http: httpx.Client, path: str) -> None:
    known, unknown = (http.post(path, json=body) for body in (ROUTES[path], ROUTES[path] | {"nonsense": 7}))
    if http.headers["x-strict"] == "True":
        error = unknown.json()["error"]
        assert (unknown.status_code, error["code"], error["param"]) == (400, "unknown_parameter", "nonsense")
        assert "unknown_parameter" not in known.text
        return
    assert "x-exl-ignored" not in known.headers
    assert unknown.headers["x-exl-ignored"] == "nonsense"
    assert (unknown.status_code, unknown.text) == (known.status_code, known.text)


@pytest.mark.parametrize("path", ["/v1/models/scripted/load", "/v1/model/unload", "/reset_prefix_cache"])
def test_there_need_be_no_body(http: httpx.Client, path: str) -> None:
    assert http.post(path).status_code == 200
    assert http.post(path, content=b"[1]").status_code == 400


@pytest.mark.parametrize(
    ("name", "same", "other"),
    [
        ("max_seq_len", 1024, 512),
        ("cache_mode", "FP16", "Q4"),
        ("max_batch_size", 8, 16),
        ("gpu_split", [], [20.0, 24.0]),
        ("tensor_parallel", False, True),
        ("rope_scale", 1.0, 2.0),
        ("draft_model", {}, {"draft_model_name": "small"}),
    ],
)
def test_tabbyapi_s_options_of_loading_may_repeat_the_configuration(
    http: httpx.Client, name: str, same: Any, other: Any
) -> None:
    for value in (None, same):
        answer = http.post("/v1/model/load", json={"model_name": "scripted", name: value})
        assert (answer.status_code, "x-exl-ignored" in answer.headers) == (200, False), answer.text
        assert '"finished"' in answer.text
    answer = http.post("/v1/model/load", json={"model_name": "scripted", name: other})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", name)
