"""Continue a request on another replica, after what the client has received.

The new replica takes the ids of each completion as given: grammars, stop strings, random numbers and limits advance
over them (`ExLlamaV2DynamicJob(resume_from=...)`), so the client sees a pause and no seam.
"""

from __future__ import annotations

import msgspec
import numpy as np

from exl_serve.engine.events import EngineEvent, Failed, Finished, Progress, Started, Tokens

__all__ = ["Completion"]


class Completion:
    """One completion over several runs, as the client has received it."""

    __slots__ = ("_ids", "_scores", "_told", "ended", "started")

    def __init__(self) -> None:
        self.ended = self.started = False
        self._ids: list[int] = []
        #: log-probabilities of the prompt that the client has, and those of the present run
        self._scores = self._told = 0

    @property
    def ids(self) -> bytes:
        """Ids that the client has received, int32 little endian."""
        return np.array(self._ids, dtype="<i4").tobytes()

    def feed(self, event: EngineEvent) -> EngineEvent | None:
        """Return the event for the client; None for an event that it received from an earlier run."""
        if self.ended:
            return None
        match event:
            case Started() if event.prompt_logprobs:
                return self._more_scores(event)
            case Started():
                first, self.started = not self.started, True
                self._told = 0
                return event if first else None
            case Progress():
                return None if self._ids else event
            case Tokens():
                self._ids += event.ids
                return event
            case Finished() | Failed():
                self.ended = True
                return event

    def _more_scores(self, event: Started) -> Started | None:
        """Return the event with what is new to the client: each run computes them from the prompt's begin."""
        known = max(0, self._scores - self._told)
        self._told += len(event.prompt_logprobs)
        self._scores = max(self._scores, self._told)
        new = event.prompt_logprobs[known:]
        return msgspec.structs.replace(event, prompt_logprobs=new) if new else None
