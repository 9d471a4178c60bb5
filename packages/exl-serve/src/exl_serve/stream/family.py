"""Settings that decide how a model's output is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from exl_serve.engine.events import EngineEvent
from exl_serve.stream.events import AnswerEvent

__all__ = ["ChannelMachine", "ChannelSettings", "ToolSpec"]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call. `parameters` is its JSON schema, {} for one without arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False
    #: path of the schema in the request
    param: str = "tools"


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """The parts of a request that decide how its output is read."""

    tools: Sequence[ToolSpec] = ()
    #: none, auto, required, or the name of the function to call
    tool_choice: str = "none"
    parallel: bool = True
    #: whether output starts inside reasoning: the rendered prompt ends in an open region
    starts_in_reasoning: bool = False
    #: whether the rendered prompt ends with the end of reasoning
    reasoning_over: bool = False
    #: whether reasoning is separated; else it stays part of the content
    reasoning: bool = True
    #: whether a grammar decides at the answer's beginning between calls and a content that has a format
    formatted: bool = False
    #: the contents that a choice allows instead of calls: one of them may begin as a call does
    contents: Sequence[str] = ()
    #: whether the stop string that ends the answer is part of its text
    shows_stop: bool = False


class ChannelMachine(Protocol):
    """Read one completion, token by token; holds back at most the length of a marker."""

    def feed(self, event: EngineEvent) -> list[AnswerEvent]:
        """Return the answer's events that this engine event completes; for `Finished` and `Failed` the last ones."""
