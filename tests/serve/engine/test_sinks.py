"""A request whose events cannot be read ends alone: other requests have events in the same message."""

from __future__ import annotations

import asyncio

import zmq

from exl_serve.engine import wire
from exl_serve.engine.events import EngineEvent, Failed, Finished, Tokens, Usage
from exl_serve.engine.local import LocalEngine
from exl_serve.request.internal import EngineRequest, Sampling

HANG = 120.0
USAGE = Usage(prompt_tokens=1, completion_tokens=1)


def request(seeds: tuple[int, ...]) -> EngineRequest:
    return EngineRequest(id="r", prompt=b"\1\0\0\0", sampling=Sampling(), seeds=seeds, max_tokens=9)


def test_a_sink_that_raises_ends_its_request_alone() -> None:
    async def work() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        host = context.socket(zmq.ROUTER)
        host.bind("inproc://sinks")
        client = LocalEngine("inproc://sinks", context)
        told: dict[str, list[EngineEvent]] = {"bad": [], "good": []}

        def bad(event: EngineEvent) -> None:
            if isinstance(event, Tokens | Finished):
                raise RecursionError
            told["bad"].append(event)

        def received() -> wire.ToEngine:
            return wire.decode_to_engine(host.recv_multipart()[1])

        async def submit(choices: int, sink: object) -> None:
            task = asyncio.create_task(client.submit(request(tuple(range(choices))), sink))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            name, data = host.recv_multipart()
            asked = wire.decode_to_engine(data)
            assert isinstance(asked, wire.Submit)
            tags.append(asked.tag)
            host.send_multipart([name, wire.encode(wire.Accepted(asked.tag))])
            await asyncio.wait_for(task, HANG)
            names.append(name)

        tags: list[int] = []
        names: list[bytes] = []
        await submit(2, bad)
        await submit(1, bad)
        await submit(1, told["good"].append)
        two, one, good = tags
        last = Finished(0, "stop_token", 2, USAGE)
        events: list[tuple[int, EngineEvent]] = [
            (two, Tokens(1, (5,), "a")),
            (two, Tokens(0, (5,), "a")),
            (one, last),
            (good, Tokens(0, (5,), "a")),
            (good, last),
        ]
        host.send_multipart([names[0], wire.encode(wire.StepEvents(events))])
        async with asyncio.timeout(HANG):
            while len(told["good"]) < 2:
                await asyncio.sleep(0.01)
        assert told["good"] == [Tokens(0, (5,), "a"), last]
        assert all(isinstance(event, Failed) and event.status == 500 for event in told["bad"])
        assert [event.choice for event in told["bad"]] == [0, 1, 0], "one end a completion"
        assert received() == wire.Cancel(two)
        await client.close()
        host.close(0)
        context.term()

    asyncio.run(work())
