"""Notify systemd of the service's state: its protocol is a datagram to a Unix socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

__all__ = ["Notifier"]


class Notifier:
    """Send states to the service manager; does nothing where there is none."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]
        microseconds = environment.get("WATCHDOG_USEC", "")
        #: seconds between signs of life; None where none are wanted
        self.interval = int(microseconds) / 2e6 if microseconds.isdecimal() and int(microseconds) > 0 else None

    def tell(self, state: str) -> None:
        """Send `state` such as READY=1, STOPPING=1, WATCHDOG=1, STATUS=text."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
                connection.setblocking(False)  # a manager that does not read must not stop the service
                connection.sendto(state.encode(), self._address)
        except OSError:  # a problem of the manager; the service continues
            return
