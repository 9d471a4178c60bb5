"""What the routes of one API worker work with; a worker process, a test and a Ray ingress each build one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from exl_serve.config.model import ModelConfig, ServeConfig
from exl_serve.engine.client import EngineClient
from exl_serve.stream.family import Family

__all__ = ["AppState", "Caller", "Meter", "ModelHandle", "Models", "TextDoor"]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, as authentication found it. Without keys everybody has all scopes and the name ""."""

    name: str = ""
    scopes: frozenset[str] = frozenset({"infer", "admin", "metrics"})
    weight: float = 1.0
    #: lowest number that it may ask for: 0 urgent, 1 interactive, 2 batch
    best_priority: int = 1
    #: None: all models
    models: frozenset[str] | None = None
    salt: bytes = b""


class TextDoor(Protocol):
    """Tokenizer and chat template of a model folder, without torch."""

    vocab_size: int
    #: special tokens by spelling
    special: Mapping[str, int]

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str: ...

    def piece(self, id: int) -> bytes:
        """The bytes of one token; of a special token its spelling."""

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> tuple[str, list[int]]:
        """A conversation as prompt: (text, ids). Special tokens' spellings in the content of users and tools stay
        text unless options["parse_special_in_content"]. Raises `ServeError` 400 `chat_template`."""


class ModelHandle(Protocol):
    """A model that requests may name."""

    config: ModelConfig
    text: TextDoor
    family: Family
    #: unloaded, loading, warming, ready, draining, sleeping, failed
    state: str

    async def engine(self) -> EngineClient:
        """The loaded engine; waits while it loads if the registry allows that. Raises `ServeError` 503."""


class Models(Protocol):
    """The models of a server."""

    def resolve(self, name: str, caller: Caller) -> tuple[ModelHandle, str | None]:
        """(model, adapter) for an id, an alias or `model:adapter`. Raises `ServeError` 404 naming what there is."""

    def list(self) -> Sequence[ModelHandle]: ...

    async def control(self, name: str, **parameters: Any) -> dict[str, Any]:
        """An operator's call on the registry: load, unload (model=...). Raises `ServeError`."""


class Meter(Protocol):
    """Where a worker counts and measures; labels are few and bounded."""

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None: ...

    def observe(self, name: str, value: float, **labels: str) -> None:
        """A value of a histogram."""


@dataclass
class AppState:
    """Everything that an API worker's routes share."""

    config: ServeConfig
    models: Models
    meter: Meter
    #: raises ServeError 401, 403 or 429: (ASGI scope, needed scope) -> caller
    authenticate: Callable[[Mapping[str, Any], str], Caller]
    #: set once the server drains: new requests are refused
    draining: bool = False
    #: text of /metrics
    render_metrics: Callable[[], Awaitable[str]] | None = None
    #: one line for each finished request
    log_request: Callable[[Mapping[str, Any]], None] = lambda fields: None
    extra: dict[str, Any] = field(default_factory=dict)
