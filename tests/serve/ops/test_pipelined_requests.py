"""Requests that come before an earlier one has its answer, over raw sockets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from exl_serve.api.limits import guarded
from exl_serve.config.model import Limits

PATIENT = Limits(header_seconds=600, body_seconds=600, keep_alive_seconds=600)
GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
CHUNKED = b"POST /second HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


class App:
    """Answers with the path of a request, and the one of / only when `go` is set.

    Args:
        begins: The answer of / begins at once.
    """

    def __init__(self, begins: bool = False) -> None:
        self.begins, self.go = begins, asyncio.Event()
        #: paths of the requests that began
        self.began: list[str] = []
        #: is set when a client left before its answer
        self.left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        self.began.append(path)
        await receive()
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(path))]}
        if path == "/":
            if self.begins:
                await send(start)
            if not await self._may_go(receive):
                return
        if path != "/" or not self.begins:
            await send(start)
        await send({"type": "http.response.body", "body": path.encode()})

    async def _may_go(self, receive: Any) -> bool:
        tasks = [asyncio.ensure_future(receive()), asyncio.ensure_future(self.go.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        if not self.go.is_set():
            self.left.set()
        return self.go.is_set()


@asynccontextmanager
async def server(app: App) -> AsyncIterator[int]:
    config = uvicorn.Config(
        app, port=0, http=guarded(PATIENT), ws="none", lifespan="off", log_level="critical", timeout_keep_alive=600
    )
    running = uvicorn.Server(config)
    task = asyncio.create_task(running.serve())
    while not running.started:
        await asyncio.sleep(0.01)
    yield running.servers[0].sockets[0].getsockname()[1]
    running.should_exit = running.force_exit = True
    await task


def run(work: Callable[[App, int], Awaitable[None]], begins: bool = False) -> None:
    async def main() -> None:
        app = App(begins)
        async with asyncio.timeout(240), server(app) as port:
            await work(app, port)

    asyncio.run(main())


def answers(data: bytes) -> list[tuple[int, str]]:
    """Status of each answer in `data`, with its body or the code of its error."""
    found = []
    for one in re.split(rb"HTTP/1\.1 (?=\d)", data)[1:]:
        head, _, body = one.partition(b"\r\n\r\n")
        status = int(head[:3])
        found.append((status, body.decode() if status == 200 else json.loads(body)["error"]["code"]))
    return found


async def ask(app: App, port: int, data: bytes) -> bytes:
    """The answers to `data`, which is one segment, to the end of the connection; the first goes on after it is read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    while not app.began:
        await asyncio.sleep(0.001)
    app.go.set()
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("malformed", [b"\0", b"GET / HTTP/1.1\r\n\r\n", CHUNKED + b"zz\r\n"])
def test_an_error_follows_the_answers_of_earlier_requests(malformed: bytes, begins: bool) -> None:
    """The malformed request comes behind a good one, or behind two of which the second waits for the first."""

    async def one(app: App, port: int) -> None:
        assert answers(await ask(app, port, GET + malformed)) == [(200, "/"), (400, "bad_request")]
        assert app.began == ["/"]

    async def two(app: App, port: int) -> None:
        other = GET.replace(b"/ ", b"/other ", 1)
        got = answers(await ask(app, port, GET + other + malformed))
        assert got == [(200, "/"), (200, "/other"), (400, "bad_request")]
        assert app.began == ["/", "/other"]

    run(one, begins)
    run(two, begins)


def test_data_behind_a_malformed_request_is_not_parsed() -> None:
    async def work(app: App, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + b"\0")
        while not app.began:
            await asyncio.sleep(0.001)
        writer.write(GET)
        await asyncio.sleep(0.02)  # it is read in the meantime; the test passes without it too
        app.go.set()
        assert answers(await reader.read()) == [(200, "/"), (400, "bad_request")]
        assert app.began == ["/"]
        writer.close()

    run(work)


def test_a_client_that_leaves_behind_a_malformed_request_is_noticed() -> None:
    async def work(app: App, port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + b"\0")
        while not app.began:
            await asyncio.sleep(0.001)
        writer.close()
        await app.left.wait()

    run(work)
