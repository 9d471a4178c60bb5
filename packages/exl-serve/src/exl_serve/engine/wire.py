"""The protocol between API workers and an engine process: msgpack arrays, the kind of message first.

A connection begins with `Hello` from the worker and `Welcome` from the engine; a worker of another major version is
refused. A request is named by its sender: `tag` counts up in a connection. Nothing is pickled.
"""

from __future__ import annotations

from typing import Any

import msgspec

from exl_serve.engine.client import ModelCard
from exl_serve.engine.events import Failed, Finished, Progress, Started, Tokens
from exl_serve.errors import ServeError
from exl_serve.request.internal import EngineRequest

__all__ = [
    "MAX_MESSAGE",
    "PING_SECONDS",
    "SILENCE",
    "VERSION",
    "Accepted",
    "Call",
    "Cancel",
    "Goodbye",
    "Hello",
    "Pause",
    "Ping",
    "Rejected",
    "Reply",
    "Resume",
    "Round",
    "Submit",
    "ToEngine",
    "ToWorker",
    "Welcome",
    "WireError",
    "card_bytes",
    "card_of",
    "decode_to_engine",
    "decode_to_worker",
    "encode",
]

VERSION = 1
MAX_MESSAGE = 16 << 20
"""Most bytes of a message."""
PING_SECONDS, SILENCE = 2.0, 20.0


class WireError(ValueError):
    """A message that is none: its sender's connection is ended."""


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello", tag_field="kind"):
    version: int
    worker: str


class Submit(msgspec.Struct, array_like=True, frozen=True, tag="submit", tag_field="kind"):
    tag: int
    request: EngineRequest


class Cancel(msgspec.Struct, array_like=True, frozen=True, tag="cancel", tag_field="kind"):
    tag: int


class Pause(msgspec.Struct, array_like=True, frozen=True, tag="pause", tag_field="kind"):
    tag: int


class Resume(msgspec.Struct, array_like=True, frozen=True, tag="resume", tag_field="kind"):
    tag: int


class Call(msgspec.Struct, array_like=True, frozen=True, tag="call", tag_field="kind"):
    """An operator's call."""

    tag: int
    name: str
    parameters: dict[str, Any]


class Ping(msgspec.Struct, array_like=True, frozen=True, tag="ping", tag_field="kind"):
    """The worker lives. One that is silent for `SILENCE` seconds is taken for dead: its requests are cancelled."""


class Goodbye(msgspec.Struct, array_like=True, frozen=True, tag="goodbye", tag_field="kind"):
    """The worker leaves: what it has running is cancelled."""


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag="welcome", tag_field="kind"):
    version: int
    boot: bytes
    card: bytes  # a ModelCard, as JSON: it is read by people too
    status_path: str


class Accepted(msgspec.Struct, array_like=True, frozen=True, tag="accepted", tag_field="kind"):
    tag: int


class Rejected(msgspec.Struct, array_like=True, frozen=True, tag="rejected", tag_field="kind"):
    tag: int
    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None

    @classmethod
    def of(cls, tag: int, error: ServeError) -> Rejected:
        return cls(tag, error.status, error.type, error.code, error.message, error.param, error.retry_after)

    def error(self) -> ServeError:
        return ServeError(
            self.status, self.type, self.code, self.message, param=self.param, retry_after=self.retry_after
        )


class Reply(msgspec.Struct, array_like=True, frozen=True, tag="reply", tag_field="kind"):
    tag: int
    result: dict[str, Any]


class Round(msgspec.Struct, array_like=True, frozen=True, tag="round", tag_field="kind"):
    """What one round has made for a worker: pairs of a request's tag and an event of it, in order."""

    events: list[tuple[int, Started | Progress | Tokens | Finished | Failed]]


ToEngine = Hello | Submit | Cancel | Pause | Resume | Call | Ping | Goodbye
ToWorker = Welcome | Accepted | Rejected | Reply | Round

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_worker = msgspec.msgpack.Decoder(ToWorker)


def encode(message: ToEngine | ToWorker) -> bytes:
    """Raises WireError for a message of more than `MAX_MESSAGE` bytes, or with a text that is no UTF-8."""
    try:
        data = _encoder.encode(message)
    except UnicodeEncodeError as error:
        raise WireError(f"a text that UTF-8 cannot hold: {error}") from error
    if len(data) > MAX_MESSAGE:
        raise WireError(f"a message of {len(data)} bytes, more than the {MAX_MESSAGE} that one may have")
    return data


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises WireError for whatever is no message to an engine."""
    message: ToEngine = _decoded(_to_engine, data)
    return message


def decode_to_worker(data: bytes) -> ToWorker:
    """Raises WireError for whatever is no message to a worker."""
    message: ToWorker = _decoded(_to_worker, data)
    return message


def _decoded(decoder: Any, data: bytes) -> Any:
    if len(data) > MAX_MESSAGE:
        raise WireError(f"a message of {len(data)} bytes, more than the {MAX_MESSAGE} that one may have")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"no message of this protocol: {error}") from error


def card_bytes(card: ModelCard) -> bytes:
    return msgspec.json.encode(card)


def card_of(data: bytes) -> ModelCard:
    return msgspec.json.decode(data, type=ModelCard)
