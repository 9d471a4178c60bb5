"""GET /health/generate."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from exl_serve.api import probe
from exl_serve.api.state import Caller
from exl_serve.config.model import ModelConfig
from exl_serve.engine.admission import Admission
from exl_serve.engine.client import Sink
from exl_serve.engine.events import EngineEvent, Tokens
from exl_serve.engine.local import LocalEngine
from exl_serve.errors import ServeError
from exl_serve.request.internal import EngineRequest
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS


@pytest.fixture
def http(fable: EngineThread) -> Iterator[httpx.Client]:
    """A server of its own, whose probe has seen nothing yet."""
    live = LiveServer({"fable": fable}, [ModelConfig(id="fable", path=fable.card.folder)])
    with httpx.Client(base_url=live.url, timeout=180) as client:
        yield client
    live.close()


def asked(thread: EngineThread) -> int:
    """Tokens that the engine has made."""
    return int(thread.generator.snapshot().generated_tokens)


def test_probes_share_one_token_for_some_seconds(http: httpx.Client, fable: EngineThread) -> None:
    before = asked(fable)
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(http.get("/health/generate"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 8
    assert answers[0].json()["status"] == "ok"
    assert http.get("/health/generate?max_age=3600&model=fable").json()["token_age_seconds"]["fable"] >= 0
    assert asked(fable) == before + 1
    assert http.get("/health/generate?max_age=0").status_code == 200
    assert asked(fable) == before + 2


def test_a_fresh_token_counts_against_the_limits_of_its_key(
    fable: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe with the usual age does not, whose interval cannot add load."""
    live = LiveServer({"fable": fable}, [ModelConfig(id="fable", path=fable.card.folder)])
    counted: list[int] = []

    def admit(caller: Caller, choices: int = 1) -> None:
        counted.append(choices)
        if len(counted) > 1:
            raise ServeError(429, "rate_limit_error", "rate_limit_exceeded", "too many")

    assert live.state is not None
    monkeypatch.setattr(live.state, "admit", admit)
    with httpx.Client(base_url=live.url, timeout=HANG_SECONDS) as client:
        statuses = [
            client.get("/health/generate", params=age).status_code for age in ({}, {"max_age": 0}, {"max_age": 5}, {})
        ]
    live.close()
    assert statuses == [200, 200, 429, 200]
    assert counted == [1, 1]


@pytest.mark.parametrize("age", ["-1", "3601", "nan", "soon"])
def test_a_wrong_age_is_refused(http: httpx.Client, age: str) -> None:
    answer = http.get("/health/generate", params={"max_age": age})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_age")


def test_a_model_that_is_not_there(http: httpx.Client) -> None:
    assert http.get("/health/generate?model=gpt").status_code == 404


def test_a_key_learns_of_its_own_models_alone(fable: EngineThread) -> None:
    models = [ModelConfig(id=name, path=fable.card.folder) for name in ("mine", "secret")]
    live = LiveServer(
        {"mine": fable, "secret": fable}, models, authenticate=lambda *_: Caller("k", models=frozenset({"mine"}))
    )
    try:
        answer = httpx.get(f"{live.url}/health/generate", timeout=180)
        assert list(answer.json()["token_age_seconds"]) == ["mine"]
        assert httpx.get(f"{live.url}/health/generate?model=secret", timeout=180).status_code == 404
    finally:
        live.close()


def test_an_engine_that_fails_or_writes_something_else(
    http: httpx.Client, fable: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert http.get("/health/generate").status_code == 200
    with monkeypatch.context() as patch:
        patch.setattr(fable.generator, "iterate_columns", lambda: 1 / 0)
        failed = http.get("/health/generate?max_age=0")
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_error")
    assert http.get("/health/generate?max_age=0").status_code == 200
    submit = LocalEngine.submit

    async def other(engine: LocalEngine, request: EngineRequest, sink: Sink) -> Any:
        def changed(event: EngineEvent) -> None:
            if isinstance(event, Tokens):
                event = msgspec.structs.replace(event, ids=tuple(id + 1 for id in event.ids))
            sink(event)

        return await submit(engine, request, changed)

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "submit", other)
        wrong = http.get("/health/generate?max_age=0")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (503, "engine_wrong_token")
    assert http.get("/health/generate?max_age=0").status_code == 200


def test_a_hanging_engine(http: httpx.Client, fable: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    iterate = fable.generator.iterate_columns

    def held() -> Any:
        gate.wait(120)
        return iterate()

    monkeypatch.setattr(probe, "SECONDS", 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(fable.generator, "iterate_columns", held)
        try:
            stuck = http.get("/health/generate?max_age=0")
        finally:
            gate.set()
    assert stuck.status_code == 503
    assert stuck.json()["error"]["code"] == "no_token"
    monkeypatch.setattr(probe, "SECONDS", 60.0)
    assert http.get("/health/generate?max_age=0").status_code == 200


def test_a_long_queue_is_no_failure(http: httpx.Client, fable: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "predicted_wait", lambda *_: 100.0)
    assert http.get("/health/generate?max_age=0").status_code == 200


def test_callers_that_come_together_do_not_wait_for_each_other(
    http: httpx.Client, fable: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    iterate = fable.generator.iterate_columns

    def held() -> Any:
        gate.wait(120)
        return iterate()

    made: list[Any] = []
    submit = LocalEngine.submit

    async def counted(engine: LocalEngine, request: EngineRequest, sink: Sink) -> Any:
        made.append(request)
        return await submit(engine, request, sink)

    monkeypatch.setattr(LocalEngine, "submit", counted)
    monkeypatch.setattr(probe, "SECONDS", 1.0)
    monkeypatch.setattr(fable.generator, "iterate_columns", held)
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: answers.append(http.get("/health/generate?max_age=0"))) for _ in range(8)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gate.set()
    assert [answer.status_code for answer in answers] == [503] * 8
    assert len(made) < 8
