"""Continue a request on another replica, behind what the client has received.

The new replica takes the ids of each completion as given: grammars, stop strings, random numbers and limits advance
over them (`ExLlamaV2DynamicJob(resume_from=...)`), so the client sees a pause and no seam.
"""

from __future__ import annotations

import numpy as np

from exl_serve.engine.events import EngineEvent, Failed, Finished, Progress, Started, Tokens

__all__ = ["Completion"]


class Completion:
    """One completion over several runs, as the client has received it."""

    __slots__ = ("_ids", "ended", "started")

    def __init__(self) -> None:
        self.ended = self.started = False
        self._ids: list[int] = []

    @property
    def ids(self) -> bytes:
        """Ids that the client has received, int32 little endian."""
        return np.array(self._ids, dtype="<i4").tobytes()

    def feed(self, event: EngineEvent) -> EngineEvent | None:
        """Return the event for the client; None for an event that it received from an earlier run."""
        if self.ended:
            return None
        match event:
            case Started():
                first, self.started = not self.started, True
                return event if first else None
            case Progress():
                return None if self._ids else event
            case Tokens():
                self._ids += event.ids
                return event
            case Finished() | Failed():
                self.ended = True
                return event
