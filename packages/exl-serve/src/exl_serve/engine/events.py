"""Events of one request, completion by completion, in this order:

`Started`, then any number of `Progress`, then `Tokens`, and at the end exactly one `Finished` or `Failed`. Where the
prompt's log-probabilities were asked for, further `Started` come with them before the first `Tokens`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["EngineEvent", "Failed", "Finished", "Progress", "Started", "TokenLogprob", "Tokens", "Usage"]


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """Natural logarithms of the model's own probabilities, before any transform."""

    id: int
    logprob: float | None
    #: the most likely tokens, (id, logprob), best first
    top: tuple[tuple[int, float], ...] = ()


class Usage(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Counts and seconds of one completion."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    drafts_accepted: int = 0
    drafts_rejected: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    generate_seconds: float = 0.0


class Started(msgspec.Struct, array_like=True, frozen=True, tag=0, tag_field="kind"):
    """The engine has begun to compute the prompt."""

    choice: int
    prompt_tokens: int
    cached_tokens: int
    #: log-probabilities of the prompt's tokens, where they were asked for; the first one's is None. They come in order
    #: with later events of this kind, of the first choice
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class Progress(msgspec.Struct, array_like=True, frozen=True, tag=1, tag_field="kind"):
    """Number of prompt tokens computed so far."""

    choice: int
    done: int
    total: int


class Tokens(msgspec.Struct, array_like=True, frozen=True, tag=2, tag_field="kind"):
    """Released tokens and their text: complete UTF-8, without text that may become a stop string.

    The text of a special token is empty unless the request asked for it.
    """

    choice: int
    ids: tuple[int, ...]
    text: str
    #: one for each of `ids`, where they were asked for
    logprobs: tuple[TokenLogprob, ...] = ()


class Finished(msgspec.Struct, array_like=True, frozen=True, tag=3, tag_field="kind"):
    """The completion ended without error. `reason` length: max_tokens is used up; filter: a grammar came to its end."""

    choice: int
    reason: Literal["stop_token", "stop_string", "length", "filter"]
    #: the stop token or string
    stop: int | str | None
    usage: Usage


class Failed(msgspec.Struct, array_like=True, frozen=True, tag=4, tag_field="kind"):
    """The completion ended by an error. The others of the request continue unless they failed too."""

    choice: int
    status: int
    type: str
    code: str
    message: str
    usage: Usage | None = None


EngineEvent = Started | Progress | Tokens | Finished | Failed
