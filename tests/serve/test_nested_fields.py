"""Members of a request's objects: read, named in a header, or refused with their path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl_serve.config.model import ModelConfig, ServeConfig, ServerConfig
from exl_serve.request.nested import MOST, unknown_members
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS

SAY = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "foo": 1}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "response": {"type": "string"}}}
NAMED = {"type": "function", "function": {"name": "f"}}


def chat(**more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": SAY, "max_tokens": 1} | more


def response(**more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": "x", "max_output_tokens": 1} | more


def shape(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}} | more}


def part(**more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "x"} | more]}]


READ: list[tuple[str, dict[str, Any]]] = [
    chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": None, "foo": None}),
    chat(response_format=shape(strict=True, description="A number.")),
    chat(messages=[{"role": "assistant", "content": "x", "audio": None, "foo": 1}, *SAY]),  # the template gets it
    chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}}, max_tokens=40),
    chat(tools=[TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}),
    response(reasoning={"effort": None}, text={"format": {"type": "text"}, "verbosity": None}),
    response(
        input=[
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "x", "annotations": [], "logprobs": []}],
            },
            CALL | {"id": "fc_1", "status": "completed"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
            *SAY,
        ]
    ),
]
UNREAD: list[tuple[tuple[str, dict[str, Any]], str]] = [
    (chat(stream=True, stream_options={"foo": 1}), "stream_options.foo"),
    (chat(response_format={"type": "json_object", "schema": {}}), "response_format.schema"),
    (chat(response_format=shape(foo=1)), "response_format.json_schema.foo"),
    (chat(messages=part(foo=1)), "messages[0].content[0].foo"),
    (chat(tools=[TOOL | {"foo": 1}], tool_choice="none"), "tools[0].foo"),
    (chat(tools=[TOOL], tool_choice={"type": "function", "name": "f", "foo": 1}, max_tokens=40), "tool_choice.foo"),
    (
        chat(
            tools=[TOOL],
            tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED | {"foo": 1}]}},
        ),
        "tool_choice.allowed_tools.tools[0].foo",
    ),
    (
        chat(
            tools=[TOOL],
            tool_choice={
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f", "foo": 1}}]},
            },
        ),
        "tool_choice.allowed_tools.tools[0].function.foo",
    ),
    (chat(tools=[TOOL], tool_choice=NAMED | {"name": "g"}, max_tokens=40), "tool_choice.name"),
    (("/reset_prefix_cache?reset_running_requests=true", {}), "reset_running_requests"),
    (response(reasoning={"foo": 1}), "reasoning.foo"),
    (response(text={"format": {"type": "text", "foo": 1}}), "text.format.foo"),
    (response(input=[*SAY, {"role": "user", "content": "x", "foo": 1}]), "input[1].foo"),
    (response(tools=[{"type": "function", "name": "f", "foo": 1}], tool_choice="none"), "tools[0].foo"),
]
REFUSED: list[tuple[tuple[str, dict[str, Any]], str]] = [
    (chat(response_format=shape(name=5)), "response_format.json_schema.name"),
    (chat(response_format=shape(strict="x")), "response_format.json_schema.strict"),
    (chat(tools=[{"type": "function", "function": {"name": "f", "strict": "yes"}}]), "tools[0].function.strict"),
    (chat(tools=[{"type": "function", "function": {"name": "f", "description": 1}}]), "tools[0].function.description"),
    (chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
    (chat(tools=[TOOL], functions=[TOOL["function"]]), "functions"),
    (chat(tools=[TOOL], tool_choice="auto", function_call="auto"), "function_call"),
    (("/tokenize", {"prompt": "x", "messages": SAY}), "messages"),
    (("/tokenize", {"prompt": "x", "content": "y"}), "content"),
]


@pytest.fixture(scope="module")
def servers(fable: EngineThread) -> Iterator[dict[bool, httpx.Client]]:
    """By `strict_fields`."""
    model = ModelConfig(id="fable", path=fable.card.folder, family="hermes")
    configs = {strict: ServeConfig(server=ServerConfig(strict_fields=strict)) for strict in (False, True)}
    live = {strict: LiveServer({"fable": fable}, [model], config) for strict, config in configs.items()}
    clients = {strict: httpx.Client(base_url=one.url, timeout=HANG_SECONDS) for strict, one in live.items()}
    yield clients
    for strict, one in live.items():
        clients[strict].close()
        one.close()


@pytest.mark.parametrize("asked", READ)
def test_members_that_are_read_are_not_named(
    servers: dict[bool, httpx.Client], asked: tuple[str, dict[str, Any]]
) -> None:
    for client in servers.values():
        answer = client.post(asked[0], json=asked[1])
        assert answer.status_code == 200, answer.text
        assert "x-exl-ignored" not in answer.headers


@pytest.mark.parametrize(("asked", "path"), UNREAD)
def test_members_that_are_not_read_are_named(
    servers: dict[bool, httpx.Client], asked: tuple[str, dict[str, Any]], path: str
) -> None:
    answer = servers[False].post(asked[0], json=asked[1])
    assert (answer.status_code, answer.headers.get("x-exl-ignored")) == (200, path), answer.text
    error = servers[True].post(asked[0], json=asked[1]).json()["error"]
    assert (error["code"], error["param"]) == ("unknown_parameter", path)


@pytest.mark.parametrize(("asked", "path"), REFUSED)
def test_members_of_another_kind_are_refused(
    servers: dict[bool, httpx.Client], asked: tuple[str, dict[str, Any]], path: str
) -> None:
    for client in servers.values():
        answer = client.post(asked[0], json=asked[1])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, path), answer.text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "format", "content", "function", "structures", "x"]), inner)
    ),
    max_leaves=12,
)
FIELDS = ("stream_options", "response_format", "text", "tools", "tool_choice", "messages", "input", "reasoning")


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_objects_of_any_shape_are_no_error(body: dict[str, Any]) -> None:
    found = unknown_members(body)
    assert len(found) <= MOST
    assert all(path.partition(".")[0].partition("[")[0] in body for path in found)
