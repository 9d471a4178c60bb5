"""Messages between the supervisor and its workers: states of the models one way, metrics and calls the other."""

from __future__ import annotations

from typing import Any

import msgspec

from exl_serve.config.model import ModelConfig, ServeConfig
from exl_serve.errors import ServeError

__all__ = ["ModelState", "Operator", "Report", "State", "Told", "WorkerStart", "decode_report", "decode_told", "encode"]


class ModelState(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One model, as the supervisor knows it. `epoch` counts the starts of its engine."""

    config: ModelConfig
    state: str
    address: str
    epoch: int
    reason: str = ""


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """The start message of a worker, as JSON on its standard input."""

    config: ServeConfig
    #: the listening socket's number in the worker
    listener: int
    address: str
    parent: int
    #: other workers answer at the socket already: this one accepts connections once it knows the models
    others: bool = False


class Report(msgspec.Struct, array_like=True, frozen=True, tag="report", tag_field="kind"):
    """Metrics from a worker, once a second: (is a count, name, labels, value)."""

    metrics: list[tuple[bool, str, dict[str, str], float]]
    #: the worker knows of a model that is ready, and has read its tokenizer or failed to
    ready: bool = False
    #: of histograms with a value for each token: (name, labels, values in each bucket, their sum)
    spreads: list[tuple[str, dict[str, str], list[int], float]] = []


class Operator(msgspec.Struct, array_like=True, frozen=True, tag="call", tag_field="kind"):
    """An operator's call from a worker."""

    tag: int
    name: str
    parameters: dict[str, Any]


class State(msgspec.Struct, array_like=True, frozen=True, tag="state", tag_field="kind"):
    """States to a worker, at every change. phase: serving; draining (rejects new requests); stopping (finish and
    end).
    """

    models: list[ModelState]
    phase: str
    #: the configuration, where a reload has changed it since the worker's start
    config: ServeConfig | None = None


class Told(msgspec.Struct, array_like=True, frozen=True, tag="told", tag_field="kind"):
    """The answer to an operator's call."""

    tag: int
    result: dict[str, Any]
    #: status, type, code, message and seconds to wait, where the call failed
    error: tuple[int, str, str, str, float | None] | None = None

    @classmethod
    def failed(cls, tag: int, error: ServeError) -> Told:
        """Return the answer to a call that failed with `error`."""
        return cls(tag, {}, (error.status, error.type, error.code, error.message, error.retry_after))

    def problem(self) -> ServeError | None:
        """Return the error that the call failed with."""
        if self.error is None:
            return None
        status, kind, code, message, wait = self.error
        return ServeError(status, kind, code, message, retry_after=wait)


_encoder = msgspec.msgpack.Encoder()
_report = msgspec.msgpack.Decoder(Report | Operator)
_told = msgspec.msgpack.Decoder(State | Told)


def encode(message: Report | Operator | State | Told) -> bytes:
    """Return the bytes of a message."""
    return _encoder.encode(message)


def decode_report(data: bytes) -> Report | Operator:
    """Decode a message of a worker. Raises msgspec.DecodeError."""
    message: Report | Operator = _report.decode(data)
    return message


def decode_told(data: bytes) -> State | Told:
    """Decode a message of the supervisor. Raises msgspec.DecodeError."""
    message: State | Told = _told.decode(data)
    return message
