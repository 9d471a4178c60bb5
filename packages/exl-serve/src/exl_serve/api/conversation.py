"""A conversation on its way to the engine, for every API alike."""

from __future__ import annotations

import bisect
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exl_serve.api.generation import Generation
from exl_serve.api.http import Call
from exl_serve.api.prepare import Target, admit, engine_request, most_prompt_tokens, negative_ids_of, resolve
from exl_serve.errors import ServeError
from exl_serve.request.internal import Constraint, EngineRequest
from exl_serve.request.messages import ImagePart
from exl_serve.stream.family import ChannelSettings, ToolSpec

__all__ = ["Conversation", "Prepared", "prepare"]

BREAK = "\u2060"
"""Breaks the spelling of a marker. Of no template's syntax, and no space that a template would strip."""
MAX_CUTS = 5
"""Renderings of one request that search for the turns to leave out."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The checked content of a conversation request. Sampling is in the request's fields."""

    messages: list[dict[str, Any]]
    #: as chat templates take them
    tools: list[dict[str, Any]]
    specs: tuple[ToolSpec, ...]
    #: none, auto, required, or a tool's name
    choice: str
    #: the format that the content has
    wanted: Constraint | None
    #: of the chat template
    variables: dict[str, Any]
    max_tokens: int | None = None
    n: int = 1
    logprobs: int | None = None
    #: in the order in which the messages have them
    images: Sequence[ImagePart] = ()
    prompt_logprobs: int | None = None
    #: as the field `truncate_prompt_tokens`
    truncate: int | None = None
    #: a BOS comes in front of what the template writes
    bos: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversation that is ready to run: the model, the engine request, and the generation.

    `truncated`: tokens of the messages that were left out; None where the request does not allow that.
    """

    target: Target
    request: EngineRequest
    generation: Generation
    truncated: int | None = None


async def prepare(call: Call, fields: Mapping[str, Any], asked: Conversation) -> Prepared:
    """Build the engine request of the rendered prompt.

    Raises ServeError for every fault that is known before the first token.
    """
    target = await resolve(call, fields)
    admit(call, target, asked.n)
    family = target.handle.family
    if asked.images and "image" not in target.engine.card.modalities:
        param = asked.images[0].param
        raise ServeError.invalid(f"{param}: the model {target.name} takes no images", param, "unsupported_modality")
    plain = asked.tools if asked.choice != "none" else None
    settings = ChannelSettings(
        tools=asked.specs if asked.choice != "none" else (),
        tool_choice=asked.choice,
        parallel=fields.get("parallel_tool_calls", True),
        formatted=asked.wanted is not None and asked.wanted.after is None and asked.choice == "auto",
        contents=() if asked.wanted is None or asked.wanted.kind != "choice" else json.loads(asked.wanted.source),
        shows_stop=fields.get("include_stop_str_in_output", False),
    )
    began = time.monotonic()
    rendered = await _rendered(call, asked, target, plain, settings)
    call.phase("tokenise", began)
    settings = rendered.settings
    constraints = family.constraints(settings, asked.wanted)
    if "reasoning_budget" in fields:
        constraints += family.budget(fields["reasoning_budget"], settings)
    request = engine_request(
        call,
        target,
        fields,
        rendered.ids,
        max_tokens=asked.max_tokens,
        n=asked.n,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        constraints=constraints,
        special_text=True,
        negative_ids=await negative_ids_of(target, fields),
    )
    shown = fields.get("skip_special_tokens", True) is False
    machines = [family.machine(i, settings, call.id, show_special=shown) for i in range(asked.n)]
    generation = Generation(target.engine, [request], machines)
    return Prepared(target, request, generation, rendered.truncated)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A rendered conversation: its ids with those of a forced call's beginning, and how the answer is read."""

    ids: list[int]
    settings: ChannelSettings
    truncated: int | None = None


