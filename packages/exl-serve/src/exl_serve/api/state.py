"""The state that the routes of one API worker use. A worker process, a test and a Ray ingress each build one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

# The supervisor checks keys with this module and needs none of these: their import would delay its start.
if TYPE_CHECKING:
    import asyncio

    from exl_serve.api.content import ContentLog
    from exl_serve.api.rendering import RenderTurns
    from exl_serve.api.tracing import Tracing
    from exl_serve.config.model import ModelConfig, ServeConfig
    from exl_serve.engine.client import EngineClient
    from exl_serve.media.reader import MediaReader
    from exl_serve.stream.channels import OutputFamily

__all__ = ["AppState", "Caller", "Meter", "ModelHandle", "Models", "TextCodec"]


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as authenticated. Without keys everyone has all scopes and the name ""."""

    name: str = ""
    scopes: frozenset[str] = frozenset({"infer", "admin", "metrics"})
    weight: float = 1.0
    #: lowest number that it may ask for: 0 urgent, 1 interactive, 2 batch
    best_priority: int = 1
    #: None: all models
    models: frozenset[str] | None = None
    salt: bytes = b""


class TextCodec(Protocol):
    """Tokenizer and chat template of a model folder, without torch."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def special(self) -> Mapping[str, int]:
        """Special tokens by spelling."""

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """Return the token ids of a text. `special`: spellings of special tokens become their ids; `bos`: add the
        BOS.
        """

    async def encode_long(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """Encode a text that may be long, without blocking the event loop."""

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids. `special`: special tokens have their spelling."""

    async def decode_long(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Decode ids that may be many, without blocking the event loop."""

    def piece(self, id: int) -> bytes:
        """Return the bytes of one token; of a special token its spelling."""

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> tuple[str, list[int]]:
        """Render a conversation as a prompt; returns (text, ids).

        Spellings of special tokens in the content of users and tools stay text unless
        options["parse_special_in_content"]. Raises `ServeError` 400 `chat_template`.
        """


class ModelHandle(Protocol):
    """A model that requests may name."""

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""

    @property
    def text(self) -> TextCodec:
        """The model's tokenizer and chat template."""

    @property
    def family(self) -> OutputFamily:
        """The model's output format."""

    @property
    def state(self) -> str:
        """unloaded, loading, ready, draining or failed."""

    async def engine(self) -> EngineClient:
        """Return the loaded engine; waits while it loads if the registry allows that. Raises `ServeError` 503."""


class Models(Protocol):
    """The models of a server."""

    def resolve(self, name: str, caller: Caller) -> tuple[ModelHandle, str | None]:
        """Return (model, adapter) for an id, an alias or `model:adapter`. Raises `ServeError` 404 with the known
        names.
        """

    def list(self) -> Sequence[ModelHandle]:
        """Return all models."""

    async def control(self, name: str, /, **parameters: Any) -> dict[str, Any]:
        """Run an operator's call on the registry: load, unload (model=...). Raises `ServeError`."""


class Meter(Protocol):
    """Counters and measurements of a worker; labels are few and bounded."""

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add a value to a histogram."""

    def spread(self, name: str, counts: Sequence[int], total: float, **labels: str) -> None:
        """Add values to a histogram: their number in each bucket, and their sum."""


def _media_reader() -> MediaReader:
    from exl_serve.media.reader import MediaReader

    return MediaReader()


def _render_turns() -> RenderTurns:
    from exl_serve.api.rendering import RenderTurns

    return RenderTurns()


@dataclass
class AppState:
    """Everything that an API worker's routes share."""

    config: ServeConfig
    models: Models
    meter: Meter
    #: raises ServeError 401, 403 or 429: (ASGI scope, needed scope) -> caller
    authenticate: Callable[[Mapping[str, Any], str], Caller]
    #: about to stop: load balancers see "not ready", requests are still accepted
    draining: bool = False
    #: stopping: new requests are rejected
    refusing: bool = False
    #: counts a request against its key's limits: raises ServeError 429; (caller, choices) -> its place, or None
    admit: Callable[[Caller, int], Any] = lambda caller, choices: None
    #: text of /metrics
    render_metrics: Callable[[], Awaitable[str]] | None = None
    #: one line for each finished request
    log_request: Callable[[Mapping[str, Any]], None] = lambda fields: None
    #: where prompts and answers are written; None: nowhere
    content: ContentLog | None = None
    #: where traces are sent; None: nowhere
    tracing: Tracing | None = None
    #: generations that are under way, which a drain ends at last
    running: set[Any] = field(default_factory=set)
    #: probes of /health/generate, by model
    probes: dict[str, Any] = field(default_factory=dict)
    #: set once the list of models has been read, for which requests about models wait, or when the server stops; None:
    #: it has been read
    known: asyncio.Event | None = None
    #: the server stops before the list of models has been read
    unread: bool = False
    #: who may render a chat template now
    renders: RenderTurns = field(default_factory=_render_turns)
    #: decodes images
    media: MediaReader = field(default_factory=_media_reader)
