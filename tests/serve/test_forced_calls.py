"""Answers that must be calls: one or several, after reasoning that stays free."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from grammar_texts import LOOK, takes

from exl_core.tokenizer import TextTokenizer
from exl_generate import bundled
from exl_serve.config.model import ModelConfig
from exl_serve.engine.jobs import compile_constraints
from exl_serve.stream.channels import OutputFamily
from exl_serve.stream.families.table import FORMATS
from exl_serve.stream.family import ChannelSettings
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer

#: two calls of `look`, as each format writes them after the first region's opening marker
TWO = {
    "hermes": '\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>\n<tool_call>\n'
    '{"name": "look", "arguments": {"n": 2}}\n</tool_call>',
    "qwen3_coder": "\n<function=look>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
    "<function=look>\n<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>",
    "glm": "look\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n<tool_call>"
    "look\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "llama3": '{"name": "look", "parameters": {"n": 1}}; {"name": "look", "parameters": {"n": 2}}',
    "llama4": "[look(n=1), look(n=2)]",
    "gemma3": "\nlook(n=1)\nlook(n=2)\n```",
    "deepseek_v31": '<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜>'
    '<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"n": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "mistral_args": 'look[ARGS]{"n": 1}[TOOL_CALLS]look[ARGS]{"n": 2}',
    "mistral": '[{"name": "look", "arguments": {"n": 1}}, {"name": "look", "arguments": {"n": 2}}]',
    "command": '[{"tool_name": "look", "parameters": {"n": 1}}, {"tool_name": "look", "parameters": {"n": 2}}]',
    "phi4": '[{"name": "look", "arguments": {"n": 1}}, {"name": "look", "arguments": {"n": 2}}]',
}


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_folder(str(bundled.default_model_dir()))


def admits(form: str, tokenizer: TextTokenizer, text: str, choice: str = "required", **settings: Any) -> bool:
    asked = ChannelSettings(tools=(LOOK,), tool_choice=choice, **settings)
    constraints = OutputFamily(FORMATS[form], {}, lambda i: b"").constraints(asked, None)
    (made,) = compile_constraints(constraints, None, tokenizer)
    return takes(made, tokenizer, text)


@pytest.mark.parametrize("form", TWO)
def test_one_call_or_several(form: str, tokenizer: TextTokenizer) -> None:
    assert admits(form, tokenizer, TWO[form])
    assert not admits(form, tokenizer, TWO[form], parallel=False)
    assert not admits(form, tokenizer, TWO[form], choice="look"), "a function that is named is called once"
    assert not admits(form, tokenizer, "")


def test_calls_of_mistral_may_have_ids(tokenizer: TextTokenizer) -> None:
    for ident, taken in (("abcDEF123", True), ("", False), ("no id", False)):
        assert admits("mistral_args", tokenizer, f'look[CALL_ID]{ident}[ARGS]{{"n": 1}}', parallel=False) == taken


def test_reasoning_comes_before_the_call(tokenizer: TextTokenizer) -> None:
    call = f"<tool_call>{TWO['hermes']}"
    for thought in ("", "hm\n", "<tool_call> { no call"):
        assert admits("hermes", tokenizer, f"{thought}</think>\n\n{call}", starts_in_reasoning=True)
    for text in ("hm", "hm</think>", "hm</think>It rains.", call):
        assert not admits("hermes", tokenizer, text, starts_in_reasoning=True), text
    assert not admits("hermes", tokenizer, f"hm</think>{call}"), "no reasoning is open"


def test_a_model_with_the_marker_may_open_its_reasoning() -> None:
    family = OutputFamily(FORMATS["hermes"], {"<think>": 7, "</think>": 8, "<tool_call>": 9}, lambda i: b"")
    asked = ChannelSettings(tools=(LOOK,), tool_choice="required")
    assert family.forced_prefix(asked) == ""
    (constraint,) = family.constraints(asked, None)
    assert constraint.source.startswith("start: (<[7]> thinking)? _LINES calls")
    assert family.reasoning_over("<think>\n\n</think>\n\n")
    assert not family.reasoning_over("<think>so</think> Yes.<|im_end|>")
    over = ChannelSettings(tools=(LOOK,), tool_choice="required", reasoning_over=True)
    assert family.forced_prefix(over) == "<tool_call>"


def test_the_budget_of_a_forced_call_ends_with_the_reasoning() -> None:
    family = OutputFamily(FORMATS["hermes"], {}, lambda i: b"")
    for inside, calls in ((True, None), (False, "<tool_call>")):
        choice = "required" if inside else "auto"
        asked = ChannelSettings(tools=(LOOK,), tool_choice=choice, starts_in_reasoning=inside)
        (limit,) = family.budget(5, asked)
        assert (limit.options["calls"], limit.options["inside"]) == (calls, inside)
    assert family.budget(5, ChannelSettings(tools=(LOOK,), tool_choice="required")) == (), "no reasoning can come"


@pytest.fixture(scope="module")
def url(fable: EngineThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The bundled model with a chat template that opens reasoning, and one that does not."""
    template = tmp_path_factory.mktemp("template") / "think.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{% endif %}<think>\n")
    configs = [
        ModelConfig(id="think", path=fable.card.folder, family="hermes", template=str(template)),
        ModelConfig(id="plain", path=fable.card.folder, family="mistral"),
    ]
    configs.append(ModelConfig(id="bytes", path=fable.card.folder, family="deepseek_v3"))
    live = LiveServer({one.id: fable for one in configs}, configs)
    yield live.url
    live.close()


