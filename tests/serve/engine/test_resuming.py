"""Requests that an engine which has ended had accepted: they continue, and no full queue rejects them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from exl_generate import bundled
from exl_serve.config.model import Limits, ModelConfig
from exl_serve.engine import resuming
from exl_serve.engine.events import Failed, Finished, Started, Tokens
from exl_serve.engine.local import LocalEngine
from exl_serve.errors import ServeError
from exl_serve.request.internal import Constraint, EngineRequest, Sampling
from exl_serve.testing.local import EngineThread

PROMPT = np.array([1, 40, 50, 60], "<i4").tobytes()
CONFIG = ModelConfig(id="m", path=str(bundled.default_model_dir()), device="cpu", max_batch_size=2, engine="free")


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    """A scripted engine whose queue has room for one request."""
    thread = EngineThread(CONFIG, Limits(max_queued_requests=1))
    yield thread
    thread.close()


def asked(**fields: Any) -> EngineRequest:
    given: dict[str, Any] = {"id": "r", "sampling": Sampling(temperature=0.0), "seeds": (1,), "max_tokens": 20}
    return EngineRequest(prompt=PROMPT, **given | {"ignore_eos": True} | fields)


class Sink:
    def __init__(self) -> None:
        self.events: list[Any] = []
        self._changed = asyncio.Event()

    def __call__(self, event: Any) -> None:
        self.events.append(event)
        self._changed.set()

    async def ended(self, choices: int = 1) -> list[Any]:
        async with asyncio.timeout(120):
            while sum(isinstance(event, Finished | Failed) for event in self.events) < choices:
                self._changed.clear()
                await self._changed.wait()
        return self.events

    def ids(self, choice: int = 0) -> tuple[int, ...]:
        return sum((event.ids for event in self.events if isinstance(event, Tokens) and event.choice == choice), ())


async def ran(client: LocalEngine, request: EngineRequest) -> Sink:
    sink = Sink()
    await client.submit(request, sink)
    await sink.ended(len(request.open_choices))
    return sink


def test_a_full_queue_takes_a_request_that_was_accepted_before(engine: EngineThread) -> None:
    async def work() -> None:
        client = await engine.connect()
        running = []
        for _ in range(2):
            sink = Sink()
            running.append(await client.submit(asked(id="long", max_tokens=900), sink))
            while not any(isinstance(event, Started) for event in sink.events):  # until then it waits in the queue
                await asyncio.sleep(0.001)
            running[-1].pause()  # they keep both places
        rejected: ServeError | None = None
        for _ in range(20):  # some wait in the generator
            try:
                running.append(await client.submit(asked(id="waits"), Sink()))
            except ServeError as error:
                rejected = error
        assert rejected is not None
        assert (rejected.status, rejected.code) == (429, "queue_full")
        schema = (Constraint(kind="regex", source="[a-z ]{40,50}"),)
        again = [Sink() for _ in range(3)]
        for sink, constraints in zip(again, ((), (), schema), strict=True):
            await client.submit(asked(again=True, constraints=constraints), sink)
        for one in running:
            one.cancel()
        for sink in again:
            assert isinstance((await sink.ended())[-1], Finished)
        await client.close()

    asyncio.run(work())


def test_completions_that_are_over_are_not_run(engine: EngineThread) -> None:
    async def work() -> None:
        client = await engine.connect()
        request = asked(seeds=(1, 2, 3), sampling=Sampling(temperature=1.0))
        whole = await ran(client, request)
        parts = tuple(np.array(whole.ids(choice)[:5], "<i4").tobytes() for choice in range(3))
        resumed = msgspec.structs.replace(request, resume=(b"", b"", parts[2]), over=(0,), again=True)
        rest = await ran(client, resumed)
        assert {event.choice for event in rest.events} == {1, 2}
        assert sum(isinstance(event, Started) for event in rest.events) == 2
        assert rest.ids(1) == whole.ids(1)
        assert rest.ids(2) == whole.ids(2)[5:]
        assert not client._running  # noqa: SLF001
        with pytest.raises(ServeError, match="not over"):
            await client.submit(msgspec.structs.replace(request, over=(0, 1, 2)), Sink())
        await client.close()

    asyncio.run(work())


def test_others_go_on_while_a_long_answer_resumes(engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two parts of the ids, running jobs make a step."""
    monkeypatch.setattr(resuming, "SECONDS", 0.0)
    generator = engine.generator
    told: list[str] = []

    def noted(name: str) -> Any:
        call = getattr(generator, name)

        def calling(*given: Any) -> Any:
            told.append(name)
            return call(*given)

        return calling

    for name in ("prepare", "iterate_columns"):
        monkeypatch.setattr(generator, name, noted(name))

    async def work() -> None:
        client = await engine.connect()
        request = asked(max_tokens=800)
        whole = await ran(client, request)
        ids = whole.ids()
        told.clear()
        other = Sink()
        running = await client.submit(asked(max_tokens=1000), other)
        rest = await ran(
            client, msgspec.structs.replace(request, resume=(np.array(ids[:640], "<i4").tobytes(),), again=True)
        )
        assert rest.ids() == ids[640:]
        parts = [at for at, name in enumerate(told) if name == "prepare"]
        assert len(parts) == 640 / resuming.IDS
        assert all(told[at + 1] == "iterate_columns" for at in parts)
        running.cancel()
        cut = await client.submit(
            msgspec.structs.replace(request, resume=(np.array(ids[:640], "<i4").tobytes(),), again=True), Sink()
        )
        cut.cancel()
        await ran(client, asked())
        assert engine.host.requests() == []
        await client.close()

    asyncio.run(work())