async def _rendered(
    call: Call, asked: Conversation, target: Target, tools: list[dict[str, Any]] | None, settings: ChannelSettings
) -> _Rendered:
    """Render the conversation; where the request allows it, without the oldest messages of one that is too long.

    Raises ServeError 400.
    """
    text, family = target.handle.text, target.handle.family
    front = text.encode("", bos=True) if asked.bos else []

    async def render(messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], ChannelSettings]:
        began = time.monotonic()
        async with call.state.renders.turn(call.caller.name):
            prompt, ids = await text.render(messages, tools, asked.variables)
            own = await _own_markers(target, prompt, messages, tools, asked.variables)
        call.state.meter.observe("exl_template_seconds", time.monotonic() - began, model_name=call.model)
        read = replace(
            settings,
            starts_in_reasoning=family.starts_in_reasoning(own),
            reasoning_over=family.reasoning_over(own),
        )
        # A forced call begins in the prompt, and needs room there.
        forced = family.forced_prefix(read)
        return [*front, *ids, *(text.encode(forced, special=True) if forced else ())], read

    ids, read = await render(asked.messages)
    new = asked.max_tokens if asked.max_tokens is not None else call.state.config.server.default_max_tokens
    most = most_prompt_tokens({"truncate_prompt_tokens": asked.truncate}, target, new)
    if most is None:
        return _Rendered(ids, read)
    best = _Rendered(ids, read, 0)
    if len(ids) > most:
        best = await _shortened(asked, most, len(ids), render)
    call.headers["x-exl-truncated-tokens"] = str(best.truncated)
    return best


async def _own_markers(
    target: Target,
    prompt: str,
    messages: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    """Return a rendered prompt in which only the template and a message that is continued have markers of reasoning.

    A message that spells one would else switch off formats and forced calls. Raises ServeError 400.
    """
    family = target.handle.family
    marks = family.form.think
    if marks is None or not (family.starts_in_reasoning(prompt) or family.reasoning_over(prompt)):
        return prompt
    kept = len(messages) - (1 if variables.get("continue_final_message") else 0)
    values = {name: value for name, value in variables.items() if name != "chat_template"}
    given = [list(messages[:kept]), tools, values]
    broken = _broken(given, marks)
    if broken == given:
        return prompt
    before, offered, options = broken
    template = {name: variables[name] for name in ("chat_template",) if name in variables}
    return (await target.handle.text.render([*before, *messages[kept:]], offered, {**options, **template}))[0]


def _broken(value: Any, marks: Sequence[str]) -> Any:
    """Return a JSON value whose texts have a sign inside each marker, and after an end that may begin one."""
    if isinstance(value, str):
        for mark in marks:
            value = value.replace(mark, mark[0] + BREAK + mark[1:])
            if any(value.endswith(mark[:size]) for size in range(1, len(mark))):
                value += BREAK
        return value
    if isinstance(value, Mapping):
        return {_broken(key, marks): _broken(one, marks) for key, one in value.items()}
    return [_broken(one, marks) for one in value] if isinstance(value, list) else value


async def _shortened(
    asked: Conversation,
    most: int,
    whole: int,
    render: Callable[[Sequence[Mapping[str, Any]]], Awaitable[tuple[list[int], ChannelSettings]]],
) -> _Rendered:
    """Return the conversation without its oldest turns, as few as make it fit. System messages in front stay.

    A turn begins with a message of the user, so that no call loses its result. The tokens of a turn are estimated from
    its characters and the renderings so far. After `MAX_CUTS` renderings the result may lack more turns than needed.
    Raises ServeError 400.
    """
    if asked.images:  # their tokens are known to the engine only
        raise ServeError.invalid(
            f"the prompt has {whole} tokens besides those of its images, more than the {most} that may be kept, and a "
            "conversation with images is not cut: leave out its oldest messages",
            "messages",
            "context_length_exceeded",
        )
    messages = asked.messages
    first = next((at for at, one in enumerate(messages) if one["role"] not in ("system", "developer")), 0)
    starts = [at for at, one in enumerate(messages) if at > first and one["role"] == "user"]
    sizes = [0, *itertools.accumulate(map(_characters, messages[first:]))]
    cut = [sizes[at - first] for at in starts]  # characters that each cut leaves out
    rate = whole / max(1, sizes[-1])
    best: _Rendered | None = None
    low, high = 0, len(starts)
    for left in reversed(range(MAX_CUTS)):
        if low >= high:
            break
        at = min(high - 1, max(low, bisect.bisect_left(cut, (whole - most) / rate)))
        if best is None and left == 0:
            at = high - 1
        ids, read = await render([*messages[:first], *messages[starts[at] :]])
        if len(ids) <= most:
            best, high = _Rendered(ids, read, whole - len(ids)), at
        else:
            low = at + 1
        rate = max(1, whole - len(ids)) / max(1, cut[at])
    if best is None:
        raise ServeError.invalid(
            f"the prompt has {whole} tokens, and its last turn alone more than the {most} that may be kept: shorten "
            "the last message of the user",
            "messages",
            "context_length_exceeded",
        )
    return best


def _characters(value: Any) -> int:
    """Return the number of characters of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0
