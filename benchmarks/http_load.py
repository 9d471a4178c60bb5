"""Load generator of bench_http.py: requests over keep-alive connections, each event stamped as its bytes come."""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import itertools
import json
import random
import re
import time
from typing import Any

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: "


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def work(count: int, vocab: int, new: int, longest: int, seed: int = 1) -> list[dict[str, Any]]:
    """The requests: prompts of random tokens, greedy, without an end of text. Their answers are of different lengths,
    `new` tokens in the mean, so that requests come one by one both ways: all prompts at once would flatter the engine.
    """
    draw = random.Random(seed)
    return [
        {
            "prompt": [draw.randrange(300, vocab) for _ in range(draw.randrange(min(64, longest - 1), longest))],
            "max_tokens": draw.randrange(new // 2, new * 3 // 2),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "seed": seed,
        }
        for seed in range(count)
    ]


def digest(answers: list[list[int]]) -> str:
    return hashlib.blake2b(json.dumps(answers).encode(), digest_size=8).hexdigest()


def delays(sent: list[float], stamps: list[list[float]]) -> dict[str, float]:
    """Milliseconds to the first token of each request, and between its further events."""
    first = [(own[0] - asked) * 1e3 for asked, own in zip(sent, stamps, strict=True)]
    between = [(b - a) * 1e3 for own in stamps for a, b in itertools.pairwise(own)]
    return {
        "first_token_ms_p50": percentile(first, 0.5),
        "first_token_ms_p99": percentile(first, 0.99),
        "between_ms_p50": percentile(between, 0.5),
        "between_ms_p99": percentile(between, 0.99),
    }


def arrivals(count: int, rate: float, seed: int = 3) -> list[float]:
    """Seconds at which requests of a Poisson process arrive, `rate` a second in the mean."""
    draw = random.Random(seed)
    return list(itertools.accumulate(draw.expovariate(rate) for _ in range(count)))


def load(
    port: int,
    warm: list[dict[str, Any]],
    requests: list[dict[str, Any]],
    streams: int,
    at: list[float] | None,
    out: Any,
) -> None:
    """Send requests: `streams` at a time, or each at its second of `at`. Puts a line into `out` after the warm-up, and
    the results at the end.
    """
    import uvloop

    uvloop.run(_load(port, warm, streams, None))
    out.put(None)
    out.put(uvloop.run(_load(port, requests, streams, at)))


class _Run:
    """The requests of a run and what came of each: its second of sending, and (second, bytes) of each read."""

    def __init__(self, requests: list[dict[str, Any]], at: list[float] | None) -> None:
        self.bodies = [json.dumps(asked).encode() for asked in requests]
        self.raw: list[list[tuple[float, bytes]]] = [[] for _ in requests]
        self.sent = [0.0] * len(requests)
        self.waiting = list(range(len(requests)))[::-1]
        self.left, self.paced = len(requests), at is not None
        self.free: list[_Client] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ended(self, client: _Client) -> None:
        """A request of `client` has its answer."""
        self.left -= 1
        if not self.left and not self.done.done():
            self.done.set_result(None)
        if self.paced and client.open:
            self.free.append(client)
        elif self.waiting:
            client.send(self.waiting.pop())

    def failed(self, reason: str) -> None:
        """End the run with an error, unless it has its answers."""
        if not self.done.done():
            self.done.set_exception(RuntimeError(reason))


class _Client(asyncio.Protocol):
    """One connection: sends a request and stamps what comes."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        #: the server has not closed it
        self.open = True

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def send(self, number: int) -> None:
        """Send a request; the connection is free."""
        self._number, self._tail = number, b""
        body = self._run.bodies[number]
        self._run.sent[number] = time.perf_counter()
        self._transport.write(HEAD + str(len(body)).encode() + b"\r\n\r\n" + body)

    def data_received(self, data: bytes) -> None:
        own = self._run.raw[self._number]
        own.append((time.perf_counter(), data))
        if len(own) == 1 and not data.startswith(b"HTTP/1.1 200"):
            self._run.failed(f"the server answered {data!r}")
        self._tail = (self._tail + data)[-48:]
        if self._tail.endswith(b"0\r\n\r\n") and b"data: [DONE]" in self._tail:
            self._run.ended(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if self in self._run.free:  # a server may close a connection that has nothing to do
            self._run.free.remove(self)
        else:
            self._run.failed(f"the server has closed a connection: {error}")


async def _load(port: int, requests: list[dict[str, Any]], streams: int, at: list[float] | None) -> dict[str, Any]:
    run = _Run(requests, at)
    loop = asyncio.get_running_loop()

    async def connected() -> _Client:
        client: _Client = (await loop.create_connection(lambda: _Client(run), "127.0.0.1", port))[1]
        return client

    if at is None:
        clients = [await connected() for _ in range(min(streams, len(requests)))]
        began = time.perf_counter()
        for client in clients:
            client.send(run.waiting.pop())
    else:
        began = time.perf_counter()
        for number, second in enumerate(at):
            await asyncio.sleep(max(0.0, began + second - time.perf_counter()))
            (run.free.pop() if run.free else await connected()).send(number)
    await run.done
    return _read(run, began)


def _read(run: _Run, began: float) -> dict[str, Any]:
    seconds = time.perf_counter() - began
    answers, all_stamps = [], []
    for pieces in run.raw:
        ids: list[int] = []
        stamps: list[float] = []
        ends = list(itertools.accumulate(len(data) for _, data in pieces))
        for event in re.finditer(rb"data: (\{.*?\})\n\n", b"".join(data for _, data in pieces)):
            choice = json.loads(event[1])["choices"][0]
            if choice.get("token_ids"):
                ids += choice["token_ids"]
                stamps.append(pieces[bisect.bisect_left(ends, event.end())][0])
        answers.append(ids)
        all_stamps.append(stamps)
    made = sum(map(len, answers))
    return {
        "seconds": seconds,
        "tok_s": made / seconds,
        "digest": digest(answers),
        **delays(run.sent, all_stamps),
        "tokens_per_event": made / max(1, sum(map(len, all_stamps))),
        "first": [own[0] - asked for asked, own in zip(run.sent, all_stamps, strict=True)],
    }
