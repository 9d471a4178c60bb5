"""Events on their way to sinks: a request whose events cannot be read ends alone, and first tokens come first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

from exl_serve.engine import wire
from exl_serve.engine.events import EngineEvent, Failed, Finished, Progress, Tokens, Usage
from exl_serve.engine.local import LocalEngine
from exl_serve.request.internal import EngineRequest, Sampling

HANG = 120.0
USAGE = Usage(prompt_tokens=1, completion_tokens=1)


def request(seeds: tuple[int, ...]) -> EngineRequest:
    return EngineRequest(id="r", prompt=b"\1\0\0\0", sampling=Sampling(), seeds=seeds, max_tokens=9)


class Host:
    """The engine's end of a socket, which tests play."""

    def __init__(self, name: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(f"inproc://{name}")
        self.client = LocalEngine(f"inproc://{name}", self._context)
        self._worker = b""

    def received(self) -> wire.ToEngine:
        self._worker, data = self._socket.recv_multipart()
        return wire.decode_to_engine(data)

    async def accept(self, choices: int, sink: Callable[[EngineEvent], None]) -> int:
        """Submit a request and accept it; returns its tag."""
        task = asyncio.create_task(self.client.submit(request(tuple(range(choices))), sink))
        await asyncio.sleep(0)
        asked = self.received()
        assert isinstance(asked, wire.Submit)
        self.send(wire.Accepted(asked.tag))
        await asyncio.wait_for(task, HANG)
        return asked.tag

    def send(self, message: wire.ToWorker) -> None:
        self._socket.send_multipart([self._worker, wire.encode(message)])

    async def close(self) -> None:
        await self.client.close()
        self._socket.close(0)
        self._context.term()


def test_a_sink_that_raises_ends_its_request_alone() -> None:
    async def work() -> None:
        host = Host("sinks")
        told: dict[str, list[EngineEvent]] = {"bad": [], "good": []}

        def bad(event: EngineEvent) -> None:
            if isinstance(event, Tokens | Finished):
                raise RecursionError
            told["bad"].append(event)

        two, one = await host.accept(2, bad), await host.accept(1, bad)
        good = await host.accept(1, told["good"].append)
        last = Finished(0, "stop_token", 2, USAGE)
        events: list[tuple[int, EngineEvent]] = [
            (two, Tokens(1, (5,), "a")),
            (two, Tokens(0, (5,), "a")),
            (one, last),
            (good, Tokens(0, (5,), "a")),
            (good, last),
        ]
        host.send(wire.StepEvents(events))
        async with asyncio.timeout(HANG):
            while len(told["good"]) < 2:
                await asyncio.sleep(0.01)
        assert told["good"] == [Tokens(0, (5,), "a"), last]
        assert all(isinstance(event, Failed) and event.status == 500 for event in told["bad"])
        assert [event.choice for event in told["bad"]] == [0, 1, 0], "one end a completion"
        assert host.received() == wire.Cancel(two)
        await host.close()

    asyncio.run(work())


def test_first_tokens_do_not_wait_for_the_tokens_of_others() -> None:
    """In the order in which answers are written; of a request, events keep their order."""

    async def work() -> None:
        host, told = Host("first"), list[tuple[str, EngineEvent]]()

        async def accept(name: str) -> int:
            return await host.accept(1, lambda event: told.append((name, event)))

        async def step(events: Sequence[tuple[int, EngineEvent]]) -> list[tuple[str, EngineEvent]]:
            told.clear()
            host.send(wire.StepEvents([], _columns(events)) if len(events) > 3 else wire.StepEvents(list(events)))
            async with asyncio.timeout(HANG):
                while len(told) < len(events):
                    await asyncio.sleep(0.01)
            return list(told)

        def token(number: int) -> Tokens:
            return Tokens(0, (number,), "a")

        a, b = await accept("a"), await accept("b")
        assert await step([(a, token(1)), (b, token(2))]) == [("a", token(1)), ("b", token(2))]
        c, d = await accept("c"), await accept("d")
        begun = Progress(0, 1, 2)
        assert await step([(a, token(3)), (c, begun)]) == [("c", begun), ("a", token(3))], "c waits still"
        all_of = [(a, token(4)), (b, token(5)), (c, token(6)), (d, token(7))]
        assert [name for name, _ in await step(all_of)] == ["c", "d", "a", "b"]
        assert [name for name, _ in await step(all_of)] == ["a", "b", "c", "d"], "all have had tokens"
        await host.close()

    asyncio.run(work())


def _columns(events: Sequence[tuple[int, EngineEvent]]) -> wire.TokenColumns:
    tokens = [(tag, event) for tag, event in events if isinstance(event, Tokens)]
    return wire.TokenColumns(
        b"".join(wire.address_of(tag, event.choice) for tag, event in tokens),
        b"".join(len(event.ids).to_bytes(2, "little") for _, event in tokens),
        b"".join(number.to_bytes(4, "little") for _, event in tokens for number in event.ids),
        [event.text for _, event in tokens],
    )
