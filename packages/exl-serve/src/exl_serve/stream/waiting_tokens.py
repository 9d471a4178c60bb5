"""The tokens of an answer that no event has yet."""

from __future__ import annotations

from exl_serve.engine.events import TokenLogprob
from exl_serve.stream.events import AnswerEvent, Content, Reasoning, ToolArgs, ToolBegin, ToolEnd

__all__ = ["WaitingTokens"]


class WaitingTokens:
    """Ids and log-probabilities that go with the next event; `hidden` are tokens whose text no event has."""

    __slots__ = ("hidden", "ids", "logprobs")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.hidden: list[int] = []
        self.logprobs: list[TokenLogprob] = []

    def hide(self) -> None:
        """Keep the tokens for the next event, as tokens without text."""
        self.hidden += self.ids
        self.ids.clear()
        self.logprobs.clear()

    def event(self, choice: int, text: str, *, reasoning: bool) -> AnswerEvent:
        """Return the event of a text, with all tokens."""
        kind = Reasoning if reasoning else Content
        made = kind(choice, text, tuple(self.ids), tuple(self.logprobs), tuple(self.hidden))
        self.ids.clear()
        self.logprobs.clear()
        self.hidden.clear()
        return made

    def give(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        """Hide the tokens, and give them to the first of a call's events. Returns the events."""
        self.hide()
        if events and isinstance(events[0], ToolBegin | ToolArgs | ToolEnd):
            events[0].hidden = tuple(self.hidden)
            self.hidden.clear()
        return events
