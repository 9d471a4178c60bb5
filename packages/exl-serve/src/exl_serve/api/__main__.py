"""An API worker: `python -m exl_serve.api`, started by the supervisor with its configuration on standard input."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import uvicorn

from exl_serve.api.app import create_app
from exl_serve.api.auth import Authenticator
from exl_serve.api.content import ContentLog
from exl_serve.api.limits import guarded, keep_alive
from exl_serve.api.state import AppState
from exl_serve.api.tracing import Tracing
from exl_serve.api.worker import Link, WorkerModels
from exl_serve.config.load import ConfigError
from exl_serve.config.model import ServeConfig
from exl_serve.errors import ServeError
from exl_serve.media.reader import MediaReader
from exl_serve.super import link
from exl_serve.super.logs import request_logger, set_up

__all__ = ["end_requests", "main"]

log = logging.getLogger("exl_serve")

SWITCH_SECONDS = 0.0002
TICK_SECONDS = 1.0
CANCEL_SECONDS = 1.0
KNOWN_SECONDS = 5.0
"""One of several workers accepts no connections for so long, until it has read the models' tokenizers."""


def main() -> None:
    """Run an API worker until the supervisor stops it. The start message is one line of JSON on standard input."""
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=link.WorkerStart)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != start.parent:
        sys.exit(1)
    set_up(start.config.log, "%(levelname)s %(name)s: %(message)s")
    # A long text is encoded on the thread that asks for it: threads of the library would take the engines' cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The event loop waits as long for the interpreter while another thread reads a large body or a tokenizer.
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        import uvloop

        runner: Any = uvloop.run
    except ImportError:
        runner = asyncio.run
    runner(serve_worker(start))


async def serve_worker(start: link.WorkerStart) -> None:
    """Answer requests until the supervisor ends the worker that `start` describes."""
    config = start.config
    stopping = asyncio.Event()
    state: AppState | None = None

    def on_state(message: link.State) -> None:
        models.update(message.models)
        if state is not None:
            state.draining = message.phase != "serving"
            state.refusing = message.phase == "stopping"
        if message.phase == "stopping" and not stopping.is_set():
            stopping.set()
            if state is not None:
                state.unread = not models.known.is_set()
            models.known.set()  # requests that wait for it are refused
        if message.config is not None and state is not None:
            _take_over(message.config, state, authenticator, protocol)

    authenticator = Authenticator(config.auth, proxies=config.server.trusted_proxies, workers=config.server.workers)
    connection = Link(start.address, on_state)
    protocol: Any = guarded(config.server.limits, config.server.trusted_proxies, connection)
    models = WorkerModels(config.server.accept_any_model, connection.call)
    state = AppState(
        config,
        models,
        connection,
        authenticator,
        admit=authenticator.admit,
        render_metrics=connection.metrics,
        log_request=request_logger(config.log),
        content=None if config.log.content is None else ContentLog(Path(config.log.content)),
        tracing=None if config.otel.endpoint is None else Tracing(config.otel),
        known=models.known,
        media=MediaReader(os.path.dirname(start.address.removeprefix("ipc://"))),
    )
    server = _Server(server_settings(config, connection.watching(create_app(state)), protocol))
    listener = socket.socket(fileno=start.listener)
    tasks = [
        asyncio.create_task(_drain(stopping, server, state)),
        asyncio.create_task(_freeze(models.known)),
        asyncio.create_task(_tell_ready(models, connection)),
    ]
    if start.others:
        # The workers share the socket: the others answer what this one would only hold.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_SECONDS):
                await models.known.wait()
    await server.serve([listener])
    for task in tasks:
        task.cancel()
    for one in list(server.server_state.connections):
        one.transport.abort()
    await end_requests(server.server_state.tasks)
    await state.media.close()
    if state.content is not None:
        await state.content.close()
    if state.tracing is not None:
        state.tracing.close()
    connection.close()


async def end_requests(tasks: Collection[asyncio.Task[None]]) -> None:
    """End the requests that a forced exit has left, so that the content log and traces have them.

    Those whose connections are cut end by themselves.
    """
    left = set(tasks)
    if left:
        _, left = await asyncio.wait(left, timeout=CANCEL_SECONDS)
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=CANCEL_SECONDS)


async def _tell_ready(models: WorkerModels, connection: Link) -> None:
    await models.known.wait()
    await models.ready.wait()
    connection.tell_ready()


async def _freeze(known: asyncio.Event) -> None:
    """Leave what is there once all tokenizers are read out of collections, which would block the streams."""
    await known.wait()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _take_over(config: ServeConfig, state: AppState, authenticator: Authenticator, protocol: Any) -> None:
    """Apply the changed configuration that the supervisor has read."""
    state.config = config
    protocol.limits = config.server.limits
    logging.getLogger().setLevel(config.log.level.upper())
    try:
        authenticator.reload(config.auth)
    except ConfigError as error:
        log.error("the keys were not read again: %s", error)


class _Server(uvicorn.Server):
    """A server that looks once a second whether it is to end, and not ten times: an idle one takes no CPU time."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()

    def is_writing(self) -> bool:
        """Whether a part of an answer waits for its client."""
        return any(one.transport.get_write_buffer_size() for one in self.server_state.connections)

    def is_closing(self) -> bool:
        """Whether a connection whose requests are answered is still open, once the server has ended."""
        connections: Any = self.server_state.connections  # all of the class that `guarded` returns
        return any(one.cycle is None or one.cycle.response_complete for one in connections)

    def end(self) -> None:
        """Accept no more connections, and end once the open ones are done."""
        self.should_exit = True
        self._ending.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal, which may come while the loop waits."""
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self._ending.set)

    async def main_loop(self) -> None:
        """Renew the date of the answers' headers until the end."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._ending.wait()


def server_settings(config: ServeConfig, app: Any, protocol: Any) -> uvicorn.Config:
    """Return uvicorn's configuration for `app`, with the limits of `config` and the class `protocol` of connections."""
    limits = config.server.limits
    return uvicorn.Config(
        app,
        log_config=None,  # the formats of this process, not uvicorn's own
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        http=protocol,
        server_header=False,
        proxy_headers=False,
        backlog=2048,
        timeout_keep_alive=keep_alive(limits),
        ssl_certfile=config.server.tls_cert,
        ssl_keyfile=config.server.tls_key,
    )


async def _drain(stopping: asyncio.Event, server: _Server, state: AppState) -> None:
    """Let running requests finish, up to the limit; then end the rest with an error."""
    await stopping.wait()
    while not server.started:
        await asyncio.sleep(0.05)
    refusal = ServeError.unavailable("draining", "the server stops: try again elsewhere", 5.0)
    for generation in list(state.running):
        if not generation.started:
            generation.fail(refusal)
    timeout = state.config.drain.timeout
    until = math.inf if timeout < 0 else time.monotonic() + timeout
    while (state.running or server.is_writing()) and time.monotonic() < until:
        await asyncio.sleep(0.05)
    for generation in list(state.running):
        generation.fail(refusal)
    # Until here new requests were refused with 503: a closed socket would leave them in the supervisor's backlog.
    server.end()
    await asyncio.sleep(0.2)
    # TLS does not say what it has still to send; its connections close once they have sent it.
    while server.is_closing() and time.monotonic() < until:
        await asyncio.sleep(0.05)
    server.force_exit = True


if __name__ == "__main__":
    main()
