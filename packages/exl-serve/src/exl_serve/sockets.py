"""Sockets between the processes of a server."""

from __future__ import annotations

import os
from typing import Any

import zmq

__all__ = ["bind_for_own_user"]


def bind_for_own_user(socket: zmq.Socket[Any], address: str) -> None:
    """Bind a socket; one at an `ipc://` address accepts only processes of this process's user.

    ZeroMQ asks the kernel for each peer's user (SO_PEERCRED) and closes connections of others, root's among them.
    """
    if address.startswith("ipc://"):
        socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
    socket.bind(address)
