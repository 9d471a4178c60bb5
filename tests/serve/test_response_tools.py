"""Tools of responses besides plain functions: namespaces, and tools that run at OpenAI."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from exl_serve.config.model import ModelConfig, ServeConfig, ServerConfig
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS

SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string", "maxLength": 6}},
    "required": ["path"],
    "additionalProperties": False,
}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": "Reads.", "strict": False, "parameters": SCHEMA, **more}


FILES = {"type": "namespace", "name": "mcp__files__", "description": "Files.", "tools": [function("read")]}
SEARCH = {"type": "web_search", "external_web_access": False}
IMAGES = {"type": "image_generation", "output_format": "png"}


@pytest.fixture(scope="module")
def servers(fable: EngineThread) -> Iterator[dict[bool, httpx.Client]]:
    """The bundled model with calls in the form of Hermes, by `strict_fields`."""
    model = ModelConfig(id="fable", path=fable.card.folder, family="hermes")
    live = {
        strict: LiveServer({"fable": fable}, [model], ServeConfig(server=ServerConfig(strict_fields=strict)))
        for strict in (False, True)
    }
    clients = {strict: httpx.Client(base_url=one.url, timeout=HANG_SECONDS) for strict, one in live.items()}
    yield clients
    for strict, one in live.items():
        clients[strict].close()
        one.close()


def ask(client: httpx.Client, path: str = "/v1/responses", **fields: Any) -> httpx.Response:
    body = {"model": "fable", "input": "Read a.", "seed": 1} | fields
    return client.post(path, json=body)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("namespace", "called"), [("mcp__files__", "mcp__files__read"), ("crm", "crm__read"), ("a__b", "a__b__read")]
)
def test_a_call_of_a_namespace_names_both(servers: dict[bool, httpx.Client], namespace: str, called: str) -> None:
    asked: dict[str, Any] = {"tools": [FILES | {"name": namespace}, function("list")], "max_output_tokens": 60}
    asked |= {"tool_choice": {"type": "function", "name": called}}
    whole = ask(servers[False], **asked).json()
    (call,) = whole["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "read", namespace)
    assert set(json.loads(call["arguments"])) == {"path"}
    assert [tool["name"] for tool in whole["tools"]] == [namespace, "list"]
    events = events_of(ask(servers[False], stream=True, **asked))
    items = [event["item"] for event in events if event["type"].startswith("response.output_item")]
    assert [(item["name"], item["namespace"]) for item in items] == [("read", namespace)] * 2
    (done,) = (event for event in events if event["type"] == "response.function_call_arguments.done")
    assert (done["name"], done["arguments"]) == ("read", call["arguments"])


def test_a_function_outside_of_namespaces_has_none(servers: dict[bool, httpx.Client]) -> None:
    choice = {"type": "function", "name": "list"}
    answer = ask(servers[False], tools=[FILES, function("list")], tool_choice=choice, max_output_tokens=60).json()
    assert answer["output"][0]["name"] == "list"
    assert "namespace" not in answer["output"][0]


def test_a_prompt_with_a_namespace_is_that_of_its_functions(servers: dict[bool, httpx.Client]) -> None:
    call = {"type": "function_call", "call_id": "c", "arguments": '{"path": "a"}'}
    rest = [{"type": "function_call_output", "call_id": "c", "output": "text"}]
    said = [{"role": "user", "content": "Read a."}]
    counts = [
        ask(servers[False], "/v1/responses/input_tokens", tools=tools, input=[*said, call | named, *rest]).json()
        for tools, named in (
            ([FILES], {"name": "read", "namespace": "mcp__files__"}),
            ([function("mcp__files__read")], {"name": "mcp__files__read"}),
        )
    ]
    assert counts[0]["input_tokens"] == counts[1]["input_tokens"]


def test_tools_that_run_at_openai_are_left_out_and_named(servers: dict[bool, httpx.Client]) -> None:
    functions, tools = [function("list"), function("read")], [function("list"), SEARCH, IMAGES, function("read")]
    with_them = ask(servers[False], tools=tools, max_output_tokens=8)
    without = ask(servers[False], tools=functions, max_output_tokens=8)
    assert with_them.headers["x-exl-ignored"] == "tools[1],tools[2]"
    assert "x-exl-ignored" not in without.headers
    for key in ("tools", "tool_choice"):
        assert with_them.json()[key] == without.json()[key]
    assert with_them.json()["usage"]["input_tokens"] == without.json()["usage"]["input_tokens"]
    error = ask(servers[True], tools=tools).json()["error"]
    assert (error["code"], error["param"]) == ("unknown_parameter", "tools[1]")


@pytest.mark.parametrize(
    ("tools", "more", "param"),
    [
        ([SEARCH], {}, "tools[0].type"),
        ([function("list"), {"type": "file_search", "vector_store_ids": ["v"]}], {}, "tools[1].type"),
        ([function("list"), {"type": "custom", "name": "x"}], {}, "tools[1].type"),
        ([function("list"), SEARCH], {"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ([function("list"), FILES | {"tools": []}], {}, "tools[1].tools"),
        ([FILES | {"name": ""}], {}, "tools[0].name"),
        ([FILES | {"tools": [function("read"), {"type": "custom", "name": "x"}]}], {}, "tools[0].tools[1].type"),
        ([FILES | {"tools": [FILES]}], {}, "tools[0].tools[0].type"),
        ([FILES | {"tools": [function("read", strict=1)]}], {}, "tools[0].tools[0].strict"),
        ([SEARCH, function("list"), function("x", parameters={"type": "no"})], {}, "tools[2].parameters"),
        ([FILES | {"tools": [function("x", parameters=[])]}], {}, "tools[0].tools[0].parameters"),
        ([FILES, function("mcp__files__read")], {}, "tools[1].name"),
        ([{"type": ["web_search"]}], {}, "tools[0].type"),
    ],
)
def test_other_tools_are_refused_where_they_are(
    servers: dict[bool, httpx.Client], tools: list[Any], more: dict[str, Any], param: str
) -> None:
    refused = ask(servers[False], tools=tools, **more)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param
