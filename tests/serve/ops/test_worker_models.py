"""The models of an API worker while their tokenizers are read."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TextIO

import msgspec
import pytest

from exl_generate import bundled
from exl_serve.api.state import Caller
from exl_serve.api.worker import WorkerModels
from exl_serve.config.model import ModelConfig
from exl_serve.errors import ServeError
from exl_serve.super.link import ModelState

HANG = 60.0


def told(id: str, **fields: Any) -> ModelState:
    config = ModelConfig(id=id, path=str(bundled.default_model_dir()), **fields)
    return ModelState(config=config, state="ready", address="", epoch=1)


class Template:
    """A template that is read only once the test writes it: a named pipe."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        os.mkfifo(path)

    async def opened(self) -> TextIO:
        """Wait for a reader; it goes on once the returned file is written and closed."""
        return await asyncio.to_thread(open, self.path, "w", encoding="utf-8")


@pytest.fixture
def slow(tmp_path: Path) -> Template:
    return Template(tmp_path / "template")


def run(work: Callable[[WorkerModels], Awaitable[None]], accept_any: bool = True) -> None:
    async def main() -> None:
        async with asyncio.timeout(HANG):
            await work(WorkerModels(accept_any, None))

    asyncio.run(main())


async def known(models: WorkerModels, id: str) -> None:
    while id not in [handle.config.id for handle in models.list()]:
        await asyncio.sleep(0.01)


def refusal(models: WorkerModels, name: str) -> tuple[int, str]:
    with pytest.raises(ServeError) as caught:
        models.resolve(name, Caller())
    return caught.value.status, caught.value.code


def test_a_model_whose_tokenizer_is_being_read_is_listed_as_loading(slow: Template) -> None:
    """With `accept_any_model`, the other model must not answer for it."""

    async def work(models: WorkerModels) -> None:
        models.update([told("a")])
        await known(models, "a")
        assert models.resolve("other", Caller())[0].config.id == "a"
        models.update([told("a"), told("b", aliases=("bee",), template=slow.path)])
        with await slow.opened():
            for name in ("b", "bee", "b:adapter"):
                assert refusal(models, name) == (503, "model_loading")
            assert refusal(models, "other") == (404, "model_not_found")
            assert models.resolve("a", Caller())[0].config.id == "a"
        await known(models, "b")
        assert models.resolve("bee", Caller())[0].config.id == "b"

    run(work)


def test_a_model_whose_tokenizer_cannot_be_read_is_listed_as_failed(tmp_path: Path) -> None:
    async def work(models: WorkerModels) -> None:
        models.update([told("a"), told("b", template=str(tmp_path / "none"))])
        await models.known.wait()
        assert refusal(models, "b") == (503, "model_failed")
        models.update([told("a")])
        assert models.resolve("b", Caller())[0].config.id == "a"

    run(work)


def test_a_worker_is_ready_once_it_answers_for_a_model_that_is(slow: Template, tmp_path: Path) -> None:
    """The server is announced then: the first request is answered."""

    async def work(models: WorkerModels) -> None:
        loading = msgspec.structs.replace(told("a", template=slow.path), state="loading")
        models.update([loading])
        models.update([msgspec.structs.replace(loading, state="ready")])
        with await slow.opened():
            assert not models.ready.is_set()
        await models.ready.wait()
        assert models.resolve("a", Caller())[0].state == "ready"

    async def unreadable(models: WorkerModels) -> None:
        loading = msgspec.structs.replace(told("a", template=str(tmp_path / "none")), state="loading")
        models.update([loading])
        await models.known.wait()
        assert not models.ready.is_set()
        models.update([msgspec.structs.replace(loading, state="ready")])
        assert models.ready.is_set()
        assert refusal(models, "a") == (503, "model_failed")

    run(work)
    run(unreadable)


def test_a_configuration_that_changes_while_it_is_read_is_read_again(slow: Template) -> None:
    async def work(models: WorkerModels) -> None:
        models.update([told("b", template=slow.path)])
        with await slow.opened():
            models.update([told("b", aliases=("bee",))])
        await models.known.wait()
        assert models.resolve("bee", Caller())[0].config.aliases == ("bee",)

    run(work)


def test_an_unreadable_tokenizer_is_read_again_for_another_engine_only(tmp_path: Path) -> None:
    """The supervisor tells the states of all models whenever one changes."""
    file = tmp_path / "template"

    async def work(models: WorkerModels) -> None:
        bad = told("b", template=str(file))
        models.update([bad])
        await models.known.wait()
        file.write_text("{{ messages }}")
        models.update([msgspec.structs.replace(bad, state="failed")])
        assert refusal(models, "b") == (503, "model_failed")
        models.update([msgspec.structs.replace(bad, epoch=bad.epoch + 1)])
        assert refusal(models, "b") == (503, "model_loading")
        await known(models, "b")

    run(work)


def test_a_model_that_is_being_unloaded_is_asked_again_later() -> None:
    """The next request loads it."""

    async def work(models: WorkerModels) -> None:
        ready = told("a")
        models.update([ready])
        await known(models, "a")
        models.update([msgspec.structs.replace(ready, state="draining")])
        with pytest.raises(ServeError, match="is being unloaded: try again") as caught:
            await models.resolve("a", Caller())[0].engine()
        error = caught.value
        assert (error.status, error.code) == (503, "model_unloaded")
        assert (error.retry_after or 0) > 0

    run(work)


def test_requests_that_wait_for_an_engine_end_with_it(tmp_path: Path) -> None:
    """The engine is unloaded before it has answered the worker's first message."""

    async def work(models: WorkerModels) -> None:
        ready = msgspec.structs.replace(told("a"), address=f"ipc://{tmp_path}/nobody")
        models.update([ready])
        await known(models, "a")
        handle = models.resolve("a", Caller())[0]
        waiting = [asyncio.create_task(handle.engine()) for _ in range(2)]
        await asyncio.sleep(0)
        models.update([msgspec.structs.replace(ready, state="draining")])
        assert not await still(waiting)
        models.update([msgspec.structs.replace(ready, state="unloaded")])
        for one in waiting:
            with pytest.raises(ServeError, match="has ended: try again") as caught:
                await one
            assert (caught.value.status, caught.value.code) == (503, "engine_restarting")

    run(work)


async def still(waiting: list[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    """Return those that have ended after some turns of the loop."""
    for _ in range(20):
        await asyncio.sleep(0)
    return [one for one in waiting if one.done()]
