"""The engine's socket: messages of workers, and a pipe that ends a wait for them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import zmq
from zmq import backend

from exl_serve.engine import wire
from exl_serve.sockets import bind_for_own_user

__all__ = ["GoneError", "Inbox"]

INBOUND_SECONDS = 0.005
"""Seconds in which messages are read between two steps. Requests that come together are taken together: their prompts
then share a pass, while one request a step would cost a pass each."""
_MORE = int(zmq.SNDMORE)
"""A plain number: an operator of an enum takes as long as the call."""


class GoneError(Exception):
    """The worker that a message is for has ended."""


class Inbox:
    """A ROUTER socket bound to `address`. Only `wake` may be called from another thread."""

    def __init__(self, address: str, context: zmq.Context[Any] | None = None) -> None:
        self._socket = (context or zmq.Context.instance()).socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE)
        # A message to a worker that has died is an error, so that its jobs end within a step.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        bind_for_own_user(self._socket, address)
        self._wake_read, self._wake_write = os.pipe()
        self._waking, self._closed = threading.RLock(), False  # reentrant: a signal handler may wake, too
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        # `zmq.Poller.poll` and `zmq.Socket.send` call these after some Python code, which costs as much as the library:
        # between two steps it is in no cache of the processor.
        #: true if a message waits: between two steps this is cheaper than to poll
        self.has_messages: Callable[[], Any] = partial(zmq.zmq_poll, [(self._socket, int(zmq.POLLIN))], 0)
        self._post = partial(backend.Socket.send, self._socket)
        #: the last message that was sent
        self._buffer = bytearray()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def wake(self) -> None:
        """End a wait of `receive`, from any thread or a signal handler."""
        with self._waking:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # a full pipe wakes, too
                    os.write(self._wake_write, b"\0")

    def receive(self, timeout: float) -> Iterator[tuple[bytes, bytes]]:
        """Wait at most `timeout` seconds for messages and yield them as (worker, data)."""
        if timeout > 0:
            events = dict(self._poller.poll(round(timeout * 1000)))
            if self._wake_read in events:
                os.read(self._wake_read, 1 << 16)
            if self._socket not in events:
                return
        until = time.monotonic() + INBOUND_SECONDS
        while time.monotonic() < until:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 2:
                yield frames[0], frames[1]

    def send(self, worker: bytes, message: wire.ToWorker) -> None:
        """Send a message. Raises GoneError, or WireError for a message that is too large."""
        wire.encode_into(message, self._buffer)
        try:
            # Not send_multipart, which checks its frames first: this runs in every step.
            self._post(worker, _MORE)
            self._post(self._buffer, 0)  # copies it
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise GoneError from None

    def close(self) -> None:
        """Close the socket and the pipe."""
        self._socket.close()
        with self._waking:  # once closed, the descriptor's number may belong to another file
            self._closed = True
            os.close(self._wake_read)
            os.close(self._wake_write)
