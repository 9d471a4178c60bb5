"""Detect an engine without progress. A busy engine is not stalled: a step may be long, as long as it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from exl_serve.engine.client import EngineStatus

__all__ = ["Patience", "Watch"]


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits in seconds.

    `stall` seconds without progress, or 20 times the longest recent step, are a stall. After `kill` more seconds the
    engine is ended.
    """

    stall: float = 30.0
    kill: float = 90.0


@dataclass
class Watch:
    """Watch the status of one engine.

    Its page changes with each step, and at least once a second when idle. A page that does not change belongs to an
    engine that hangs or was stopped.
    """

    patience: Patience = field(default_factory=Patience)
    _writes: int = -1
    _moved: float = 0.0
    _longest: float = 0.0

    def look(self, status: EngineStatus | None, writes: int, now: float) -> Literal["ok", "stalled", "kill"]:
        """Return the engine's condition.

        `status` is the last complete one, None where there was none yet; `writes` is the number of writes to the page
        so far.
        """
        if writes != self._writes:
            if status is not None and status.ended >= status.began:
                self._longest = max(0.95 * self._longest, status.ended - status.began)
            self._writes, self._moved = writes, now
            return "ok"
        still = now - self._moved
        stall = max(self.patience.stall, 20 * self._longest)
        return "ok" if still < stall else "stalled" if still < stall + self.patience.kill else "kill"
