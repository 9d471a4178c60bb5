"""`return_token_ids`: the ids of prompt and answer, the same streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl_serve.config.model import ModelConfig
from exl_serve.engine.events import Finished, Tokens, Usage
from exl_serve.stream.channels import OutputFamily
from exl_serve.stream.events import Begun, Error
from exl_serve.stream.families.table import FORMATS
from exl_serve.stream.family import ChannelSettings, ToolSpec
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def url(fable: EngineThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    template = tmp_path_factory.mktemp("template") / "think.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{% endif %}<think>\n")
    configs = [
        ModelConfig(id="think", path=fable.card.folder, family="hermes", template=str(template)),
        ModelConfig(id="plain", path=fable.card.folder, family="hermes"),
        ModelConfig(id="harmony", path=fable.card.folder, family="harmony"),
    ]
    live = LiveServer({one.id: fable for one in configs}, configs)
    yield live.url
    live.close()


CASES: list[dict[str, Any]] = [
    {"model": "plain", "max_tokens": 12},
    {"model": "plain", "max_tokens": 12, "n": 2, "stream_interval": 3},
    {"model": "think", "max_tokens": 6},
    {"model": "think", "max_tokens": 6, "reasoning_field": "none"},
    {"model": "think", "max_tokens": 30, "reasoning_budget": 4},
    {"model": "think", "max_tokens": 90, "reasoning_budget": 4, "tools": [TOOL], "tool_choice": "required"},
    {"model": "plain", "max_tokens": 60, "tools": [TOOL], "tool_choice": "required", "logprobs": True},
    {
        "model": "harmony",
        "max_tokens": 90,
        "tools": [TOOL],
        "tool_choice": "required",
        "banned_strings": ["analysis"],
    },
]


def chunks(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = httpx.post(url, json=body | {"stream": True}, timeout=600).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("case", CASES)
def test_a_chat_has_all_its_ids(url: str, case: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hi."}], "seed": 3, "return_token_ids": True} | case
    whole = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).json()
    stream = chunks(f"{url}/v1/chat/completions", body)
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert [one["prompt_token_ids"] for one in stream if "prompt_token_ids" in one] == [whole["prompt_token_ids"]]
    for choice in whole["choices"]:
        own = [one["choices"][0] for one in stream if one["choices"][0]["index"] == choice["index"]]
        assert choice["token_ids"] == [token for one in own for token in one.get("token_ids", [])]
        assert all(one["delta"] or one["finish_reason"] for one in own)
    ids = sum(len(choice["token_ids"]) for choice in whole["choices"])
    stops = sum(choice["finish_reason"] != "length" for choice in whole["choices"])
    assert whole["usage"]["completion_tokens"] - stops <= ids <= whole["usage"]["completion_tokens"]


def test_completions_have_those_of_their_prompts(url: str) -> None:
    body = {"model": "plain", "prompt": ["A", "Once upon"], "n": 2, "max_tokens": 5, "seed": 1} | {
        "return_token_ids": True
    }
    whole = httpx.post(f"{url}/v1/completions", json=body, timeout=600).json()["choices"]
    stream = [one["choices"][0] for one in chunks(f"{url}/v1/completions", body)]
    assert whole[0]["prompt_token_ids"] == whole[1]["prompt_token_ids"] != whole[2]["prompt_token_ids"]
    for choice in whole:
        own = [one for one in stream if one["index"] == choice["index"]]
        assert choice["token_ids"] == [token for one in own for token in one["token_ids"]]
        assert [one["prompt_token_ids"] for one in own if "prompt_token_ids" in one] == [choice["prompt_token_ids"]]


@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    form=st.sampled_from(["hermes", "mistral_args", "qwen3_coder", "llama3", "phi4", "harmony"]),
    reason=st.sampled_from(["stop_token", "length"]),
)
def test_every_token_is_in_one_event(cuts: list[int], form: str, reason: Any) -> None:
    """Texts with calls, broken calls, and reasoning."""
    texts = {
        "hermes": '<think>\nhm\n</think>\n\nSo:\n<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call> x',
        "mistral_args": '[THINK]hm[/THINK]x[TOOL_CALLS]look[ARGS]{"n": 1}[TOOL_CALLS]other[ARGS]{}',
        "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>\n.",
        "llama3": '{"name": "look", "parameters": {"n": 1}}; {"name": "no"}',
        "phi4": '<|tool_call|>[{"name": "look", "arguments": {"n": 1}}]<|/tool_call|>',
        "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.look"
        '<|message|>{"n": 1}<|call|>',
    }
    text, at, number = texts[form], 0, 0
    settings = ChannelSettings(tools=(ToolSpec("look", "", {}),), tool_choice="auto")
    machine = OutputFamily(FORMATS[form], {}, lambda i: b"").machine(0, settings, "r")
    events = []
    for size in [*cuts, len(text)]:
        if at < len(text):
            events += machine.feed(Tokens(0, (number, number + 1), text[at : at + size]))
            at, number = at + size, number + 2
    events += machine.feed(Finished(0, reason, None, Usage(prompt_tokens=1, completion_tokens=1)))
    found: list[int] = []
    for event in events:
        assert not isinstance(event, Begun | Error)
        found += [*event.hidden, *getattr(event, "ids", ())]
    assert found == list(range(number))
