"""Structural tags: free text with regions that follow a schema."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from exl_serve.testing.server import LiveServer

NUMBER = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
# The model's answer begins with "Hello there!".
GREETING: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [
        {"begin": "Hello <a>", "schema": NUMBER, "end": "</a>"},
        {"begin": "Hello <b>", "schema": NUMBER, "end": "</b>"},
    ],
    "triggers": ["Hello"],
}
TOOL = {"type": "function", "function": {"name": "note", "parameters": NUMBER}}


def ask(server: LiveServer, **body: Any) -> httpx.Response:
    asked = {"model": "fable", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "temperature": 0}
    return httpx.post(f"{server.url}/v1/chat/completions", json=asked | body, timeout=120)


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": GREETING},
        {"structured_outputs": {"structural_tag": GREETING}},
        {"structured_outputs": {"structural_tag": json.dumps(GREETING)}},
        {"response_format": GREETING, "tools": [TOOL]},
    ],
)
def test_a_region_after_the_trigger_follows_its_schema(server: LiveServer, body: dict[str, Any]) -> None:
    answer = ask(server, **body)
    assert answer.status_code == 200, answer.text
    content = answer.json()["choices"][0]["message"]["content"]
    found = re.match(r"Hello <([ab])>(\{[^}]*\})</\1>.", content, re.DOTALL)  # free text continues after it
    assert found is not None, content
    assert set(json.loads(found[2])) == {"n"}


def test_without_the_trigger_the_text_is_free(server: LiveServer) -> None:
    other = GREETING | {
        "structures": [{"begin": "<fox>", "schema": NUMBER, "end": "</fox>"}],
        "triggers": ["<fox>"],
    }
    plain, free = ask(server), ask(server, response_format=other)
    assert free.json()["choices"] == plain.json()["choices"]


def test_a_call_that_has_to_come_leaves_no_text_for_tags(server: LiveServer) -> None:
    answer = ask(server, response_format=GREETING, tools=[TOOL], tool_choice="required")
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) == {"n"}


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"triggers": ["<"]}, "structures[0].begin", "invalid_value"),
        ({"triggers": []}, "triggers", "invalid_value"),
        ({"triggers": ["Hello", "Bye"]}, "triggers", "unsupported_parameter"),
        ({"structures": []}, "structures", "invalid_value"),
        ({"structures": [{"begin": "Hello", "schema": []}]}, "structures[0].end", "invalid_value"),
        ({"structures": [{"begin": "Hello", "schema": [], "end": ""}]}, "structures[0].schema", "invalid_value"),
        (
            {"structures": [{"begin": "Hello", "schema": {"not": {}}, "end": "."}]},
            "structures[0].schema",
            "invalid_schema",
        ),
        ({"format": {"type": "json_schema"}}, "format", "unsupported_parameter"),
    ],
)
def test_tags_that_cannot_be_followed_are_named(
    server: LiveServer, change: dict[str, Any], param: str, code: str
) -> None:
    error = ask(server, response_format=GREETING | change).json()["error"]
    assert (error["param"], error["code"]) == (f"response_format.{param}", code), error
