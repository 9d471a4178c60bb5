"""The protocol between API workers and an engine process: msgpack arrays, the kind of message first.

A connection begins with `Hello` from the worker and `Welcome` from the engine; a worker of another major version is
rejected. The sender numbers its requests: `tag` counts up in a connection. Nothing is pickled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from exl_serve.engine.client import ModelCard
from exl_serve.engine.events import EngineEvent, Failed, Finished, Progress, Started, Tokens
from exl_serve.errors import ServeError
from exl_serve.request.internal import EngineRequest

__all__ = [
    "MAX_MESSAGE",
    "NO_REQUEST",
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
    "StepEvents",
    "Submit",
    "ToEngine",
    "ToWorker",
    "TokenColumns",
    "Welcome",
    "WireError",
    "address_of",
    "card_bytes",
    "card_of",
    "decode_to_engine",
    "decode_to_worker",
    "encode",
    "encode_into",
]

VERSION = 3
MAX_MESSAGE = 16 << 20
"""Most bytes of a message."""
PING_SECONDS, SILENCE = 2.0, 20.0
NO_REQUEST = -1
"""Tag of the `Rejected` that answers the ping of a worker that the engine does not know, or knows no more."""
_ADDRESS = struct.Struct("<QI")


Tag = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A request's number. The message of a worker that breaks the limits is a WireError."""


class WireError(ValueError):
    """An invalid message. The connection of its sender is ended."""


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello", tag_field="kind"):
    """A worker connects: protocol version and worker name."""

    version: int
    worker: str


class Submit(msgspec.Struct, array_like=True, frozen=True, tag="submit", tag_field="kind"):
    """Queue a request under a tag."""

    tag: Tag
    request: EngineRequest


class Cancel(msgspec.Struct, array_like=True, frozen=True, tag="cancel", tag_field="kind"):
    """Cancel a request."""

    tag: Tag


class Pause(msgspec.Struct, array_like=True, frozen=True, tag="pause", tag_field="kind"):
    """Pause a request."""

    tag: Tag


class Resume(msgspec.Struct, array_like=True, frozen=True, tag="resume", tag_field="kind"):
    """Continue a paused request."""

    tag: Tag


class Call(msgspec.Struct, array_like=True, frozen=True, tag="call", tag_field="kind"):
    """Run an operator's call."""

    tag: Tag
    name: str
    parameters: dict[str, Any]


class Ping(msgspec.Struct, array_like=True, frozen=True, tag="ping", tag_field="kind"):
    """The worker is alive. After `SILENCE` seconds of silence it counts as dead: its requests are cancelled."""


class Goodbye(msgspec.Struct, array_like=True, frozen=True, tag="goodbye", tag_field="kind"):
    """The worker disconnects: its running requests are cancelled."""


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag="welcome", tag_field="kind"):
    """The engine accepts a worker: protocol version, boot id, model card and status page."""

    version: int
    boot: bytes
    card: bytes  # a ModelCard, as JSON: it is read by people too
    status_path: str


class Accepted(msgspec.Struct, array_like=True, frozen=True, tag="accepted", tag_field="kind"):
    """The engine has accepted a request."""

    tag: int


class Rejected(msgspec.Struct, array_like=True, frozen=True, tag="rejected", tag_field="kind"):
    """The engine has rejected a request or an operator's call."""

    tag: int
    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None

    @classmethod
    def of(cls, tag: int, error: ServeError) -> Rejected:
        """Build the message of an error."""
        return cls(tag, error.status, error.type, error.code, error.message, error.param, error.retry_after)

    def error(self) -> ServeError:
        """Return the error of the message."""
        return ServeError(
            self.status, self.type, self.code, self.message, param=self.param, retry_after=self.retry_after
        )


class Reply(msgspec.Struct, array_like=True, frozen=True, tag="reply", tag_field="kind"):
    """The result of an operator's call."""

    tag: int
    result: dict[str, Any]


