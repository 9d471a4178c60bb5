"""Answers of /v1/chat/completions and /v1/completions: chunks of a stream, and the whole answer, from the same
events.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from exl_serve.api.state import TextCodec
from exl_serve.engine.events import TokenLogprob, Usage
from exl_serve.errors import ServeError
from exl_serve.stream.events import (
    AnswerEvent,
    Begun,
    Content,
    Error,
    Finish,
    Reasoning,
    ToolArgs,
    ToolBegin,
)

__all__ = ["DONE", "Answer", "Chat", "Choice", "Completion", "FunctionChat", "sse"]

RETRY_SECONDS = 5.0
"""The Retry-After of an answer that had begun, and whose engine or server ends."""
DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


def sse(value: Any) -> bytes:
    """Return one event of a stream."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


@dataclass
class Choice:
    """The content of one choice so far."""

    begun: bool = False
    #: a chunk of it was made
    sent: bool = False
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    #: the ids that no chunk has yet
    unsent: list[int] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    stop: int | str | None = None
    #: of its tokens in the text of a completion
    places: _Places = field(default_factory=lambda: _Places())


class Answer:
    """One answer, streamed by `chunks` or returned by `whole`: the same events give the same content."""

    object_name = ""
    chunk_name = ""

    def __init__(
        self,
        head: Mapping[str, Any],
        n: int,
        text: TextCodec,
        *,
        include_usage: bool = False,
        continuous_usage: bool = False,
        logprobs: bool = False,
        return_ids: bool = False,
        reasoning_field: str = "reasoning_content",
        prompts: int = 1,
        prompt_logprobs: bool = False,
        settings: Mapping[str, Any] | None = None,
        tokens_as_ids: bool = False,
        truncated: int | None = None,
    ) -> None:
        #: id, created, model, system_fingerprint
        self.head = dict(head)
        self.choices = [Choice() for _ in range(n)]
        self._text = text
        self._include_usage, self._continuous = include_usage, continuous_usage
        self._logprobs, self._return_ids = logprobs, return_ids
        self._shows_prompt = prompt_logprobs
        #: what the answer's field `exl` says of the request; None leaves it out
        self._settings = settings
        self._tokens_as_ids = tokens_as_ids
        #: tokens of the prompts that were left out; None where the request does not allow that
        self._truncated = truncated
        self._reasoning_field = reasoning_field
        #: whether `whole` needs the tokens; a stream does not keep what it has written
        self.keeps = True
        #: of each prompt, where they are asked for
        self.prompt_ids: Sequence[Sequence[int]] = ()
        self.error: ServeError | None = None
        #: choices without a finish
        self._unfinished = n
        self._usages: dict[int, Usage] = {}
        self._reasoning_tokens = 0
        self._running = 0
        #: choices of one prompt are consecutive; each prompt counts once
        self._per_prompt = max(1, n // prompts)
        self.prompt_tokens = self.cached_tokens = 0
        #: log-probabilities of the tokens of each prompt
        self._prompt_logprobs: list[list[TokenLogprob]] = [[] for _ in range(prompts)]
        #: of prompts whose log-probabilities are complete: what `_scored` returns
        self._shown: dict[int, list[dict[str, Any] | None]] = {}
        self._counted: set[int] = set()

    @property
    def finished(self) -> bool:
        """Whether every choice has ended, or one has failed."""
        return not self._unfinished or self.error is not None

    def line(self, chunk: dict[str, Any]) -> bytes:
        """Return a chunk as one event of a stream."""
        return sse(chunk)

    def chunks(self, events: Sequence[AnswerEvent]) -> list[dict[str, Any]]:
        """Return the chunks of these events."""
        found: list[dict[str, Any]] = []
        for event in events:
            if self.error is not None:
                break
            choice = self.choices[event.choice]
            if not isinstance(event, Begun | Error):
                new = [*event.hidden, *getattr(event, "ids", ())]
                choice.unsent += new
                if self.keeps:
                    choice.ids += new
            if isinstance(event, Begun):
                self._count_prompt(event)
                continue
            if isinstance(event, Error):
                wait = RETRY_SECONDS if event.status in (429, 503) else None
                self.error = ServeError(event.status, event.type, event.code, event.message, retry_after=wait)
                break
            if not choice.begun:
                choice.begun = True
                found += self._first(event.choice)
            found += self._piece(event, choice)
        return found

    def _count_prompt(self, event: Begun) -> None:
        """Count the prompt of a first choice, and take its log-probabilities."""
        prompt, other = divmod(event.choice, self._per_prompt)
        if other:
            return
        self._prompt_logprobs[prompt] += event.prompt_logprobs
        if prompt not in self._counted:
            self._counted.add(prompt)
            self.prompt_tokens += event.prompt_tokens
            self.cached_tokens += event.cached_tokens

    def last_chunks(self) -> list[dict[str, Any]]:
        """Return the chunks after the last choice's end: the usage, or the error."""
        if self.error is not None:
            return [self.error.body()]
        if not self._include_usage:
            return []
        return [self.head | {"object": self.chunk_name, "choices": [], "usage": self.usage()} | self._debug()]

    def usage(self) -> dict[str, Any]:
        """Return the usage. The prompt counts once, however many choices there are."""
        new = sum(usage.completion_tokens for usage in self._usages.values())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": self._reasoning_tokens,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }

    def whole(self) -> dict[str, Any]:
        """Return the answer without a stream. Raises ServeError where a choice has failed."""
        if self.error is not None:
            raise self.error
        choices = [self._whole_choice(i, choice) for i, choice in enumerate(self.choices)]
        return self.head | {"object": self.object_name, "choices": choices, "usage": self.usage()} | self._debug()

    def content(self) -> list[dict[str, Any]]:
        """Return what was answered so far, for the content log: an object for each choice."""
        return [
            {
                "text": "".join(choice.text),
                "reasoning": "".join(choice.reasoning),
                "tool_calls": choice.calls,
                "finish_reason": choice.finish,
            }
            for choice in self.choices
        ]

    def _debug(self) -> dict[str, Any]:
        """Return the field `exl` for a client that asks for it: settings and seconds, or tokens that were left out."""
        cut = {} if self._truncated is None else {"truncated_tokens": self._truncated}
        if self._settings is None:
            return {"exl": cut} if cut else {}
        drafts = {
            name: sum(getattr(one, name) for one in self.usages) for name in ("drafts_accepted", "drafts_rejected")
        }
        timings = self.timings() | drafts
        seconds = timings["generate_seconds"]
        timings["tokens_per_second"] = self.usage()["completion_tokens"] / seconds if seconds else 0.0
        return {"exl": {"settings": dict(self._settings), "timings": timings, **cut}}

    def _scored(self, prompt: int) -> list[dict[str, Any] | None]:
        """Return the log-probabilities of a prompt's tokens as vLLM shows them; null for the first one."""
        found: list[dict[str, Any] | None] = []
        for one in self._prompt_logprobs[prompt]:
            if one.logprob is None:
                found.append(None)
                continue
            shown: dict[int, tuple[float, int | None]] = {i: (p, rank) for rank, (i, p) in enumerate(one.top, 1)}
            shown.setdefault(one.id, (one.logprob, None))
            found.append(
                {
                    str(id): {
                        "logprob": p,
                        "rank": rank,
                        "decoded_token": self._text.piece(id).decode("utf-8", "replace"),
                    }
                    for id, (p, rank) in shown.items()
                }
            )
        return found

    @property
    def usages(self) -> list[Usage]:
        """Counts and seconds of each choice that has ended."""
        return list(self._usages.values())

    def timings(self) -> dict[str, float]:
        """Return the seconds of the choice that ended last; 0 for a phase that it did not reach."""
        last = next(reversed(self._usages.values()), None)
        names = ("queue_seconds", "prefill_seconds", "generate_seconds")
        return {name: 0.0 if last is None else getattr(last, name) for name in names}

    def _token(self, token: int) -> str:
        """Return how log-probabilities name a token."""
        return f"token_id:{token}" if self._tokens_as_ids else self._text.piece(token).decode("utf-8", "replace")

    # ---- of the two shapes -----------------------------------------------------------------------------------------

    def _first(self, index: int) -> list[dict[str, Any]]:
        return []

    def _piece(self, event: AnswerEvent, choice: Choice) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _end(self, event: Finish, choice: Choice) -> None:
        self._unfinished -= choice.finish is None
        choice.finish, choice.stop = event.reason, event.stop
        self._keep(event, choice)
        self._usages[event.choice] = event.usage  # in the order in which the choices end
        self._reasoning_tokens += event.reasoning_tokens

    def _keep(self, event: Content | Finish, choice: Choice) -> None:
        """Keep the log-probabilities of an event for `whole`."""
        if self.keeps:
            choice.logprobs += event.logprobs

    def _with_ids(self, piece: dict[str, Any], choice: Choice) -> dict[str, Any]:
        """Return the chunk of a piece, with the ids that no chunk has yet where they are asked for."""
        ids, choice.unsent = choice.unsent, []
        if self._return_ids:
            piece["token_ids"] = ids
        return self._chunk(piece, len(ids))

    def _chunk(self, choice: dict[str, Any], new_tokens: int = 0) -> dict[str, Any]:
        self._running += new_tokens
        chunk = self.head | {"object": self.chunk_name, "choices": [choice]}
        if self._continuous:
            new = self._running
            chunk["usage"] = {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": new,
                "total_tokens": self.prompt_tokens + new,
            }
        elif self._include_usage:
            chunk["usage"] = None
        return chunk


class Chat(Answer):
    """The shape of /v1/chat/completions. `echo`: the text that each choice's content begins with."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    echo = ""

    def whole(self) -> dict[str, Any]:
        """Return the answer without a stream. Raises ServeError where a choice has failed."""
        scores = {"prompt_logprobs": self._scored(0)} if self._shows_prompt else {}
        return super().whole() | scores | self._of_prompts()

    def _of_prompts(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompt_ids[0]} if self._return_ids and self.prompt_ids else {}

    def _first(self, index: int) -> list[dict[str, Any]]:
        deltas = [{"role": "assistant", "content": ""}, *([{"content": self.echo}] if self.echo else [])]
        chunks = [
            self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}) for delta in deltas
        ]
        if sum(choice.begun for choice in self.choices) == 1:
            chunks[0] |= self._of_prompts()
        return chunks

    def _piece(self, event: AnswerEvent, choice: Choice) -> list[dict[str, Any]]:
        if isinstance(event, Finish):
            self._end(event, choice)
            last: dict[str, Any] = {"index": event.choice, "delta": {}, "logprobs": None, "finish_reason": event.reason}
            if self._logprobs and event.logprobs:
                last["logprobs"] = {"content": [self._logprob(one) for one in event.logprobs], "refusal": None}
            if event.stop is not None:
                last["stop_reason"] = event.stop
            return [self._with_ids(last, choice)]
        delta: dict[str, Any]
        logprobs: dict[str, Any] | None = None
        if isinstance(event, Content):
            choice.text.append(event.text)
            self._keep(event, choice)
            delta = {"content": event.text}
            if self._logprobs:
                logprobs = {"content": [self._logprob(one) for one in event.logprobs], "refusal": None}
        elif isinstance(event, Reasoning):
            choice.reasoning.append(event.text)
            delta = dict.fromkeys(self._reasoning_names(), event.text)
            if not delta:
                return []
        elif isinstance(event, ToolBegin):
            kind = {"id": event.id, "type": "function"}
            choice.calls.append(kind | {"function": {"name": event.name, "arguments": ""}})
            opened = {"index": event.index, **kind, "function": {"name": event.name, "arguments": ""}}
            delta = {"tool_calls": [opened]}
        elif isinstance(event, ToolArgs):
            choice.calls[event.index]["function"]["arguments"] += event.text
            delta = {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        else:
            return []
        piece: dict[str, Any] = {"index": event.choice, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return [self._with_ids(piece, choice)]

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text = self.echo + "".join(choice.text)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not choice.calls else None}
        reasoning = "".join(choice.reasoning)
        if reasoning:
            message |= dict.fromkeys(self._reasoning_names(), reasoning)
        if choice.calls:
            message["tool_calls"] = choice.calls
        message["refusal"] = None
        logprobs = None
        if self._logprobs:
            logprobs = {"content": [self._logprob(one) for one in choice.logprobs], "refusal": None}
        found: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop,
        }
        if self._return_ids:
            found["token_ids"] = choice.ids
        return found

    def _reasoning_names(self) -> tuple[str, ...]:
        both = ("reasoning_content", "reasoning")
        return {"both": both, "none": ()}.get(self._reasoning_field, (self._reasoning_field,))

    def _logprob(self, one: TokenLogprob) -> dict[str, Any]:
        top = [self._entry(i, p) for i, p in one.top]
        return self._entry(one.id, one.logprob or 0.0) | {"top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._text.piece(token)
        return {"token": self._token(token), "logprob": logprob, "bytes": list(piece)}


class FunctionChat(Chat):
    """The shape that requests with `functions`, the form of 2023, are answered in: `function_call` instead of
    `tool_calls`. An answer has one call at most.
    """

    def _piece(self, event: AnswerEvent, choice: Choice) -> list[dict[str, Any]]:
        chunks = super()._piece(event, choice)
        for chunk in chunks:
            _as_function_call(chunk["choices"][0], "delta")
        return chunks

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        found = super()._whole_choice(index, choice)
        _as_function_call(found, "message")
        return found


def _as_function_call(choice: dict[str, Any], part: str) -> None:
    """Rewrite a choice with tool calls."""
    if calls := choice[part].pop("tool_calls", None):
        choice[part]["function_call"] = calls[0]["function"]
    if choice["finish_reason"] == "tool_calls":
        choice["finish_reason"] = "function_call"


class Completion(Answer):
    """The shape of /v1/completions. `echo`: the text of each choice's prompt, in front of its completion; with
    log-probabilities also those of the prompt. `hidden`: tokens without a text in the answer. `healed`: for each prompt
    the bytes of its last token, which the first token of an answer repeats; none of them is healed where it is empty.
    """

    object_name = chunk_name = "text_completion"
    echo: Sequence[str] = ()
    hidden: frozenset[int] = frozenset()
    healed: Sequence[bytes] = ()

    def _first(self, index: int) -> list[dict[str, Any]]:
        choice = self.choices[index]
        choice.places = self._places(index)
        if not self.echo:
            return []
        logprobs = self._shape(self._of_prompt(index), choice.places) if self._logprobs else None
        shown = self.echo[index] or logprobs
        return [self._text_chunk(index, self.echo[index], logprobs, first=True)] if shown else []

    def _of_prompt(self, index: int) -> list[TokenLogprob]:
        return self._prompt_logprobs[index // self._per_prompt] if self.echo else []

    def _places(self, index: int) -> _Places:
        """Return the places of tokens in the text of a choice, from its first one on."""
        places = _Places()
        if not self.echo:
            if self.healed:
                places.take(self.healed[index // self._per_prompt])
            return _Places(-places.at)
        for one in self._of_prompt(index):
            places.take(self._piece_of(one.id))
        # Decoding a prompt may drop the space in front of it, which its first token has.
        return _Places(min(0, len(self.echo[index]) - places.at) if places.at else len(self.echo[index]))

    def _piece_of(self, token: int) -> bytes:
        return b"" if token in self.hidden else self._text.piece(token)

    def _text_chunk(
        self, index: int, text: str, logprobs: Any = None, finish: str | None = None, *, first: bool = False
    ) -> dict[str, Any]:
        piece: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        choice = self.choices[index]
        if not choice.sent:
            choice.sent = True
            piece |= self._ids_of_prompt(index)
        return self._chunk(piece) if first else self._with_ids(piece, choice)

    def _ids_of_prompt(self, index: int) -> dict[str, Any]:
        prompts = self.prompt_ids
        return {"prompt_token_ids": prompts[index // self._per_prompt]} if self._return_ids and prompts else {}

    def _piece(self, event: AnswerEvent, choice: Choice) -> list[dict[str, Any]]:
        if isinstance(event, Finish):
            self._end(event, choice)
            left = self._shape(event.logprobs, choice.places) if self._logprobs and event.logprobs else None
            chunk = self._text_chunk(event.choice, "", left, event.reason)
            if event.stop is not None:
                chunk["choices"][0]["stop_reason"] = event.stop
            return [chunk]
        if not isinstance(event, Content):
            return []
        choice.text.append(event.text)
        self._keep(event, choice)
        logprobs = self._shape(event.logprobs, choice.places) if self._logprobs else None
        return [self._text_chunk(event.choice, event.text, logprobs)]

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if self._logprobs:
            logprobs = self._shape([*self._of_prompt(index), *choice.logprobs], self._places(index))
        found: dict[str, Any] = {
            "index": index,
            "text": (self.echo[index] if self.echo else "") + "".join(choice.text),
            "logprobs": logprobs,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop,
        }
        if self._shows_prompt:
            prompt = index // self._per_prompt
            if prompt not in self._shown:  # its choices share it: there is an object for each token
                self._shown[prompt] = self._scored(prompt)
            found["prompt_logprobs"] = self._shown[prompt]
        if self._return_ids:
            found["token_ids"] = choice.ids
            found |= self._ids_of_prompt(index)
        return found

    def _shape(self, logprobs: Sequence[TokenLogprob], places: _Places) -> dict[str, list[Any]]:
        """Return the log-probabilities in the old shape: parallel lists; offsets count characters of the text."""
        shape: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in logprobs:
            text = self._token(one.id)
            shape["tokens"].append(text)
            shape["token_logprobs"].append(one.logprob)
            top = {self._token(i): p for i, p in one.top}
            # The sampled token is among them, as in OpenAI's API.
            shape["top_logprobs"].append({**top, text: one.logprob} if top else None)
            shape["text_offset"].append(places.take(self._piece_of(one.id)))
        return shape


class _Places:
    """Places of tokens in a text, in characters. `at`: that of the next one; below 0 while it lies before the text."""

    __slots__ = ("_decoder", "at")

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, piece: bytes) -> int:
        """Return the place of a token with these bytes, which may be a part of a character."""
        found = max(0, self.at)
        self.at += len(self._decoder.decode(piece))
        return found
