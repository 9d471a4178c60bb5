"""Run the examples of other libraries' documentation against a server: `python client_pages.py URL`.

Run in an environment that holds these libraries and nothing of this project. The model is small and mostly answers that
it does not know; what counts is that every call is made, streamed and read.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import instructor
import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

MODEL = "fable"


class UserInfo(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


class GetWeather(BaseModel):
    """Get the current weather in a given location."""

    location: str = Field(max_length=8)


def with_instructor(url: str) -> None:
    """Structured outputs: by tool call, by JSON schema, streamed, by responses."""
    said: list[Any] = [{"role": "user", "content": "John Doe is 30 years old."}]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="x"), mode=mode)
        asked: dict[str, Any] = {"model": MODEL, "messages": said, "max_tokens": 200, "max_retries": 1}
        assert isinstance(client.chat.completions.create(response_model=UserInfo, **asked), UserInfo)
    *_, last = client.chat.completions.create_partial(response_model=UserInfo, **asked)
    assert last.age is not None
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="x"), mode=instructor.Mode.RESPONSES_TOOLS)
    made = client.responses.create(
        model=MODEL, response_model=UserInfo, input="John Doe is 30.", max_output_tokens=200, max_retries=1
    )
    assert isinstance(made, UserInfo)


def with_langchain(url: str) -> None:
    """Invocation, streaming with usage, batches, tools, structured output, log-probabilities, responses."""

    def model(**more: Any) -> ChatOpenAI:
        return ChatOpenAI(
            **{"model": MODEL, "base_url": url, "api_key": "x", "max_retries": 0, "max_tokens": 200} | more
        )

    llm = model(max_tokens=30)
    said = [("system", "You are a helpful assistant."), ("human", "I love programming.")]
    assert llm.invoke(said).content
    chunks = list(llm.stream(said, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks)
    assert any(chunk.usage_metadata for chunk in chunks)
    assert len(asyncio.run(model(max_tokens=30).abatch(["one", "two", "three"]))) == 3
    bound = model().bind_tools([GetWeather], tool_choice="required", parallel_tool_calls=False)
    called = bound.invoke("What is the weather in Oslo?")
    assert [call["name"] for call in called.tool_calls] == ["GetWeather"]
    for method in ("json_schema", "function_calling"):
        assert isinstance(model().with_structured_output(UserInfo, method=method).invoke("John is 30."), UserInfo)
    assert llm.bind(logprobs=True).invoke("How are you?").response_metadata["logprobs"]["content"]
    responses = model(max_tokens=20, use_responses_api=True)
    assert responses.invoke("Hi").content
    assert len(list(responses.stream("Hi"))) > 1


def with_llama_index(url: str) -> None:
    """OpenAILike: completion, chat, streaming, asynchronous, text completions, tools."""

    def model(**more: Any) -> OpenAILike:
        known = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 1024, "max_tokens": 30}
        return OpenAILike(**{"model": MODEL, "api_base": url, "api_key": "x", "max_retries": 0} | known | more)

    said = [ChatMessage(role="system", content="You are a pirate."), ChatMessage(role="user", content="Your name?")]
    assert str(model().complete("Paul Graham is "))
    assert str(model().chat(said))
    assert "".join(part.delta or "" for part in model().stream_chat(said))
    assert str(asyncio.run(model().achat(said)))
    assert str(model(is_chat_model=False).complete("Once"))

    def multiply(a: int, b: int) -> int:
        """Multiply two integers."""
        return a * b

    llm = model(max_tokens=300)
    tools = [FunctionTool.from_defaults(fn=multiply)]
    answer = llm.chat_with_tools(tools, user_msg="What is 2 * 3?", tool_required=True)
    assert [call.tool_name for call in llm.get_tool_calls_from_response(answer)] == ["multiply"]


def with_agents(url: str) -> None:
    """openai-agents: a loop of two steps with a tool, by responses and by chat, and a streamed run."""

    @function_tool
    def get_weather(day: int) -> str:
        """The weather of a day."""
        return "sunny"

    async def run() -> None:
        client = openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0)
        for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
            model = kind(MODEL, client)
            must = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=100)
            agent = Agent(name="a", instructions="Be short.", tools=[get_weather], model=model, model_settings=must)
            result = await Runner.run(agent, "What is the weather?", max_turns=4)
            kinds = [type(item).__name__ for item in result.new_items]
            assert kinds[:2] == ["ToolCallItem", "ToolCallOutputItem"], kinds
            assert result.final_output
            talk = Agent(name="b", model=model, model_settings=ModelSettings(max_tokens=20))
            streamed = Runner.run_streamed(talk, "Hello")
            assert len([event async for event in streamed.stream_events()]) > 3
            assert streamed.final_output

    asyncio.run(run())


if __name__ == "__main__":
    for page in (with_instructor, with_langchain, with_llama_index, with_agents):
        page(sys.argv[1])
        print(page.__name__)
