"""Continue a request on another replica: run it again from its prompt, and leave out what the client has received.

A request's tokens depend only on the request, so the second run makes the same tokens. Grammars, stop strings and tool
calls see all of these tokens, so they reach the state that they had. A difference ends the request with an error:
answers of two runs are never joined.
"""

from __future__ import annotations

import msgspec

from exl_serve.engine.events import EngineEvent, Failed, Finished, Progress, Started, Tokens

__all__ = ["DivergedError", "Replay"]


class DivergedError(Exception):
    """The second run said something else."""


class Replay:
    """One completion over several runs. `feed` gives the events that the client has not had."""

    def __init__(self) -> None:
        self.ended = False
        self._started = False
        self._ids: list[int] = []
        self._text = ""
        #: how much of what was sent this run has said
        self._at, self._said = 0, 0

    def again(self) -> None:
        """Another run begins."""
        self._at = self._said = 0

    def feed(self, event: EngineEvent) -> EngineEvent | None:
        """None for what was sent before. Raises DivergedError."""
        if self.ended:
            return None
        match event:
            case Started():
                first, self._started = not self._started, True
                return event if first else None
            case Progress():
                return event if not self._ids else None
            case Tokens():
                return self._tokens(event)
            case Finished() | Failed():
                if isinstance(event, Finished) and (self._at < len(self._ids) or self._said < len(self._text)):
                    raise DivergedError
                self.ended = True
                return event

    def _tokens(self, event: Tokens) -> Tokens | None:
        again = min(len(event.ids), len(self._ids) - self._at)
        spoken = min(len(event.text), len(self._text) - self._said)
        if list(event.ids[:again]) != self._ids[self._at : self._at + again]:
            raise DivergedError
        if event.text[:spoken] != self._text[self._said : self._said + spoken]:
            raise DivergedError
        ids, text = event.ids[again:], event.text[spoken:]
        self._ids += ids
        self._text += text
        self._at += len(event.ids)
        self._said += len(event.text)
        if not ids and not text:
            return None
        return msgspec.structs.replace(event, ids=ids, text=text, logprobs=event.logprobs[again:])
