"""Variables of chat templates, the role developer, and results of calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from exl_serve.config.model import ModelConfig, ServeConfig, ServerConfig
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS

KNOWING = (
    "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
    "{{ reasoning_effort or '' }}{{ verbosity or '' }}"
    "{% for m in messages %}{% if m.role == 'developer' %}# Developer: {% endif %}<|{{ m.role }}|>"
    "{{ m.content }}<|end|>{% endfor %}{% for tag in tags or [] %}{{ tag }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SAY = [{"role": "user", "content": "x"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture(scope="module")
def servers(fable: EngineThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, httpx.Client]]:
    """The bundled model, also with a template that has variables, by `strict_fields`."""
    file = tmp_path_factory.mktemp("templates") / "knowing.jinja"
    file.write_text(KNOWING)
    plain = ModelConfig(id="fable", path=fable.card.folder)
    knowing = ModelConfig(**msgspec.structs.asdict(plain) | {"id": "knowing", "template": str(file)})
    configs = {strict: ServeConfig(server=ServerConfig(strict_fields=strict)) for strict in (False, True)}
    live = {
        strict: LiveServer({"fable": fable, "knowing": fable}, [plain, knowing], config)
        for strict, config in configs.items()
    }
    clients = {strict: httpx.Client(base_url=one.url, timeout=HANG_SECONDS) for strict, one in live.items()}
    yield clients
    for strict, one in live.items():
        clients[strict].close()
        one.close()


def ask(client: httpx.Client, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    body = {"model": "fable", "messages": SAY, "max_tokens": 1} | fields
    # httpx's own writer has no lone surrogates.
    return client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"enable_thinking": False}, "enable_thinking"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"chat_template_kwargs": {"tags": ["a"]}}, "tags"),
    ],
)
def test_a_variable_that_the_template_lacks(
    servers: dict[bool, httpx.Client], sent: dict[str, Any], param: str
) -> None:
    refused = ask(servers[True], **sent)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", param)
    for taken in (ask(servers[False], **sent), ask(servers[True], model="knowing", **sent)):
        assert taken.status_code == 200, taken.text


def test_the_effort_of_a_response_has_its_own_name(servers: dict[bool, httpx.Client]) -> None:
    body = {"input": "x", "max_output_tokens": 1, "reasoning": {"effort": "low"}}
    answers = {name: servers[True].post("/v1/responses", json=body | {"model": name}) for name in ("fable", "knowing")}
    assert answers["knowing"].status_code == 200, answers["knowing"].text
    assert answers["fable"].json()["error"]["param"] == "reasoning.effort"


def test_verbosity_is_a_variable_except_medium(servers: dict[bool, httpx.Client]) -> None:
    for given, shown in (("high", "high"), ("low", "low"), ("medium", ""), (None, "")):
        prompt = ask(servers[False], "/apply-template", model="knowing", verbosity=given).json()["prompt"]
        assert prompt == f"{shown}<|user|>x<|end|><|assistant|>"
    body = {"input": "x", "max_output_tokens": 1, "text": {"verbosity": "low"}}
    answers = {name: servers[True].post("/v1/responses", json=body | {"model": name}) for name in ("fable", "knowing")}
    assert answers["knowing"].status_code == 200, answers["knowing"].text
    assert answers["fable"].json()["error"]["param"] == "text.verbosity"


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"reasoning_effort": {"a": [1]}}, "reasoning_effort"),
        ({"reasoning_effort": "\ud800"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"a": {"b": {"c": 1}}}}, "chat_template_kwargs.a"),
        ({"chat_template_kwargs": {"a": [1, {"b": 1}]}}, "chat_template_kwargs.a[1]"),
        ({"chat_template_kwargs": {"a": ["x", "\udc00"]}}, "chat_template_kwargs.a[1]"),
    ],
)
def test_variables_are_scalars_or_lists(servers: dict[bool, httpx.Client], sent: dict[str, Any], param: str) -> None:
    for path in ("/v1/chat/completions", "/tokenize", "/apply-template"):
        answer = ask(servers[False], path, **sent)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_lists_and_scalars_reach_the_template(servers: dict[bool, httpx.Client]) -> None:
    sent = {"enable_thinking": True, "chat_template_kwargs": {"tags": ["a", 1, [2.5, None]]}}
    prompt = ask(servers[False], "/apply-template", model="knowing", **sent).json()["prompt"]
    assert prompt == "[True]<|user|>x<|end|>a1[2.5, None]<|assistant|>"


def test_a_template_that_knows_the_role_developer_gets_it(servers: dict[bool, httpx.Client]) -> None:
    said = [{"role": "developer", "content": "Be brief."}, *SAY]
    prompts = {
        name: ask(servers[False], "/apply-template", model=name, messages=said).json()["prompt"]
        for name in ("fable", "knowing")
    }
    as_system = ask(servers[False], "/apply-template", messages=[said[0] | {"role": "system"}, *SAY]).json()["prompt"]
    assert prompts["fable"] == as_system
    assert prompts["knowing"] == "# Developer: <|developer|>Be brief.<|end|><|user|>x<|end|><|assistant|>"
    chat = ask(servers[False], model="knowing", messages=said).json()["usage"]["prompt_tokens"]
    body = {"model": "knowing", "input": said, "max_output_tokens": 1}
    answer = servers[False].post("/v1/responses", json=body).json()
    assert answer["usage"]["input_tokens"] == chat


def test_a_result_of_no_call(servers: dict[bool, httpx.Client]) -> None:
    result = {"role": "tool", "tool_call_id": "c", "content": "1"}
    called = [*SAY, {"role": "assistant", "content": "", "tool_calls": [CALL]}, result]
    for client in servers.values():
        assert ask(client, messages=called).status_code == 200
    other = [*called[:-1], result | {"tool_call_id": "zzz"}]
    assert ask(servers[False], messages=other).status_code == 200
    error = ask(servers[True], messages=other).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_messages", "messages[2].tool_call_id")
