"""Wait for a result of another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["until"]

HANG_SECONDS = 120.0


def until(
    true: Callable[[], Any], explain: Callable[[], str] = str, *, seconds: float = HANG_SECONDS, pause: float = 0.02
) -> Any:
    """Return the first true result of `true()`, which is called every `pause` seconds.

    Raises TimeoutError with the text of `explain()` after `seconds` seconds, which only a hang takes.
    """
    end = time.monotonic() + seconds
    while not (found := true()):
        if time.monotonic() > end:
            raise TimeoutError(explain() or "waited for nothing")
        time.sleep(pause)
    return found
