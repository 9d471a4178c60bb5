"""Answers whose engine or server ends after they have begun."""

from __future__ import annotations

from typing import Any

import pytest

from exl_serve.errors import ServeError
from exl_serve.stream.chunks import Answer, Chat, Completion
from exl_serve.stream.events import Begun, Content, Error
from exl_serve.stream.responses import Responses
from exl_serve.super import link

HEAD = {"id": "resp_x", "model": "m"}
SHAPES: dict[str, Any] = {
    "chat": lambda: Chat(HEAD, 1, None),  # type: ignore[arg-type]
    "completion": lambda: Completion(HEAD, 1, None),  # type: ignore[arg-type]
    "responses": lambda: Responses(HEAD, None),  # type: ignore[arg-type]
}


def failed(shape: str, status: int) -> Answer:
    answer: Answer = SHAPES[shape]()
    answer.chunks([Begun(0, 5, 2), Content(0, "a", (1,)), Error(0, status, "server_error", "code", "it ended")])
    return answer


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("status", "wait"), [(503, True), (429, True), (500, False), (408, False)])
def test_an_answer_that_ends_with_its_engine_says_when_to_ask_again(shape: str, status: int, wait: bool) -> None:
    with pytest.raises(ServeError) as caught:
        failed(shape, status).whole()
    assert caught.value.status == status
    assert ((caught.value.retry_after or 0) > 0) is wait


@pytest.mark.parametrize("wait", [30.0, None])
def test_a_worker_hears_when_to_ask_the_supervisor_again(wait: float | None) -> None:
    error = ServeError.unavailable("model_failed", "it could not be loaded", wait)
    told = link.decode_told(link.encode(link.Told.failed(7, error)))
    assert isinstance(told, link.Told)
    problem = told.problem()
    assert problem is not None
    assert (problem.status, problem.code, problem.retry_after) == (503, "model_failed", wait)
    assert link.Told(7, {"a": 1}).problem() is None


def test_a_failed_response_claims_no_usage() -> None:
    """The response had generated tokens, which its usage would count as none."""
    events = failed("responses", 408).last_chunks()
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["usage"] is None
