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
        user = os.geteuid()
        # The option is a C int, which ZeroMQ converts back to the unsigned type of user ids.
        socket.setsockopt(zmq.IPC_FILTER_UID, user if user < 1 << 31 else user - (1 << 32))
    socket.bind(address)