class TokenColumns(msgspec.Struct, array_like=True, frozen=True):
    """Tokens of one step, an entry for each completion, in columns: an object for each entry would cost the engine's
    thread more than all else. Numbers are little-endian. An entry without tokens and text says nothing.
    """

    to: bytes
    """uint64 tag and uint32 choice of each entry: `address_of`."""
    counts: bytes
    """uint16 number of tokens of each entry."""
    ids: bytes
    """int32 token ids of all entries, in order."""
    texts: list[str]
    """Text of each entry."""

    def check(self) -> None:
        """Raise WireError unless all columns belong to the same entries."""
        n = len(self.texts)
        if len(self.to) != n * _ADDRESS.size or len(self.counts) != 2 * n:
            raise WireError(f"columns of {len(self.to)} and {len(self.counts)} bytes for {n} entries")
        if 4 * sum(memoryview(self.counts).cast("H")) != len(self.ids):
            raise WireError(f"counts of tokens that do not add up to the {len(self.ids)} bytes of their ids")

    def entries(self) -> Iterator[tuple[int, Tokens]]:
        """Return (tag, event) of each entry."""
        ids, begin = memoryview(self.ids).cast("i").tolist(), 0
        addresses, counts = _ADDRESS.iter_unpack(self.to), memoryview(self.counts).cast("H")
        for (tag, choice), count, text in zip(addresses, counts, self.texts, strict=True):
            if count or text:
                yield tag, Tokens(choice, tuple(ids[begin : begin + count]), text)
            begin += count


class StepEvents(msgspec.Struct, array_like=True, frozen=True, tag="step", tag_field="kind"):
    """The events of one step for a worker: pairs of a request's tag and an event, in order; then tokens of completions
    that have no other event in this step.
    """

    events: list[tuple[int, Started | Progress | Tokens | Finished | Failed]]
    tokens: TokenColumns | None = None

    def all(self) -> Iterator[tuple[int, EngineEvent]]:
        """Return (tag, event) of everything in the message, in order."""
        yield from self.events
        if self.tokens is not None:
            yield from self.tokens.entries()


ToEngine = Hello | Submit | Cancel | Pause | Resume | Call | Ping | Goodbye
ToWorker = Welcome | Accepted | Rejected | Reply | StepEvents

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_worker = msgspec.msgpack.Decoder(ToWorker)


def encode(message: ToEngine | ToWorker) -> bytes:
    """Return the bytes of a message.

    Raises WireError for a message of more than `MAX_MESSAGE` bytes, or with a text that is not UTF-8.
    """
    buffer = bytearray()
    encode_into(message, buffer)
    return bytes(buffer)


def encode_into(message: ToEngine | ToWorker, buffer: bytearray) -> None:
    """Replace the content of `buffer` with the bytes of a message.

    A caller that uses its buffer again saves an allocation for each message. Raises as `encode` does.
    """
    try:
        _encoder.encode_into(message, buffer)
    except UnicodeEncodeError as error:
        raise WireError(f"a text that UTF-8 cannot hold: {error}") from error
    if len(buffer) > MAX_MESSAGE:
        raise WireError(f"a message of {len(buffer)} bytes, more than the {MAX_MESSAGE} that one may have")


def decode_to_engine(data: bytes) -> ToEngine:
    """Decode a message to an engine. Raises WireError for anything else."""
    message: ToEngine = _decoded(_to_engine, data)
    return message


def decode_to_worker(data: bytes) -> ToWorker:
    """Decode a message to a worker. Raises WireError for anything else."""
    message: ToWorker = _decoded(_to_worker, data)
    if isinstance(message, StepEvents) and message.tokens is not None:
        message.tokens.check()
    return message


def address_of(tag: int, choice: int) -> bytes:
    """Return a completion's entry in `TokenColumns.to`."""
    return _ADDRESS.pack(tag, choice)


def _decoded(decoder: Any, data: bytes) -> Any:
    if len(data) > MAX_MESSAGE:
        raise WireError(f"a message of {len(data)} bytes, more than the {MAX_MESSAGE} that one may have")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a message of this protocol: {error}") from error


def card_bytes(card: ModelCard) -> bytes:
    """Return a model card as JSON."""
    return msgspec.json.encode(card)


def card_of(data: bytes) -> ModelCard:
    """Read a model card from JSON."""
    return msgspec.json.decode(data, type=ModelCard)
