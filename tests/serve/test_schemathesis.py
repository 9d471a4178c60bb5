"""Requests that schemathesis makes of the OpenAPI document, against a server with the test engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from exl_generate import bundled
from exl_serve.api.openapi import ERROR, document
from exl_serve.config.model import ModelConfig, ServeConfig, ServerConfig
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS, until

#: Statuses of 500 and above that the interface declares: what this server does not offer, and what it cannot do now.
DECLARED = {501: {"unsupported"}, 503: {"model_loading", "draining"}}
CASES = 20
REQUIRED = {"messages", "prompt", "input", "tokens", "lora_name", "lora_path"}


def check(answer: httpx.Response) -> None:
    """An answer is one of the API's: an error has OpenAI's shape, and none is the server's own fault."""
    told = answer.text[:500]
    assert answer.headers.get("x-request-id"), told
    if answer.status_code < 400:
        return
    jsonschema.validate(answer.json(), ERROR)
    if answer.status_code >= 500:
        assert answer.json()["error"]["code"] in DECLARED.get(answer.status_code, ()), told


MODEL = ModelConfig(id="free", path=str(bundled.default_model_dir()), device="cpu", max_batch_size=8, engine="free")


@pytest.fixture
def lenient() -> Iterator[LiveServer]:
    """A server that answers for any model's name, so that most requests that are made up get as far as the engine."""
    thread = EngineThread(MODEL)
    live = LiveServer({MODEL.id: thread}, [MODEL], ServeConfig(server=ServerConfig(accept_any_model=True)))
    yield live
    live.close()
    thread.close()


@pytest.mark.full
def test_no_request_is_the_server_s_fault(lenient: LiveServer) -> None:
    server = lenient
    import schemathesis  # only this test needs it
    from schemathesis.core.result import Ok

    schema = schemathesis.openapi.from_dict(document())
    found = list(schema.get_all_operations())
    operations = [operation.ok() for operation in found if isinstance(operation, Ok)]
    assert len(operations) == len(found)
    assert len(operations) > 30
    modes = schemathesis.GenerationMode
    with httpx.Client(base_url=server.url, timeout=HANG_SECONDS) as client:
        for operation in operations:
            cases = st.one_of(
                *(operation.as_strategy(generation_mode=mode) for mode in (modes.POSITIVE, modes.NEGATIVE))
            )

            @settings(
                max_examples=CASES,
                deadline=None,
                phases=[Phase.generate],
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=cases, data=st.data())
            def ask(case: Any, data: st.DataObject) -> None:
                given = case.as_transport_kwargs(base_url=server.url)
                wanted = {key: given[key] for key in ("method", "url", "params", "json") if key in given}
                if "data" in given:
                    wanted["content"] = given["data"]
                if isinstance(body := wanted.get("json"), dict) and data.draw(st.booleans()):
                    # One in a hundred fields that is refused ends a request: most are of a few fields.
                    kept = data.draw(st.sets(st.sampled_from(sorted(body)), max_size=4)) if body else set()
                    wanted["json"] = {name: body[name] for name in body if name in kept | REQUIRED}
                check(client.request(**wanted))

            ask()
        answer = client.post("/v1/completions", json={"model": "free", "prompt": "Once", "max_tokens": 4})
        assert answer.status_code == 200
    assert server.state is not None
    running = server.state.running
    until(lambda: not running)
