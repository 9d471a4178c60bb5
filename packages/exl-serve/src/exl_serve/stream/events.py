"""What an answer is made of, for every public API alike.

Of each choice: `Begun`, then any number of `Reasoning`, `Content` and tool calls (`ToolBegin`, any `ToolArgs`,
`ToolEnd`), then exactly one `Finish` or `Error`. Texts are complete UTF-8 and not empty.
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
    choice: int
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class Reasoning:
    choice: int
    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class Content:
    choice: int
    text: str
    #: the tokens whose text this is
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class ToolBegin:
    """A call is open: its number in the answer, its id and the whole name."""

    choice: int
    index: int
    id: str
    name: str


@dataclass(slots=True)
class ToolArgs:
    """A piece of the call's arguments, which joined are a JSON text."""

    choice: int
    index: int
    text: str


@dataclass(slots=True)
class ToolEnd:
    """The call is closed: its joined arguments are valid JSON."""

    choice: int
    index: int


@dataclass(slots=True)
class Finish:
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


@dataclass(slots=True)
class Error:
    choice: int
    status: int
    type: str
    code: str
    message: str
    usage: Usage | None = field(default=None)


AnswerEvent = Begun | Reasoning | Content | ToolBegin | ToolArgs | ToolEnd | Finish | Error
