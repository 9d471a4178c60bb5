"""How often a request renders its chat template, and how many renderings one key has at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from exl_generate import bundled
from exl_serve.api.conversation import MAX_CUTS
from exl_serve.api.rendering import RENDERS_OF_A_KEY, RenderTurns
from exl_serve.api.state import Caller
from exl_serve.api.text import FolderText
from exl_serve.config.model import ModelConfig
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer

FABLE = ModelConfig(id="fable", path=str(bundled.default_model_dir()), device="cpu", max_batch_size=8)
HELLO = {"role": "user", "content": "Hello"}


class Renderings:
    """Renderings of a server: their number, and the most that ran at a time. They end once `free` is set."""

    def __init__(self) -> None:
        self.count = self.active = self.most = 0
        self.begun, self.free = threading.Semaphore(0), threading.Event()
        self.free.set()


@pytest.fixture
def renderings(monkeypatch: pytest.MonkeyPatch) -> Renderings:
    found, render = Renderings(), FolderText.render

    async def counted(text: FolderText, *arguments: Any) -> tuple[str, list[int]]:
        found.count += 1
        found.active += 1
        found.most = max(found.most, found.active)
        found.begun.release()
        try:
            await asyncio.to_thread(found.free.wait)
            return await render(text, *arguments)
        finally:
            found.active -= 1

    monkeypatch.setattr(FolderText, "render", counted)
    return found


@pytest.fixture(scope="module")
def http(fable: EngineThread) -> Iterator[httpx.Client]:
    """A server that takes the header `x-name` as the key of a request."""

    def caller(scope: Any, needed: str) -> Caller:
        return Caller(name=dict(scope["headers"]).get(b"x-name", b"").decode())

    live = LiveServer({"fable": fable}, [FABLE], authenticate=caller)
    with httpx.Client(base_url=live.url, timeout=120) as client:
        yield client
    live.close()


@pytest.mark.parametrize("shape", ["even", "long at the end", "long at the begin"])
def test_few_renderings_find_the_turns_to_leave_out(http: httpx.Client, renderings: Renderings, shape: str) -> None:
    long = {"even": range(0), "long at the end": range(380, 400), "long at the begin": range(20)}[shape]
    said = [{"role": "user", "content": f"Question {i}. " * (40 if i in long else 1)} for i in range(400)]
    body: dict[str, Any] = {"model": "fable", "messages": said, "max_tokens": 4, "truncate_prompt_tokens": 600}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert renderings.count <= 1 + MAX_CUTS

    def tokens(messages: list[dict[str, Any]]) -> int:
        return int(http.post("/tokenize", json={"model": "fable", "messages": messages}).json()["count"])

    used = answer.json()["usage"]["prompt_tokens"]
    kept = next(n for n in range(1, 400) if tokens(said[-n:]) >= used)
    assert tokens(said[-kept:]) == used <= 600 < tokens(said[-kept - 1 :])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/apply-template"])
def test_one_key_does_not_take_all_template_processes(http: httpx.Client, renderings: Renderings, path: str) -> None:
    def ask(name: str) -> int:
        body = {"model": "fable", "messages": [HELLO], "max_tokens": 1}
        return http.post(path, json=body, headers={"x-name": name}).status_code

    renderings.free.clear()
    with ThreadPoolExecutor(7) as clients:
        try:
            asked = [clients.submit(ask, "greedy") for _ in range(6)]
            for _ in range(RENDERS_OF_A_KEY):
                assert renderings.begun.acquire()
            asked.append(clients.submit(ask, "other"))
            assert renderings.begun.acquire()
            assert renderings.active == RENDERS_OF_A_KEY + 1
        finally:
            renderings.free.set()
        assert [one.result() for one in asked] == [200] * 7
    assert renderings.most <= RENDERS_OF_A_KEY + 1


def test_a_key_that_renders_nothing_is_forgotten() -> None:
    async def run() -> None:
        turns = RenderTurns(1)
        async with turns.turn("a"), turns.turn("b"), turns.turn(""), turns.turn(""):
            assert len(turns) == 2
        assert len(turns) == 0

    asyncio.run(run())
