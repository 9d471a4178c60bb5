"""A conversation on its way to the engine, for every API alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exl_serve.api.generation import Generation
from exl_serve.api.http import Call
from exl_serve.api.prepare import Target, engine_request, negative_ids_of, resolve
from exl_serve.errors import ServeError
from exl_serve.request.internal import Constraint, EngineRequest
from exl_serve.request.messages import ImagePart
from exl_serve.stream.family import ChannelSettings, ToolSpec

__all__ = ["Conversation", "Prepared", "prepare"]


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


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversation that is ready to run: the model, the engine request, and the generation."""

    target: Target
    request: EngineRequest
    generation: Generation


async def prepare(call: Call, fields: Mapping[str, Any], asked: Conversation) -> Prepared:
    """Build the engine request of the rendered prompt.

    Raises ServeError for every fault that is known before the first token.
    """
    target = await resolve(call, fields)
    text, family = target.handle.text, target.handle.family
    if asked.images and "image" not in target.engine.card.modalities:
        param = asked.images[0].param
        raise ServeError.invalid(f"{param}: the model {target.name} takes no images", param, "unsupported_modality")
    plain = asked.tools if asked.choice != "none" else None
    prompt, ids = await text.render(asked.messages, plain, asked.variables)
    settings = ChannelSettings(
        tools=asked.specs if asked.choice != "none" else (),
        tool_choice=asked.choice,
        parallel=fields.get("parallel_tool_calls", True),
        starts_in_reasoning=family.starts_in_reasoning(ids, prompt),
        formatted=asked.wanted is not None and asked.choice == "auto",
        contents=() if asked.wanted is None or asked.wanted.kind != "choice" else json.loads(asked.wanted.source),
    )
    constraints = family.constraints(settings, asked.wanted)
    if "reasoning_budget" in fields and not family.forces_call(settings):
        constraints += (family.budget(fields["reasoning_budget"], settings.starts_in_reasoning),)
    forced = family.forced_prefix(settings)
    if forced:
        ids = [*ids, *text.encode(forced, special=True)]
    request = engine_request(
        call,
        target,
        fields,
        ids,
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
    return Prepared(target, request, Generation(target.engine, [request], machines))
