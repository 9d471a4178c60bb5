"""An engine in this process, for tests and notebooks; not for production."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import zmq

from exl_serve.config.model import Limits, ModelConfig, Qos
from exl_serve.engine.host import Host
from exl_serve.engine.load import Loaded, load
from exl_serve.engine.local import LocalEngine
from exl_serve.engine.status import StatusWriter, status_path

__all__ = ["EngineThread", "local_engine"]


class EngineThread:
    """A host in a thread, at an `inproc://` address."""

    def __init__(
        self, config: ModelConfig, limits: Limits | None = None, qos: Qos | None = None, loaded: Loaded | None = None
    ) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.address = f"inproc://engine-{os.urandom(8).hex()}"
        self._folder = tempfile.TemporaryDirectory(prefix="exl-serve-")
        made = load(config) if loaded is None else loaded
        self.generator, self.card = made.generator, made.card
        status = StatusWriter(status_path(Path(self._folder.name), config.id), os.urandom(16))
        self.host = Host(
            self.generator,
            self.card,
            self.address,
            status,
            config=config,
            limits=limits,
            qos=qos,
            context=self.context,
            step_floor=made.floor,
            vision=made.vision,
        )
        self._thread = threading.Thread(target=self.host.run, name="exl-engine", daemon=True)
        self._thread.start()

    async def connect(self) -> LocalEngine:
        """Return a new client of the engine."""
        return await LocalEngine.connect(self.address, self.context)

    @property
    def running(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop the thread."""
        if self.running:
            self.host.stop()
            self._thread.join(30)
        self._folder.cleanup()


@asynccontextmanager
async def local_engine(
    config: ModelConfig, limits: Limits | None = None, qos: Qos | None = None
) -> AsyncIterator[LocalEngine]:
    """Yield the client of a loaded engine in this process."""
    thread = EngineThread(config, limits, qos)
    try:
        engine = await thread.connect()
        try:
            yield engine
        finally:
            await engine.close()
    finally:
        thread.close()
