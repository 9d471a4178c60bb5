"""Commands with `--tp` that torchrun starts: one process for each device, of which the first writes the output."""

from __future__ import annotations

import os
import sys

from exl_core import ProcessExchange

__all__ = ["exchange", "mute", "started"]


def started() -> bool:
    """Return whether torchrun started several processes of this command."""
    size = os.environ.get("WORLD_SIZE", "")
    return size.isdecimal() and int(size) > 1


def exchange() -> ProcessExchange | None:
    """Return the exchange with the other processes; None if this one runs all devices. Raises as `ProcessExchange`."""
    return ProcessExchange() if started() else None


def mute() -> None:
    """Send the output of all processes but the first nowhere; errors are shown by each."""
    if started() and os.environ.get("RANK") != "0":
        nowhere = os.open(os.devnull, os.O_WRONLY)
        sys.stdout = os.fdopen(nowhere, "w", encoding="utf-8")