def asked(url: str, **fields: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "look", "parameters": LOOK.parameters}}
    body = {"messages": [{"role": "user", "content": "Look."}], "tools": [tool], "tool_choice": "required"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body | fields, timeout=600)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("budget", [0, 5])
def test_a_forced_call_thinks_within_its_budget(url: str, budget: int) -> None:
    fields = {"max_tokens": 120, "seed": 1, "parallel_tool_calls": False}
    answer = asked(url, model="think", reasoning_budget=budget, **fields)
    choice, usage = answer["choices"][0], answer["usage"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert bool(choice["message"].get("reasoning_content")) == bool(budget)
    (call,) = choice["message"]["tool_calls"]
    assert 0 <= json.loads(call["function"]["arguments"])["n"] <= 9
    without = asked(url, model="think", **fields)
    assert without["usage"]["completion_tokens_details"]["reasoning_tokens"] > budget
    assert usage["completion_tokens_details"]["reasoning_tokens"] >= budget


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_format_follows_the_reasoning(url: str, choice: str, seed: int) -> None:
    """An answer that ends in its reasoning has no content: one with a format does not, unless it is cut short."""
    fields = {"model": "think", "tool_choice": choice, "guided_choice": ["yes", "no"], "max_tokens": 100, "seed": seed}
    cut, ended = (asked(url, **fields, **more)["choices"][0] for more in ({}, {"reasoning_budget": 5}))
    ways = {"tool_calls": (None,), "stop": ("yes", "no")}
    assert cut["finish_reason"] == "length" or cut["message"]["content"] in ways[cut["finish_reason"]]
    assert ended["message"]["content"] in ways[ended["finish_reason"]]


@pytest.mark.parametrize("tokens", [2, 8, 14, 23])
def test_no_half_marker_is_content_where_a_limit_cuts_a_character(url: str, tokens: int) -> None:
    """The markers of this format have characters of three bytes, of a token each."""
    (choice,) = asked(url, model="bytes", max_tokens=tokens, seed=1)["choices"]
    assert choice["finish_reason"] == "length"
    assert not choice["message"]["content"]


def test_several_forced_calls(url: str) -> None:
    """A model that must not write the end of the list goes on with another call."""
    fields = {"model": "plain", "max_tokens": 60, "seed": 2}
    several = asked(url, **fields, banned_strings=["]"])["choices"][0]["message"]["tool_calls"]
    assert len(several) > 1
    assert len({call["id"] for call in several}) == len(several)
    one = asked(url, parallel_tool_calls=False, **fields)["choices"][0]
    assert len(one["message"]["tool_calls"]) == 1
    assert one["finish_reason"] == "tool_calls"
