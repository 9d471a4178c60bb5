"""The parts of an answer, for every public API alike.

For each choice: `Begun`, then any number of `Reasoning`, `Content` and tool calls (`ToolBegin`, any `ToolArgs`,
`ToolEnd`), then exactly one `Finish` or `Error`. Texts are complete UTF-8 and not empty. `hidden` and
`ids` of all events, joined in this order, are the tokens of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from exl_serve.engine.events import TokenLogprob, Usage

__all__ = [
    "AnswerEvent",
    "Begun",
    "Content",
    "Error",
    "Finish",
    "Reasoning",
    "ToolArgs",
    "ToolBegin",
    "ToolEnd",
]


@dataclass(slots=True)
class Begun:
    """The prompt of a choice is being computed."""

    choice: int
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class Reasoning:
    """A piece of reasoning."""

    choice: int
    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    #: tokens without text that came before
    hidden: tuple[int, ...] = ()


@dataclass(slots=True)
class Content:
    """A piece of content."""

    choice: int
    text: str
    #: the tokens whose text this is
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    #: tokens without text that came before
    hidden: tuple[int, ...] = ()


@dataclass(slots=True)
class ToolBegin:
    """A call begins: its number in the answer, its id and its whole name."""

    choice: int
    index: int
    id: str
    name: str
    #: tokens that came with it, those of the call's markers included
    hidden: tuple[int, ...] = ()


@dataclass(slots=True)
class ToolArgs:
    """A piece of the call's arguments; joined, the pieces are a JSON text."""

    choice: int
    index: int
    text: str
    #: tokens that came with it, those of the call's markers included
    hidden: tuple[int, ...] = ()


@dataclass(slots=True)
class ToolEnd:
    """The call ends: its joined arguments are valid JSON."""

    choice: int
    index: int
    #: tokens that came with it, those of the call's markers included
    hidden: tuple[int, ...] = ()


@dataclass(slots=True)
class Finish:
    """The choice ended without error."""

    choice: int
    reason: Literal["stop", "length", "tool_calls"]
    #: the stop token or string
    stop: int | str | None
    usage: Usage
    #: tokens of `usage.completion_tokens` that are reasoning
    reasoning_tokens: int = 0
    #: tokens without text at the end of the content
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    #: tokens without text that came before
    hidden: tuple[int, ...] = ()


@dataclass(slots=True)
class Error:
    """The choice ended with an error."""

    choice: int
    status: int
    type: str
    code: str
    message: str
    usage: Usage | None = field(default=None)


AnswerEvent = Begun | Reasoning | Content | ToolBegin | ToolArgs | ToolEnd | Finish | Error
