"""Schemas of tools with keywords that no grammar can follow, as MCP servers and zod write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from exl_serve.config.model import ModelConfig, ServeConfig, ServerConfig
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS

CHAT = "/v1/chat/completions"
PATH = {"type": "string", "maxLength": 6}
MORE: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "maxItems": 2, "items": {"type": "boolean"}, "uniqueItems": True},
    "not": {"type": "boolean", "not": {"const": True}},
    "format": {"type": "string", "maxLength": 4, "format": "uri-reference"},
    "pattern": {"type": "string", "maxLength": 4, "pattern": "^(?!x).*$"},
    "propertyNames": {"type": "object", "maxProperties": 0, "propertyNames": {"pattern": "^a"}},
    "contains": {"type": "array", "maxItems": 1, "items": {"type": "null"}, "contains": {"type": "null"}},
    "dependentRequired": {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "additionalProperties": False,
        "dependentRequired": {"a": ["b"]},
    },
    "$schema": {"$schema": "https://json-schema.org/draft-07/schema#", "type": "null"},
    "$dynamicRef": {"$dynamicRef": "#", "type": "null"},
}
"""A schema for each keyword."""


def configured(strict: bool) -> ServeConfig:
    return ServeConfig(server=ServerConfig(strict_fields=strict, allow_request_templates=True))


@pytest.fixture(scope="module")
def servers(fable: EngineThread) -> Iterator[dict[bool, httpx.Client]]:
    """The bundled model with calls in the form of Hermes, by `strict_fields`."""
    model = ModelConfig(id="fable", path=fable.card.folder, family="hermes")
    live = {strict: LiveServer({"fable": fable}, [model], configured(strict)) for strict in (False, True)}
    clients = {strict: httpx.Client(base_url=one.url, timeout=HANG_SECONDS) for strict, one in live.items()}
    yield clients
    for strict, one in live.items():
        clients[strict].close()
        one.close()


def schema_with(more: dict[str, Any], **root: Any) -> dict[str, Any]:
    properties = {"path": PATH, "more": more}
    return {
        "type": "object",
        "properties": properties,
        "required": ["path", "more"],
        "additionalProperties": False,
        **root,
    }


def ask(client: httpx.Client, parameters: Any, **function: Any) -> httpx.Response:
    tool = {"type": "function", "function": {"name": "read", "parameters": parameters, **function}}
    choice = {"type": "function", "function": {"name": "read"}}
    said = [{"role": "user", "content": "Read a."}]
    body = {"model": "fable", "messages": said, "tools": [tool], "tool_choice": choice, "seed": 1, "max_tokens": 80}
    return client.post(CHAT, json=body)


@pytest.mark.parametrize("keyword", MORE)
def test_a_call_follows_the_rest_of_the_schema(servers: dict[bool, httpx.Client], keyword: str) -> None:
    whole = schema_with(MORE[keyword])
    answer = ask(servers[False], whole)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-exl-ignored"] == f"tools[0].function.parameters.properties.more.{keyword}"
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert set(arguments) == {"path", "more"}
    assert len(arguments["path"]) <= 6
    rest = {name: value for name, value in MORE[keyword].items() if name != keyword}
    same = ask(servers[False], schema_with(rest))
    assert "x-exl-ignored" not in same.headers
    strict = ask(servers[False], whole, strict=True)
    assert strict.status_code == 400
    assert strict.json()["error"]["code"] == "invalid_tool_schema"
    refused = ask(servers[True], whole).json()["error"]
    assert refused["code"] == "unknown_parameter"


def test_the_model_sees_the_whole_schema(servers: dict[bool, httpx.Client]) -> None:
    schema = schema_with(MORE["uniqueItems"])
    tool = {"type": "function", "function": {"name": "read", "parameters": schema}}
    body = {"messages": [{"role": "user", "content": "Read a."}], "tools": [tool]}
    answer = servers[False].post("/apply-template", json=body | {"chat_template": "{{ tools | tojson }}"})
    assert answer.status_code == 200, answer.text
    (shown,) = json.loads(answer.json()["prompt"])
    assert shown["function"]["parameters"] == schema


@pytest.mark.parametrize(
    "more",
    [
        {"type": "object", "maxProperties": 0, "propertyNames": {"type": "string"}},  # of zod's records
        {"type": "array", "maxItems": 0, "uniqueItems": False},
        {"type": "integer", "maximum": 9, "minimum": 0, "format": "int64"},
        {"const": {"not": {}, "uniqueItems": True}},
    ],
)
def test_keywords_that_forbid_nothing_are_not_named(servers: dict[bool, httpx.Client], more: dict[str, Any]) -> None:
    answer = ask(servers[True], schema_with(more))
    assert answer.status_code == 200, answer.text
    assert "x-exl-ignored" not in answer.headers


def test_keywords_are_found_at_every_level(servers: dict[bool, httpx.Client]) -> None:
    unique = {"type": "array", "uniqueItems": True, "maxItems": 0}
    more = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/not"}]}
    answer = ask(servers[False], schema_with(more, **{"$defs": {"not": unique}, "if": {}, "then": {"not": {}}}))
    assert answer.status_code == 200, answer.text
    inside = "tools[0].function.parameters"
    assert answer.headers["x-exl-ignored"].split(",") == [
        f"{inside}.$defs.not.uniqueItems",
        f"{inside}.if",
        f"{inside}.then",
    ]
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["more"] in (None, [])


def test_a_name_that_is_a_keyword_stays(servers: dict[bool, httpx.Client]) -> None:
    schema = {"type": "object", "properties": {"not": {"type": "boolean"}}, "required": ["not"]}
    answer = ask(servers[True], schema | {"additionalProperties": False})
    assert answer.status_code == 200, answer.text
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) == {"not"}


@pytest.mark.parametrize("draft", ["http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema"])
def test_keywords_of_other_drafts_are_treated_alike(servers: dict[bool, httpx.Client], draft: str) -> None:
    whole = schema_with(MORE["dependentRequired"], **{"$schema": draft})
    answer = ask(servers[False], whole)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-exl-ignored"] == "tools[0].function.parameters.properties.more.dependentRequired"
    strict = ask(servers[False], whole, strict=True)
    assert strict.status_code == 400
    assert strict.json()["error"]["code"] == "invalid_tool_schema"


def schema_of_kind(kind: Any, size: Any) -> dict[str, Any]:
    members = {"kind": kind, "size": size}
    return {"type": "object", "properties": members, "required": ["kind"], "additionalProperties": False}


FLAG = {"type": "boolean"}
A, B = schema_of_kind({"const": "a"}, FLAG), schema_of_kind({"enum": ["b", "c"]}, {"type": "null"})
UNIONS: dict[str, tuple[bool, dict[str, Any]]] = {
    "texts": (False, {"oneOf": [A, B]}),
    "references": (False, {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "discriminator": {}}),
    "numbers": (False, {"oneOf": [schema_of_kind({"const": 1}, FLAG), schema_of_kind({"const": 2}, FLAG)]}),
    "types": (False, {"oneOf": [{"type": ["boolean", "null"]}, {"type": "array", "maxItems": 0}]}),
    "constants": (False, {"oneOf": [{"const": "a"}, {"enum": ["b", 1]}, {"const": True}, {"const": {"kind": "a"}}, B]}),
    "unions in it": (False, {"oneOf": [{"anyOf": [A, {"type": "null"}]}, {"allOf": [B]}]}),
    "members that one forbids": (
        False,
        {
            "type": "object",
            "oneOf": [{"properties": {"a": FLAG}, "additionalProperties": False}, {"required": ["kind"]}],
        },
    ),
    "integers and numbers": (True, {"oneOf": [{"type": "integer", "maximum": 9}, {"enum": [1.0, 0.5]}]}),
    "equal constants": (True, {"oneOf": [{"const": 1}, {"const": 1.0}]}),
    "one of two members": (
        True,
        {
            "type": "object",
            "properties": {"kind": {"const": "a"}, "size": FLAG},
            "additionalProperties": False,
            "oneOf": [{"required": ["kind"]}, {"required": ["size"]}],
        },
    ),
    "beside anyOf": (True, {"anyOf": [A, {"type": "null"}], "oneOf": [{"type": "object"}, {"required": ["kind"]}]}),
}
"""Whether a value might match two branches, and a schema."""


@pytest.mark.parametrize("name", UNIONS)
def test_branches_of_a_union_that_may_overlap_are_followed_as_any_of_them(
    servers: dict[bool, httpx.Client], name: str
) -> None:
    overlap, union = UNIONS[name]
    whole = schema_with(union, **{"$defs": {"a": A, "b": B}})
    answer = ask(servers[False], whole)
    assert answer.status_code == 200, answer.text
    named = ["tools[0].function.parameters.properties.more.oneOf"] if overlap else []
    assert [one for one in answer.headers.get("x-exl-ignored", "").split(",") if one] == named
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    value = json.loads(call["function"]["arguments"])["more"]
    some = jsonschema.Draft202012Validator(union | {"$defs": whole["$defs"]} if not overlap else any_of(whole, union))
    assert some.is_valid(value)


def test_schemas_that_refer_to_themselves_may_overlap(servers: dict[bool, httpx.Client]) -> None:
    loop = {"type": "object", "properties": {"next": {"$ref": "#/$defs/loop"}}, "required": ["next"]}
    twice = {"oneOf": [{"$ref": "#/$defs/loop"}, {"allOf": [{"$ref": "#/$defs/loop"}]}]}
    answer = ask(servers[False], schema_with(twice, **{"$defs": {"loop": loop}}))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-exl-ignored"] == "tools[0].function.parameters.properties.more.oneOf"


def any_of(whole: dict[str, Any], union: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in union.items() if name != "oneOf"}
    return {"allOf": [rest, {"anyOf": union["oneOf"]}], "$defs": whole["$defs"]}


def test_unions_that_are_enforced_are_not_named_and_others_are_rejected_by_strict_tools(
    servers: dict[bool, httpx.Client],
) -> None:
    enforced = []
    for name, (overlap, union) in UNIONS.items():
        whole = schema_with(union, **{"$defs": {"a": A, "b": B}})
        if ask(servers[False], whole, strict=True).status_code == 200:
            enforced.append(name)
            assert not overlap
    assert {"texts", "types", "unions in it"} <= set(enforced)


def test_names_of_members_that_look_around_are_not_followed(servers: dict[bool, httpx.Client]) -> None:
    names = {"^(?!x)": {"type": "integer"}, "^x$": FLAG}
    more = {"type": "object", "maxProperties": 1, "patternProperties": names, "additionalProperties": False}
    whole = schema_with(more)
    answer = ask(servers[False], whole)
    assert answer.status_code == 200, answer.text
    inside = "tools[0].function.parameters.properties.more"
    ignored = answer.headers["x-exl-ignored"].split(",")
    assert ignored == [f"{inside}.patternProperties"[:64], f"{inside}.additionalProperties"[:64]]
    assert ask(servers[False], whole, strict=True).json()["error"]["code"] == "invalid_tool_schema"


def test_functions_of_2023_are_treated_alike(servers: dict[bool, httpx.Client]) -> None:
    body = {
        "model": "fable",
        "messages": [{"role": "user", "content": "Read a."}],
        "functions": [{"name": "read", "parameters": schema_with(MORE["uniqueItems"])}],
        "max_tokens": 8,
    }
    answer = servers[False].post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-exl-ignored"] == "functions[0].parameters.properties.more.uniqueItems"
