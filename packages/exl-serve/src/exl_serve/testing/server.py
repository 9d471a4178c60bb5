"""A server in this process, for tests and notebooks: real HTTP on loopback, engines in threads."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from exl_serve.api.app import create_app
from exl_serve.api.limits import guarded, keep_alive
from exl_serve.api.state import AppState, Caller, Meter, ModelHandle
from exl_serve.api.text import FolderText
from exl_serve.api.worker import find_model
from exl_serve.config.model import ModelConfig, ServeConfig
from exl_serve.engine.client import EngineClient
from exl_serve.errors import ServeError
from exl_serve.metrics import NoMeter
from exl_serve.stream.channels import detect_family
from exl_serve.testing.local import EngineThread

__all__ = ["LiveServer", "LocalHandle", "LocalModels"]


class LocalHandle:
    """A model whose engine is a thread of this process."""

    def __init__(self, thread: EngineThread, config: ModelConfig) -> None:
        self.config = config
        template = None if config.template is None else Path(config.template).read_text(encoding="utf-8")
        self.text = FolderText(config.path, template)
        self.family = detect_family(config.family, self.text.template, self.text.special, self.text.piece)
        self.state = "ready"
        self._thread = thread
        self._client: EngineClient | None = None
        self._lock = asyncio.Lock()

    async def engine(self) -> EngineClient:
        """Return the engine's client."""
        async with self._lock:
            if self._client is None:
                self._client = await self._thread.connect()
            return self._client

    async def close(self) -> None:
        """Close the client."""
        if self._client is not None:
            await self._client.close()
            self._client = None


class LocalModels:
    """The models of a server that loads and unloads none."""

    def __init__(self, handles: Sequence[ModelHandle], *, accept_any: bool = False) -> None:
        self._handles, self._accept_any = handles, accept_any

    def resolve(self, name: str, caller: Caller) -> tuple[ModelHandle, str | None]:
        """Return (model, adapter) for a name. Raises ServeError 404."""
        return find_model(self._handles, name, caller, self._accept_any)

    def list(self) -> Sequence[ModelHandle]:
        """Return all models."""
        return self._handles

    async def control(self, name: str, /, **parameters: Any) -> dict[str, Any]:
        """Raise ServeError 501."""
        raise ServeError(501, "not_implemented", "unsupported", f"this server cannot {name} models")


class LiveServer:
    """uvicorn in a thread over engines in threads; `url` is its address."""

    def __init__(
        self,
        engines: Mapping[str, EngineThread],
        configs: Sequence[ModelConfig],
        config: ServeConfig | None = None,
        authenticate: Any = None,
        meter: Meter | None = None,
    ) -> None:
        self._engines, self._configs = engines, configs
        self._config = config or ServeConfig()
        self._authenticate = authenticate or (lambda scope, needed: Caller())
        self._meter = meter or NoMeter()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.state: AppState | None = None
        self._server: uvicorn.Server | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="exl-server", daemon=True)
        self._thread.start()
        if not self._up.wait(60):
            raise RuntimeError("the server did not come up")

    async def _run(self) -> None:
        handles = [LocalHandle(self._engines[one.id], one) for one in self._configs]
        models = LocalModels(handles, accept_any=self._config.server.accept_any_model)
        self.state = AppState(self._config, models, self._meter, self._authenticate)
        settings = uvicorn.Config(
            create_app(self.state),
            http=guarded(self._config.server.limits, self._config.server.trusted_proxies, self._meter),
            log_level="warning",
            lifespan="off",
            access_log=False,
            timeout_keep_alive=keep_alive(self._config.server.limits),
            server_header=False,
            proxy_headers=False,
        )
        self._server = uvicorn.Server(settings)
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        asyncio.get_running_loop().call_soon(self._up.set)
        await self._server.serve([self._socket])
        await self.state.media.close()
        for handle in handles:
            await handle.close()

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.should_exit = True
            self._server.force_exit = True
        self._thread.join(30)
