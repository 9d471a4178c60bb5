"""Streams over HTTP whose replica ends at every 7th token, without Ray: the replicas are over one real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from chat_streams import joined, list_schema, note_tool
from effort import trials
from ray_fakes import Answer, StartedReplica

from exl_generate import bundled
from exl_serve.config.model import ModelConfig
from exl_serve.engine import wire
from exl_serve.engine.events import EngineEvent, Failed, Finished, Tokens
from exl_serve.engine.local import LocalEngine
from exl_serve.ray.client import RayEngine
from exl_serve.ray.replica import decode_events, encode_events
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer

FABLE = ModelConfig(id="fable", path=str(bundled.default_model_dir()), device="cpu", max_batch_size=8, family="hermes")
STRIDE = 7


class Client(RayEngine):
    """Closes the replicas' engine, too."""

    local: LocalEngine

    async def close(self) -> None:
        await super().close()
        await self.local.close()


class Mortal:
    """A deployment whose replica ends once a request has got so many tokens; `what` ends."""

    def __init__(self, thread: EngineThread, folder: Path) -> None:
        self._thread, self._folder = thread, folder
        self.engine: Client
        self.generate = self.describe = self.tell = self
        self.plan()

    def plan(self, what: str = "", cut: int = 0) -> None:
        """The next request's first replica ends at `cut` tokens; nothing ends without `what`."""
        self.what, self.cut, self.attempts = what, cut, 0
        self.gone: set[str] = set()

    async def connect(self) -> Client:
        self._local = await self._thread.connect()
        self.engine = await Client.connect(self, "ingress")
        self.engine.local = self._local
        return self.engine

    def options(self, **_: Any) -> Mortal:
        return self

    def remote(self, *given: Any, **named: Any) -> Any:
        if not given:
            return self._described()
        if isinstance(given[0], str):
            return self._told(named["to"])
        self.attempts += 1
        return Answer(self._stream(given[0], named["ingress"], named["tag"], f"replica {self.attempts}"))

    async def _described(self) -> dict[str, Any]:
        return {"card": wire.card_bytes(self._thread.card), "status": msgspec.json.encode(self._local.status)}

    async def _told(self, replica: str) -> None:
        if replica in self.gone:
            raise ConnectionError("the node has died")

    async def _stream(self, frame: bytes, ingress: str, tag: int, name: str) -> AsyncIterator[bytes]:
        """The events of a replica, one an item, so that the stream breaks where it is planned."""
        mortal = bool(self.what) and self.attempts == 1
        stream = StartedReplica(self._local, self._folder, name).generate(frame, ingress=ingress, tag=tag)
        yield await anext(stream)
        tokens, ended = 0, set[int]()
        async for item in stream:
            if isinstance(wire.decode_to_worker(item), wire.Rejected):
                yield item
            for event in decode_events(item):
                if mortal and tokens >= self.cut:
                    await stream.aclose()  # type: ignore[attr-defined]
                    for last in self._ends(name, ended):
                        yield last
                    return
                tokens += len(event.ids) if isinstance(event, Tokens) else 0
                if isinstance(event, Finished | Failed):
                    ended.add(event.choice)
                yield encode_events([event])

    def _ends(self, name: str, ended: set[int]) -> Iterator[bytes]:
        """The last items of a replica. Raises what Ray would."""
        if self.what == "engine":  # the replica sees it, and says so
            failed: list[EngineEvent] = [
                Failed(choice, 503, "server_error", "engine_restarting", "the engine of this replica has ended")
                for choice in range(3)
                if choice not in ended
            ]
            yield encode_events(failed)
            return
        if self.what == "node":
            self.gone.add(name)
            raise ConnectionError("the node has died")
        raise RuntimeError("the actor has died")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Mortal]]:
    thread = EngineThread(FABLE)
    mortal = Mortal(thread, tmp_path_factory.mktemp("images"))
    live = LiveServer({"fable": mortal}, [FABLE])  # type: ignore[dict-item]
    yield live.url, mortal
    live.close()
    thread.close()


CASES: dict[str, dict[str, Any]] = {
    "plain": {"ignore_eos": True, "max_tokens": 40},
    "three": {"ignore_eos": True, "max_tokens": 16, "n": 3},
    "schema": list_schema(4, 5, 6),
    "tools": note_tool(4, 5, 6),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize("what", ["engine", "actor", "node"])
@pytest.mark.parametrize("case", CASES)
def test_a_stream_survives_its_replica_at_every_seventh_token(
    cluster: tuple[str, Mortal], case: str, what: str, *, resumes: bool
) -> None:
    """The client has the answer of one replica; without `ray.resume` one clean error if it has tokens already.

    The default run ends it at every 14th.
    """
    url, mortal = cluster
    body = {"model": "fable", "messages": [{"role": "user", "content": "A story."}], "max_tokens": 120, "seed": 3}
    body |= CASES[case]
    mortal.plan()
    whole = joined(url, body)
    assert whole["done"]
    assert whole["status"] == 200
    mortal.engine.resumes = resumes
    for cut in count(0, trials(STRIDE, 2 * STRIDE)):
        mortal.plan(what, cut)
        told = joined(url, body)
        if told["error"] is None:
            assert told == whole, cut
        else:
            assert not resumes
            assert cut
            assert told["done"]
            assert told["error"]["code"] == "engine_restarting"
            # The status tells it where no part of the answer has been sent.
            assert told["status"] == (200 if told["ends"] else 503)
            for part in ("texts", "calls"):
                assert all(whole[part][index].startswith(text) for index, text in told[part].items()), cut
        if mortal.attempts == 1 and told["error"] is None:
            break
    assert cut >= 5 * STRIDE
    mortal.engine.resumes = True
