"""A worker that writes the engine's protocol itself, so that a test can break its rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq

from exl_serve.engine import wire
from exl_serve.request.internal import EngineRequest
from exl_serve.testing.local import EngineThread

HANG_MILLISECONDS = 120_000


class RawWorker:
    """A connection to an engine's thread. Its calls block; the engine's thread goes on meanwhile."""

    def __init__(self, thread: EngineThread) -> None:
        self._socket: zmq.Socket[Any] = thread.context.socket(zmq.DEALER)
        self._socket.connect(thread.address)
        self.send(wire.Hello(wire.VERSION, "raw"))
        welcome = self.receive()
        assert isinstance(welcome, wire.Welcome)
        #: the file of the engine's status page
        self.status_path = Path(welcome.status_path)

    def send(self, message: wire.ToEngine | bytes) -> None:
        """Send a message, or bytes that are none."""
        self._socket.send(message if isinstance(message, bytes) else wire.encode(message))

    def receive(self) -> wire.ToWorker:
        """Return the next message."""
        assert self._socket.poll(HANG_MILLISECONDS), "the engine says nothing"
        return wire.decode_to_worker(self._socket.recv())

    def submit(self, tag: int, request: EngineRequest) -> wire.ToWorker:
        """Send a request and return the engine's answer to it."""
        self.send(wire.Submit(tag, request))
        while isinstance(message := self.receive(), wire.StepEvents):
            pass
        return message

    def close(self) -> None:
        """Vanish without a word, as a process that dies."""
        self._socket.close(0)
