"""A call whose arguments cannot be read as JSON is not closed, and nothing that a model writes raises."""

from __future__ import annotations

import json
from typing import Any

import pytest

from exl_serve.engine.events import Finished, Tokens, Usage
from exl_serve.stream.channels import OutputFamily
from exl_serve.stream.events import AnswerEvent, Finish, ToolArgs, ToolEnd
from exl_serve.stream.families.table import FORMATS
from exl_serve.stream.family import ChannelSettings, ToolSpec

TOOLS = (ToolSpec("f", "", {"type": "object", "properties": {"x": {}}}),)
DEEP = "[" * 1200 + "]" * 1200
TAGGED = {
    "glm": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n%s\n</parameter>\n</function>\n</tool_call>",
}
OTHERS = {
    "llama4": "<|python_start|>[f(x=%s)]<|python_end|>",
    "gemma3": "```tool_code\nf(x=%s)\n```",
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"x": %s}}\n</tool_call>',
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"x": %s}}]',
    "mistral_args": '[TOOL_CALLS]f[ARGS]{"x": %s}',
    "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": %s}<|call|>',
}
FIRST = '<tool_call>\n{"arguments": %s, "name": "f"}\n</tool_call>'


def read(form: str, output: str, *, letters: bool) -> tuple[str, bool, str]:
    """Return the arguments, whether the call is closed, and the finish reason."""
    machine = OutputFamily(FORMATS[form], {}, lambda i: b"").machine(
        0, ChannelSettings(tools=TOOLS, tool_choice="auto"), "r"
    )
    events: list[AnswerEvent] = []
    for at, piece in enumerate(output if letters else [output]):
        events += machine.feed(Tokens(0, (at,), piece))
    events += machine.feed(Finished(0, "stop_token", 2, Usage(prompt_tokens=1, completion_tokens=1)))
    assert isinstance(events[-1], Finish)
    said = "".join(event.text for event in events if isinstance(event, ToolArgs))
    return said, any(isinstance(event, ToolEnd) for event in events), events[-1].reason


@pytest.mark.parametrize("letters", [False, True])
@pytest.mark.parametrize("form", TAGGED)
def test_a_value_that_is_too_deep_is_text(form: str, letters: bool) -> None:
    said, closed, finish = read(form, TAGGED[form] % DEEP, letters=letters)
    assert (json.loads(said), closed, finish) == ({"x": DEEP}, True, "tool_calls")


@pytest.mark.parametrize("letters", [False, True])
@pytest.mark.parametrize("form", OTHERS)
def test_arguments_that_are_too_deep_close_no_call(form: str, letters: bool) -> None:
    _, closed, finish = read(form, OTHERS[form] % DEEP, letters=letters)
    assert (closed, finish) == (False, "stop")


@pytest.mark.parametrize("letters", [False, True])
@pytest.mark.parametrize("form", [*TAGGED, *OTHERS])
@pytest.mark.parametrize("value", ["1e999", "12345678901234567890.5", '"\\ud800"', '[1.50, {"a": null}]'])
def test_a_value_that_is_json_stays_as_it_is(form: str, value: str, letters: bool) -> None:
    output = (TAGGED | OTHERS)[form] % value
    assert read(form, output, letters=letters) == (f'{{"x": {value}}}', True, "tool_calls")


@pytest.mark.parametrize("letters", [False, True])
@pytest.mark.parametrize("value", ['{"x": NaN}', f'{{"x": {DEEP}}}', '"no JSON"', '{"x" 5}'])
def test_arguments_before_the_name_must_be_json(value: str, letters: bool) -> None:
    assert read("hermes", FIRST % value, letters=letters) == ("", False, "stop")


@pytest.mark.parametrize(
    ("value", "wanted"),
    [('{"x": "a\nb"}', {"x": "a\nb"}), (json.dumps('{"x": "a"}'), {"x": "a"}), (json.dumps(""), {})],
)
def test_arguments_before_the_name_are_passed_on(value: str, wanted: Any) -> None:
    said, closed, finish = read("hermes", FIRST % value, letters=False)
    assert (json.loads(said), closed, finish) == (wanted, True, "tool_calls")


def test_arguments_twice_close_no_call() -> None:
    output = '<tool_call>\n{"name": "f", "arguments": {}, "arguments": {}}\n</tool_call>'
    assert read("hermes", output, letters=False) == ("{}", False, "stop")
