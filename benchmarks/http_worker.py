"""An API worker in a process of a benchmark."""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["models_at", "models_of", "worker"]


def models_of(folder: str, connect: Callable[[], Coroutine[Any, Any, Any]], family: str = "none") -> Any:
    """The models of a worker: one, under any name, whose engine `connect` returns when it is first asked for."""
    from exl_serve.api.state import Caller
    from exl_serve.api.text import FolderText
    from exl_serve.api.worker import find_model
    from exl_serve.config.model import ModelConfig
    from exl_serve.stream.channels import detect_family

    wanted = family

    class Handle:
        config = ModelConfig(id="bench", path=folder)
        text = FolderText(folder)
        family = detect_family(wanted, None, text.special, text.piece)
        state = "ready"
        client: Any = None

        async def engine(self) -> Any:
            if self.client is None:
                self.client = asyncio.ensure_future(connect())
            return await self.client

    class Models:
        handles = (Handle(),)

        def resolve(self, name: str, caller: Caller) -> Any:
            return find_model(self.handles, name, caller, accept_any=True)

        def list(self) -> Any:
            return self.handles

    return Models()


def models_at(address: str, folder: str) -> Any:
    """The models of a worker: one, whose engine listens at `address`."""
    from exl_serve.engine.local import LocalEngine

    return models_of(folder, lambda: LocalEngine.connect(address))


def worker(
    listener: socket.socket, address: str, folder: str, profile: str = "", alongside: Callable[[], Any] | None = None
) -> None:
    """An API worker as in `exl serve`, with one model at `address`. Writes a profile to the file of that name.

    `alongside`: returns an awaitable that runs while the server does.
    """
    import uvicorn

    from exl_serve.api.__main__ import SWITCH_SECONDS
    from exl_serve.api.app import create_app
    from exl_serve.api.limits import guarded
    from exl_serve.api.state import AppState, Caller
    from exl_serve.config.model import Limits, ServeConfig, ServerConfig
    from exl_serve.metrics import NoMeter

    limits = Limits(max_connections_per_address=4096, max_body_bytes=64 << 20)
    config = ServeConfig(server=ServerConfig(limits=limits))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.setswitchinterval(SWITCH_SECONDS)

    async def run() -> None:
        state = AppState(config, models_at(address, folder), NoMeter(), lambda scope, needed: Caller())
        settings = uvicorn.Config(
            create_app(state),
            log_level="warning",
            lifespan="off",
            access_log=False,
            http=guarded(limits),
            timeout_keep_alive=75,
        )
        other = None if alongside is None else asyncio.ensure_future(alongside())
        await uvicorn.Server(settings).serve([listener])
        if other is not None:
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
        await state.media.close()

    import uvloop

    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn sends it again once the server has ended
    taken = cProfile.Profile() if profile else contextlib.nullcontext()
    with taken:
        uvloop.run(run())  # until SIGTERM
    if isinstance(taken, cProfile.Profile):
        taken.dump_stats(profile)
