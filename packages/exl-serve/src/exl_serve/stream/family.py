"""How a model family writes reasoning and tool calls: the interface of the output formats in `families`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from exl_serve.engine.events import EngineEvent
from exl_serve.request.internal import Constraint
from exl_serve.stream.events import AnswerEvent

__all__ = ["ChannelMachine", "ChannelSettings", "Family", "ToolSpec"]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call. `parameters` is its JSON schema, {} for one without arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """What of a request decides how its output is read."""

    tools: Sequence[ToolSpec] = ()
    #: none, auto, required, or the name of the function to call
    tool_choice: str = "none"
    parallel: bool = True
    #: whether output starts inside of reasoning: the rendered prompt ends in an open region
    starts_in_reasoning: bool = False
    #: whether reasoning is told apart; else it stays part of the content
    reasoning: bool = True


class ChannelMachine(Protocol):
    """Reads one completion, token by token; holds back at most the length of a marker."""

    def feed(self, event: EngineEvent) -> list[AnswerEvent]:
        """The answer's events that this engine event completes; of `Finished` and `Failed` the last ones."""


class Family(Protocol):
    """One output format. Made for a tokenizer: `special` are its special tokens by spelling."""

    name: str
    #: whether the format has reasoning, and tool calls
    has_reasoning: bool
    has_tools: bool

    def machine(self, choice: int, settings: ChannelSettings) -> ChannelMachine: ...

    def starts_in_reasoning(self, prompt_ids: Sequence[int], prompt_text: str) -> bool:
        """Whether a rendered prompt ends inside of reasoning."""

    def constraints(self, settings: ChannelSettings, response_format: Constraint | None) -> tuple[Constraint, ...]:
        """Grammars for the calls' regions, and for the content where the request has a format.

        Raises `ServeError` 400 for schemas that cannot be compiled into this format.
        """

    @property
    def special_text(self) -> bool:
        """Whether the engine is to report special tokens as text: markers of the format are spelled by them."""


FamilyName = Literal[
    "auto",
    "none",
    "hermes",
    "qwen3_coder",
    "llama3",
    "llama4",
    "mistral",
    "deepseek",
    "gemma",
    "glm",
    "command",
    "phi4",
    "harmony",
]
