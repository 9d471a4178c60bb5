"""The ingress: the same ASGI application as an API worker's, over Ray's handles. It imports no torch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from exl_serve.api.app import create_app
from exl_serve.api.auth import Authenticator
from exl_serve.api.content import ContentLog
from exl_serve.api.state import AppState, Caller, ModelHandle
from exl_serve.api.text import FolderText
from exl_serve.api.tracing import Tracing
from exl_serve.api.worker import find_model
from exl_serve.config.model import ModelConfig, ServeConfig
from exl_serve.engine.client import EngineClient
from exl_serve.errors import ServeError
from exl_serve.metrics import NoMeter
from exl_serve.ray.client import RayEngine
from exl_serve.stream.channels import detect_family
from exl_serve.super.logs import request_logger

__all__ = ["Application"]

CONNECT_SECONDS = 30.0


class Application:
    """An ASGI application. `handles` are those of the engine deployments, by model."""

    def __init__(self, config: bytes, handles: Mapping[str, Any]) -> None:
        made = msgspec.json.decode(config, type=ServeConfig)
        name = os.urandom(8).hex()
        models = _Models(
            [_Handle(one, handles[one.id], name, resumes=made.ray.resume) for one in made.model],
            accept_any=made.server.accept_any_model,
        )
        keys = Authenticator(made.auth, proxies=made.server.trusted_proxies, workers=made.ray.ingress_replicas)
        # Ray keeps what a replica writes on standard error in the replica's log file.
        log_request = request_logger(made.log)
        content = None if made.log.content is None else ContentLog(Path(made.log.content))
        self._state = AppState(
            made, models, NoMeter(), keys, admit=keys.admit, log_request=log_request, content=content
        )
        if made.otel.endpoint is not None:
            self._state.tracing = Tracing(made.otel)
        self._app = create_app(self._state)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one ASGI scope."""
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            assert message["type"] == "lifespan.shutdown"
            await self._state.media.close()
            if self._state.content is not None:
                await self._state.content.close()
            if self._state.tracing is not None:
                self._state.tracing.close()
            await send({"type": "lifespan.shutdown.complete"})
            return
        await self._app(scope, receive, send)


class _Handle:
    """A model whose engines are replicas."""

    def __init__(self, config: ModelConfig, handle: Any, ingress: str, *, resumes: bool = True) -> None:
        self.config = config
        template = None if config.template is None else Path(config.template).read_text(encoding="utf-8")
        self.text = FolderText(config.path, template)
        self.family = detect_family(config.family, self.text.template, self.text.special, self.text.piece)
        self.state = "ready"
        self._handle, self._ingress, self._resumes = handle, ingress, resumes
        self._engine: RayEngine | None = None
        self._lock = asyncio.Lock()

    async def engine(self) -> EngineClient:
        """Return the engine's client. Raises ServeError 503 while no replica is ready."""
        async with self._lock:
            if self._engine is None:
                try:
                    async with asyncio.timeout(CONNECT_SECONDS):
                        self._engine = await RayEngine.connect(self._handle, self._ingress, resumes=self._resumes)
                except TimeoutError:
                    raise ServeError.unavailable("model_loading", "no replica is ready: try again", 5.0) from None
            return self._engine


class _Models:
    def __init__(self, handles: Sequence[ModelHandle], *, accept_any: bool) -> None:
        self._handles, self._accept_any = handles, accept_any

    def resolve(self, name: str, caller: Caller) -> tuple[ModelHandle, str | None]:
        return find_model(self._handles, name, caller, self._accept_any)

    def list(self) -> Sequence[ModelHandle]:
        return self._handles

    async def control(self, name: str, /, **parameters: Any) -> dict[str, Any]:
        raise ServeError(
            501,
            "not_implemented",
            "unsupported",
            f"{name} is not offered on Ray: write the models into the configuration",
        )
