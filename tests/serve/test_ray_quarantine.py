"""Requests on which two replicas have ended are rejected for ten minutes; those that replicas have dropped are not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from ray_fakes import CARD, USAGE, Answer

from exl_serve.engine.events import EngineEvent, Failed, Finished, Started
from exl_serve.engine.local import SILENT
from exl_serve.errors import ServeError
from exl_serve.ray import client
from exl_serve.ray.client import DROPS, RayEngine
from exl_serve.ray.quarantine import MOST, QUARANTINE_SECONDS, Quarantine
from exl_serve.ray.replica import encode_events
from exl_serve.request.internal import Constraint, EngineRequest, MediaRef, Sampling, id_bytes
from exl_serve.testing.waiting import HANG_SECONDS

POISON = EngineRequest(id="r", prompt=id_bytes([1, 2]), sampling=Sampling(), seeds=(1,), max_tokens=1)


def rejected(quarantine: Quarantine, request: EngineRequest) -> bool:
    try:
        quarantine.check(request)
    except ServeError as error:
        return (error.status, error.code, "rejected for another" in error.message) == (500, "engine_error", True)
    return False


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"id": "another", "priority": 2}, True),
        ({"seeds": (2, 3), "max_tokens": 9, "sampling": Sampling(temperature=0.5)}, True),
        ({"key": "k"}, False),
        ({"prompt": id_bytes([1, 2, 3])}, False),
        ({"prompt": id_bytes([1])}, False),
        ({"negative_prompt": id_bytes([1])}, False),
        ({"adapter": "a"}, False),
        ({"constraints": (Constraint(kind="regex", source="a+"),)}, False),
        ({"media": (MediaRef(width=1, height=1, digest=b"d"),)}, False),
    ],
)
def test_another_prompt_is_another_request(changed: dict[str, Any], same: bool) -> None:
    quarantine = Quarantine()
    assert not rejected(quarantine, POISON)
    quarantine.add(POISON)
    assert rejected(quarantine, msgspec.structs.replace(POISON, **changed)) == same


def test_it_ends_after_ten_minutes() -> None:
    now = 0.0
    quarantine = Quarantine(lambda: now)
    quarantine.add(POISON)
    now = QUARANTINE_SECONDS - 1
    assert rejected(quarantine, POISON)
    quarantine.add(POISON)
    now = QUARANTINE_SECONDS
    assert rejected(quarantine, POISON), "it counts from the last time"
    now = 2 * QUARANTINE_SECONDS - 1
    assert not rejected(quarantine, POISON)


def test_the_oldest_make_room() -> None:
    quarantine = Quarantine()
    made = [msgspec.structs.replace(POISON, prompt=id_bytes([number])) for number in range(MOST + 1)]
    for one in made:
        quarantine.add(one)
    assert [rejected(quarantine, one) for one in (made[0], made[1], made[-1])] == [False, True, True]


class Replicas:
    """Replicas that handle POISON's prompt in a way: each ends before it has accepted it (`dies`) or after that
    (`breaks`), or `drops` of them end the stream in order, as for an ingress that they take for dead, or by the error
    of an engine that took its replica for dead (`silent`).
    """

    def __init__(self, way: str, drops: int = 0) -> None:
        self._way, self._drops = way, drops
        self.asked = 0
        self.avoided: list[list[str]] = []
        self.generate = self.tell = self.describe = self

    def options(self, **_: Any) -> Replicas:
        return self

    def remote(self, *given: Any, **named: Any) -> Any:
        if given and isinstance(given[0], str):
            return asyncio.sleep(0)
        self.asked += 1
        self.avoided.append(named["avoid"])
        return Answer(self._stream(f"replica {self.asked}", msgspec.msgpack.decode(given[0], type=EngineRequest)))

    async def _stream(self, name: str, request: EngineRequest) -> AsyncIterator[bytes]:
        way = self._way if request.prompt == POISON.prompt else ""
        if way == "dies":
            raise RuntimeError("the actor has died")
        yield json.dumps({"replica": name, "digest": "d", "refused": False}).encode()
        if way == "breaks":
            raise RuntimeError("the actor has died")
        if way == "drops" and self.asked <= self._drops:
            return
        if way == "silent" and self.asked <= self._drops:
            yield encode_events([Failed(0, 503, "server_error", "engine_restarting", SILENT)])
            return
        yield encode_events([Started(0, 1, 0), Finished(0, "length", None, USAGE)])


async def outcome(engine: RayEngine, request: EngineRequest) -> str:
    """The message of the error with which a request ends; "" without one."""
    last: asyncio.Future[EngineEvent] = asyncio.get_running_loop().create_future()

    def take(event: EngineEvent) -> None:
        if isinstance(event, Finished | Failed):
            last.set_result(event)

    try:
        await engine.submit(request, take)
    except ServeError as error:
        return error.message
    found = await asyncio.wait_for(last, HANG_SECONDS)
    return found.message if isinstance(found, Failed) else ""


@pytest.mark.parametrize("way", ["breaks", "dies"])
def test_a_request_that_ends_replicas_ends_two(way: str) -> None:
    """Replicas that ended before they had the request are no sign against it: a cluster may lose several at once."""

    async def steps() -> None:
        replicas = Replicas(way)
        engine = RayEngine(replicas, "i", CARD)
        assert "two replicas ended while they ran this request" in await outcome(engine, POISON)
        assert replicas.asked == 2
        again = msgspec.structs.replace(POISON, seeds=(2,))
        assert ("rejected for another" in await outcome(engine, again)) == (way == "breaks")
        assert replicas.asked == (2 if way == "breaks" else 4)
        assert await outcome(engine, msgspec.structs.replace(POISON, prompt=id_bytes([3]))) == ""
        assert not engine.calls

    asyncio.run(steps())


class Doomed:
    """Two replicas that end while they have all requests of `order`, the second one while it has `alone`, if given.

    The requests notice the end in this order. Those of `late` have not been accepted then.
    """

    def __init__(self, order: tuple[str, ...], *, late: tuple[str, ...] = (), alone: str = "") -> None:
        self._late, self._there = late, {1: order, 2: (alone,) if alone else order}
        self._turns: dict[tuple[int, str], asyncio.Event] = {}
        self._asked: dict[str, int] = {}
        self.generate = self.tell = self.describe = self

    def options(self, **_: Any) -> Doomed:
        return self

    def remote(self, *given: Any, **_: Any) -> Any:
        if given and isinstance(given[0], str):
            return asyncio.sleep(0)
        request = msgspec.msgpack.decode(given[0], type=EngineRequest)
        self._asked[request.id] = which = self._asked.get(request.id, 0) + 1
        return Answer(self._stream(which, request.id))

    def _turn(self, which: int, name: str) -> asyncio.Event:
        return self._turns.setdefault((which, name), asyncio.Event())

    async def _stream(self, which: int, name: str) -> AsyncIterator[bytes]:
        there = self._there.get(which, ())
        doomed = name in there
        if not doomed or name not in self._late:
            yield json.dumps({"replica": f"replica {which}", "digest": "d", "refused": False}).encode()
        if doomed:
            self._turn(which, name).set()
            for other in there:
                await self._turn(which, other).wait()
            for _ in range(20 * there.index(name)):
                await asyncio.sleep(0)
            raise RuntimeError("the actor has died")
        yield encode_events([Started(0, 1, 0), Finished(0, "length", None, USAGE)])


HELLO = msgspec.structs.replace(POISON, id="hello", prompt=id_bytes([7]))


@pytest.mark.parametrize("late", [(), ("r",)])
@pytest.mark.parametrize("order", [("r", "hello"), ("hello", "r")])
def test_a_request_that_shared_both_replicas_is_not_rejected(order: tuple[str, ...], late: tuple[str, ...]) -> None:
    """Nothing tells which of them ended the replicas: also where one has not been accepted, and whoever notices it
    first.
    """

    async def steps() -> None:
        engine = RayEngine(Doomed(order, late=late), "i", CARD)
        told = await asyncio.gather(outcome(engine, HELLO), outcome(engine, POISON))
        assert all("two replicas ended while they ran this request" in one for one in told)
        for one in (HELLO, POISON):
            assert await outcome(engine, one) == ""
        assert not engine.calls

    asyncio.run(steps())


@pytest.mark.parametrize("order", [("r", "hello"), ("hello", "r")])
def test_a_request_that_was_alone_on_one_of_two_replicas_is_rejected(order: tuple[str, ...]) -> None:
    async def steps() -> None:
        engine = RayEngine(Doomed(order, alone="r"), "i", CARD)
        hello, poison = await asyncio.gather(outcome(engine, HELLO), outcome(engine, POISON))
        assert hello == ""
        assert "two replicas ended while they ran this request" in poison
        assert "rejected for another" in await outcome(engine, POISON)
        assert await outcome(engine, HELLO) == ""
        assert await outcome(engine, msgspec.structs.replace(POISON, key="another")) == ""

    asyncio.run(steps())


def test_pauses_after_drops_double_up_to_two_seconds() -> None:
    assert [client.pause_after(drops) for drops in (1, 2, 3, 5, 6, 8)] == pytest.approx([0.1, 0.2, 0.4, 1.6, 2.0, 2.0])


@pytest.mark.parametrize("way", ["drops", "silent"])
@pytest.mark.parametrize("drops", [1, DROPS, DROPS + 1])
def test_replicas_that_drop_a_request_have_not_ended(monkeypatch: pytest.MonkeyPatch, drops: int, way: str) -> None:
    """A busy ingress lets its lease run out, a busy replica is silent for its engine: requests are sent again, also to
    the same replica, after pauses that grow.
    """
    paused: list[int] = []

    def skip(after: int) -> float:
        paused.append(after)
        return 0.0

    monkeypatch.setattr(client, "pause_after", skip)

    async def steps() -> None:
        replicas = Replicas(way, drops)
        engine = RayEngine(replicas, "i", CARD)
        assert ("too busy" in await outcome(engine, POISON)) == (drops > DROPS)
        assert replicas.asked == min(drops, DROPS) + 1
        assert not any(replicas.avoided)
        assert paused == list(range(1, min(drops, DROPS) + 1))
        assert await outcome(engine, POISON) == ""
        assert not engine.calls

    asyncio.run(steps())
