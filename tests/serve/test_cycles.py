"""Objects of a request are freed with its last reference, not by the garbage collector, which an API worker runs
rarely: garbage would be memory that grows for thousands of requests."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS, until

CHAT = {"model": "fable", "messages": [{"role": "user", "content": "A story, please."}], "max_tokens": 12}
TOOL = {"type": "function", "function": {"name": "note", "parameters": {"type": "object", "properties": {}}}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", CHAT),
    "many": ("chat/completions", CHAT | {"n": 3, "logprobs": True, "top_logprobs": 2, "stop": ["the"]}),
    "schema": ("chat/completions", CHAT | {"response_format": {"type": "json_object"}}),
    "completions": ("completions", {"model": "fable", "prompt": ["Once", "There"], "max_tokens": 8}),
    "responses": ("responses", {"model": "fable", "input": "A story.", "max_output_tokens": 8}),
    "refused": ("chat/completions", CHAT | {"temperature": 9}),
}


@pytest.fixture
def garbage() -> Iterator[list[Any]]:
    """Everything that the garbage collector would have freed, once it has run."""
    gc.collect()
    gc.freeze()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()  # what is frozen stays so: each collection would visit a million objects


def ours(found: list[Any]) -> Counter[str]:
    """Objects of our own classes, by class."""
    return Counter(type(one).__qualname__ for one in found if type(one).__module__.startswith("exl_"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("streamed", ["whole", "streamed", "cut"])
@pytest.mark.parametrize("kind", sorted(ASKED))
def test_requests_leave_no_cycles(server: LiveServer, kind: str, streamed: str, garbage: list[Any]) -> None:
    path, body = ASKED[kind]
    with httpx.Client(base_url=f"{server.url}/v1/", timeout=HANG_SECONDS) as client:
        client.get("models")
        gc.collect()
        garbage.clear()  # of the connection
        for _ in range(3):
            with client.stream("POST", path, json=body | {"stream": streamed != "whole"}) as answer:
                for _ in answer.iter_bytes():
                    if streamed == "cut":
                        break
    assert server.state is not None
    running = server.state.running
    until(lambda: not running)
    gc.collect()
    assert not ours(garbage)
