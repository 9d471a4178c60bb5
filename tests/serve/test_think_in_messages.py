"""A message that spells the marker of reasoning opens none: formats hold, and the answer is content."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from exl_generate import bundled
from exl_serve.config.model import ModelConfig, ServeConfig, ServerConfig
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer

FABLE = ModelConfig(id="fable", path=str(bundled.default_model_dir()), device="cpu", max_batch_size=8, family="hermes")
ASKED = {"role": "user", "content": "Yes or no?"}
CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": '{"at": "<think>"}'}}
FUNCTION = {"name": "look", "description": "After <think> comes a thought", "parameters": {"type": "object"}}
MESSAGES: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": "What is <think>?"}],
    "the end of user": [{"role": "user", "content": "What is <think>"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": one} for one in ("What is <thi", "nk>?")]}],
    "system": [{"role": "system", "content": "Never write <think>."}, ASKED],
    "assistant": [ASKED, {"role": "assistant", "content": "<think>"}, ASKED],
    "call": [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, ASKED],
    "tool": [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call00000", "content": "A page about <think>."},
    ],
}

OPENS = "{% for one in messages %}{{ one.content }}\n{% endfor %}<think>\n"


@pytest.fixture(scope="module")
def http(fable: EngineThread) -> Iterator[httpx.Client]:
    live = LiveServer({"fable": fable}, [FABLE], ServeConfig(server=ServerConfig(allow_request_templates=True)))
    with httpx.Client(base_url=live.url, timeout=240) as client:
        yield client
    live.close()


def answered(http: httpx.Client, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"model": "fable", "messages": messages, "seed": 1, "max_tokens": 12, **fields}
    found = http.post("/v1/chat/completions", json=body)
    assert found.status_code == 200, found.text
    message: dict[str, Any] = found.json()["choices"][0]["message"]
    return message


@pytest.mark.parametrize("role", MESSAGES)
def test_a_format_holds(http: httpx.Client, role: str) -> None:
    message = answered(http, MESSAGES[role], guided_choice=["yes", "no"])
    assert message["content"] in ("yes", "no")
    assert not message.get("reasoning_content")


def test_a_forced_call_is_made(http: httpx.Client) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    message = answered(http, MESSAGES["user"], tools=tools, tool_choice="required", max_tokens=100)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["look"]


def test_a_response_has_its_format(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "a", "schema": schema | {"additionalProperties": False}, "strict": True}
    body = {"model": "fable", "input": "What is <think>?", "max_output_tokens": 40, "text": {"format": form}}
    found = http.post("/v1/responses", json=body)
    assert found.status_code == 200, found.text
    (item,) = found.json()["output"]
    assert json.loads(item["content"][0]["text"])["a"] in ("yes", "no")


def test_a_message_that_is_continued_opens_reasoning(http: httpx.Client) -> None:
    begun = [
        {"role": "system", "content": "Never write <think>."},
        ASKED,
        {"role": "assistant", "content": "<think>So"},
    ]
    message = answered(http, begun, continue_final_message=True)
    assert message["reasoning_content"]
    assert not message["content"]


def test_a_template_opens_reasoning_whatever_messages_spell(http: httpx.Client) -> None:
    for said in ("What is <think>?", "What is </think>?", "Why?"):
        message = answered(http, [{"role": "user", "content": said}], chat_template=OPENS)
        assert message["reasoning_content"], said
        assert not message["content"], said
