"""Clients of OpenAI's API against a server, with version 3 of openai. Run by test_openai_clients.py with its URL."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import litellm
import openai
from pydantic import BaseModel
from pydantic_ai import Agent, RunContext
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

MODEL = "fable"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY, "strict": True}}]
USAGE: Any = {"include_usage": True}
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]


class Inner(BaseModel):
    """A part of `Report`, by a reference in its schema."""

    kind: Literal["a", "b"]


class Report(BaseModel):
    """A schema with references, an optional value and a list."""

    first: Inner | None
    sunny: bool
    more: list[Inner]


class City(BaseModel):
    """An agent's output."""

    city: str


def raised(call: Callable[[], Any]) -> openai.APIStatusError:
    """The error of a call."""
    try:
        call()
    except openai.APIStatusError as error:
        return error
    raise AssertionError("no error")


def with_openai(url: str) -> None:
    """openai: streamed tool calls, parsed schemas, choices with log-probabilities, responses, errors."""
    client = openai.OpenAI(base_url=url, api_key="x", max_retries=0)
    talk = client.chat.completions
    with talk.stream(
        model=MODEL,
        messages=ASKED,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
        seed=1,
        stream_options=USAGE,
    ) as stream:
        kinds = {event.type for event in stream}
        final: Any = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert final.choices[0].finish_reason == "tool_calls"
    assert set(json.loads(final.choices[0].message.tool_calls[0].function.arguments)) == {"city"}
    assert final.usage.total_tokens > final.usage.prompt_tokens
    assert isinstance(
        talk.parse(model=MODEL, messages=ASKED, response_format=Report, max_tokens=300, seed=2)
        .choices[0]
        .message.parsed,
        Report,
    )
    seen: dict[int, int] = {}
    chunks: Any = talk.create(
        model=MODEL, messages=ASKED, n=3, logprobs=True, top_logprobs=2, max_tokens=6, seed=1, stream=True
    )
    for chunk in chunks:
        (choice,) = chunk.choices
        seen[choice.index] = seen.get(choice.index, 0) + len(choice.logprobs.content if choice.logprobs else [])
    assert set(seen) == {0, 1, 2}
    assert min(seen.values()) >= 1
    with client.responses.stream(model=MODEL, input="Hi", max_output_tokens=10) as events:
        told = [event.type for event in events]
    assert {"response.created", "response.output_text.delta"} <= set(told)
    assert told[-1] in ("response.completed", "response.incomplete")
    missing = raised(lambda: talk.create(model="nope", messages=ASKED))
    assert (type(missing), missing.code) == (openai.NotFoundError, "model_not_found")
    long = raised(lambda: talk.create(model=MODEL, messages=[{"role": "user", "content": "hi " * 3000}]))
    assert (type(long), long.code) == (openai.BadRequestError, "context_length_exceeded")


def with_pydantic_ai(url: str) -> None:
    """pydantic-ai: a text, a typed output, a loop with a tool, and a stream, by chat and by responses."""
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider=OpenAIProvider(base_url=url, api_key="x"))
        assert Agent(model, model_settings={"max_tokens": 40}).run_sync("Hello").output
        typed = Agent(model, output_type=City, retries=5, model_settings={"max_tokens": 300})
        assert isinstance(typed.run_sync("Where is it?").output, City)
        calls: list[int] = []
        looping = Agent(model, model_settings={"max_tokens": 60})

        @looping.tool
        def roll(_: RunContext[None], sides: int, calls: list[int] = calls) -> str:
            """Roll a die."""
            calls.append(sides)
            return "4"

        assert looping.run_sync("Hello").output

        async def streamed(model: Any = model) -> list[str]:
            async with Agent(model, model_settings={"max_tokens": 20}).run_stream("Tell a story") as run:
                return [part async for part in run.stream_text(delta=True, debounce_by=None)]

        assert len(asyncio.run(streamed())) > 2


def with_litellm(url: str) -> None:
    """litellm: as the provider of OpenAI's API and of vLLM, tools in a stream, text completions, an error."""
    litellm.suppress_debug_info = True
    common: dict[str, Any] = {"api_base": url, "api_key": "x", "num_retries": 0}
    for provider in ("openai", "hosted_vllm"):
        given = common | {"model": f"{provider}/{MODEL}", "messages": ASKED}
        assert litellm.completion(max_tokens=5, **given).choices[0].finish_reason in ("length", "stop")
        parts = list(
            litellm.completion(
                max_tokens=400,
                seed=1,
                tools=TOOLS,
                tool_choice="required",
                parallel_tool_calls=False,
                stream=True,
                stream_options=USAGE,
                **given,
            )
        )
        whole = litellm.stream_chunk_builder(parts, messages=ASKED)
        assert whole.choices[0].finish_reason == "tool_calls"
        # As the provider of vLLM it takes additionalProperties out of schemas.
        assert "city" in json.loads(whole.choices[0].message.tool_calls[0].function.arguments)
    text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="Once", max_tokens=4, **common)
    assert text.choices[0].text
    try:
        litellm.completion(model=f"openai/{MODEL}", messages=ASKED, max_tokens=1 << 20, **common)
    except litellm.BadRequestError as error:
        assert "context" in str(error)  # noqa: PT017 - no pytest in this environment
    else:
        raise AssertionError("no error")


if __name__ == "__main__":
    for page in (with_openai, with_pydantic_ai, with_litellm):
        page(sys.argv[1])
        print(page.__name__)
