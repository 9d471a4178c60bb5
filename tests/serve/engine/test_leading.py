"""Calls without a marker: the first character decides whether a grammar constrains the text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from effort import trials

from exl_core.tokenizer import TextTokenizer
from exl_filters import ExLlamaV2SelectFilter, TriggeredFilter
from exl_filters.testing import filter_laws
from exl_generate import bundled
from exl_serve.config.model import ModelConfig
from exl_serve.engine.jobs import compile_constraints
from exl_serve.engine.leading import LeadingFilter
from exl_serve.stream.channels import OutputFamily
from exl_serve.stream.families.table import FORMATS
from exl_serve.stream.family import ChannelSettings, ToolSpec
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (ToolSpec("get_weather", "", SCHEMA),)


def words(v: Any) -> LeadingFilter:
    calls = ExLlamaV2SelectFilter(None, v, ["yes", " yes", "you"])
    return LeadingFilter(calls, TriggeredFilter(calls, on="the", after="rearm"), "y", v)


@filter_laws(words, profile="quick", examples=trials(10, 4))
def test_contract(law: Callable[[], None]) -> None:
    law()


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_folder(str(bundled.default_model_dir()))


def admits(form: str, tokenizer: TextTokenizer, text: str, parallel: bool = True) -> bool:
    """Whether the constraints of an answer that may call tools allow the text and its end."""
    settings = ChannelSettings(tools=TOOLS, tool_choice="auto", parallel=parallel)
    constraints = OutputFamily(FORMATS[form], {}, lambda i: b"").constraints(settings, None)
    (made,) = compile_constraints(constraints, None, tokenizer)
    made.begin("")
    for token in tokenizer.encode_ids(text):
        if made.ended():
            return False
        allowed, _ = made.next()
        if allowed is not None and token not in allowed:
            return False
        made.feed(token)
    return bool(made.is_complete())


CALLS = {
    "llama3": '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
    "llama4": '[get_weather(city="Oslo")]',
}
OTHERS = {
    "llama3": [
        '{"name": "rm_rf", "parameters": {"town": 5}}',
        '{"name": "get_weather", "parameters": {"city": "longer than six"}}',
        '{"name": "Anna", "age": 5}',
        "{}",
    ],
    "llama4": ["[rm_rf(town=5)]", '[get_weather(city="longer than six")]', "[1, 2]", "[]"],
}


@pytest.mark.parametrize("form", CALLS)
def test_a_text_that_begins_as_a_call_is_one(form: str, tokenizer: TextTokenizer) -> None:
    call = CALLS[form]
    for text in ("", "\n", " \n "):
        assert admits(form, tokenizer, text + call)
        assert not any(admits(form, tokenizer, text + other) for other in OTHERS[form])
    assert not admits(form, tokenizer, " " * 9 + call), "more spaces than the grammar has"
    for text in ("", "It rains.", " \n", f"See: {OTHERS[form][0]}", f"a{OTHERS[form][1]}"):
        assert admits(form, tokenizer, text), text
    marker, end = FORMATS[form].call or ("", "")
    for before in ("", "Let me look. "):
        assert admits(form, tokenizer, before + marker + call + end)
        assert not admits(form, tokenizer, before + marker + OTHERS[form][0])


def test_several_calls(tokenizer: TextTokenizer) -> None:
    call, other = CALLS["llama3"], OTHERS["llama3"][0]
    assert admits("llama3", tokenizer, f"{call}; {call};{call}")
    assert not admits("llama3", tokenizer, f"{call}; {other}")
    assert not admits("llama3", tokenizer, f"{call}; {call}", parallel=False)


@pytest.fixture(params=["llama3", "llama4"])
def asked(request: pytest.FixtureRequest, fable: EngineThread) -> Iterator[Callable[..., dict[str, Any]]]:
    """Ask a hot model that has letters alone, and often begins as a call does: returns its choice."""
    live = LiveServer({"fable": fable}, [ModelConfig(id="fable", path=fable.card.folder, family=request.param)])
    sign = CALLS[request.param][0]
    pieces = enumerate(fable.generator.tokenizer.get_id_to_bytes_list(True))
    letters = {at: piece for at, piece in pieces if len(piece) == 1 and 32 <= piece[0] < 127}
    body: dict[str, Any] = {
        "model": "fable",
        "messages": [{"role": "user", "content": "Call a tool."}],
        "max_tokens": 90,
        "temperature": 3.0,
        "allowed_token_ids": sorted(letters),
        "logit_bias": {at: 24 for at, piece in letters.items() if piece == sign.encode()},
    }

    def ask(**fields: Any) -> dict[str, Any]:
        answer = httpx.post(f"{live.url}/v1/chat/completions", json=body | fields, timeout=600)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        choice["sign"] = sign
        return choice

    yield ask
    live.close()


@pytest.mark.parametrize("strict", [True, False])
def test_calls_over_http_follow_the_schema(asked: Callable[..., dict[str, Any]], strict: bool) -> None:
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": strict}}]
    ends = []
    for seed in range(trials(40, 8)):
        choice = asked(tools=tools, seed=seed)
        calls = choice["message"].get("tool_calls") or []
        assert calls or not choice["message"]["content"].lstrip().startswith(choice["sign"])
        for call in calls:
            assert call["function"]["name"] == "get_weather"
            if choice["finish_reason"] == "tool_calls":
                jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        ends.append(choice["finish_reason"])
    assert "tool_calls" in ends
    assert any(asked(seed=seed)["message"]["content"].startswith(choice["sign"]) for seed in range(8)), "without tools"
