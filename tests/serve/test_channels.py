"""Reasoning and tool calls: every way of cutting an output into tokens gives what the whole text says."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from effort import trials
from grammar_texts import takes
from hypothesis import given
from hypothesis import strategies as st

from exl_filters.grammar import ExLlamaV2GrammarFilter
from exl_serve.config.model import ModelConfig
from exl_serve.engine.events import Finished, Started, Tokens, Usage
from exl_serve.errors import ServeError
from exl_serve.request.internal import Constraint
from exl_serve.stream.channels import OutputFamily, detect_family
from exl_serve.stream.events import Content, Finish, Reasoning, ToolArgs, ToolBegin, ToolEnd
from exl_serve.stream.families.table import FORMATS
from exl_serve.stream.family import ChannelSettings, ToolSpec
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer

pytestmark = pytest.mark.sampled(5)

WEATHER = ToolSpec(
    "get_weather",
    "",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
CLOCK = ToolSpec("clock", "", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (WEATHER, CLOCK)
AUTO = ChannelSettings(tools=TOOLS, tool_choice="auto")
USAGE = Usage(prompt_tokens=1, completion_tokens=1)


def call(form: str, name: str, arguments: Any, pad: str = "") -> str:
    """A call as a model of this format writes it, without the markers."""
    f = FORMATS[form]
    return json.dumps({f.names[0]: name, f.arguments[0]: arguments}, ensure_ascii=False).replace(": {", f":{pad} {{", 1)


def region(form: str, calls: list[str]) -> str:
    f = FORMATS[form]
    assert f.call is not None
    if f.listed:
        return f"{f.call[0]}[{', '.join(calls)}]{f.call[1]}"
    return "\n".join(f"{f.call[0]}\n{one}\n{f.call[1]}" for one in calls)


ARGUMENTS: list[Any] = [
    {"city": "Oslo"},
    {"city": 'a "quoted" \\ name'},
    {"city": "{[}]", "days": 3},
    {"city": "Zürich 🏔 東京"},
    {},
    {"nested": {"a": [1, 2, {"b": "}"}], "c": None}, "x": -1.5e3, "t": True},
    {"city": "</tool_call>"},
    {"city": "line\nbreak"},
]
WITH_TOOLS = [name for name, form in FORMATS.items() if form.call is not None and form.inside is None]


def run(family: OutputFamily, text: str, cuts: list[int], settings: ChannelSettings = AUTO) -> dict[str, Any]:
    """Return the machine's reading of a text in pieces; a special token is a piece of its own."""
    special = family.special
    machine = family.machine(0, settings, "request")
    events = machine.feed(Started(0, 1, 0))
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    number = 10_000
    for part in parts:
        if part in special:
            events += machine.feed(Tokens(0, (special[part],), part))
            continue
        ends = sorted({cut % (len(part) + 1) for cut in cuts} | {0, len(part)})
        for begin, end in itertools.pairwise(ends):
            number += 1
            events += machine.feed(Tokens(0, (number,), part[begin:end]))
    events += machine.feed(Finished(0, "stop_token", 2, USAGE))
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, ToolBegin):
            assert event.index == len(calls)
            calls.append({"name": event.name, "arguments": "", "closed": False, "id": event.id})
        elif isinstance(event, ToolArgs):
            assert event.index == len(calls) - 1
            assert event.text
            calls[-1]["arguments"] += event.text
        elif isinstance(event, ToolEnd):
            calls[-1]["closed"] = True
    assert isinstance(events[-1], Finish)
    return {
        "content": "".join(e.text for e in events if isinstance(e, Content)),
        "reasoning": "".join(e.text for e in events if isinstance(e, Reasoning)),
        "calls": calls,
        "finish": events[-1].reason,
    }


def families(form: str) -> list[OutputFamily]:
    """With the markers as special tokens, and as text."""
    f = FORMATS[form]
    marks = [mark for pair in (f.think, f.call) if pair is not None for mark in pair if mark]
    special = {mark: i for i, mark in enumerate(dict.fromkeys(marks), 100)}
    return [OutputFamily(f, known, lambda i: b"") for known in (special, {})]


@given(
    form=st.sampled_from(WITH_TOOLS),
    as_text=st.booleans(),
    arguments=st.lists(st.sampled_from(ARGUMENTS), min_size=1, max_size=3),
    before=st.sampled_from(["", "Let me look.\n", "a < b [x] {y} <too ", "<"]),
    thought=st.sampled_from(["", "I should call get_weather {", "hm </thin k>"]),
    cuts=st.lists(st.integers(0, 400), max_size=40),
)
def test_calls_are_read_however_the_text_is_cut(
    form: str, as_text: bool, arguments: list[Any], before: str, thought: str, cuts: list[int]
) -> None:
    f, family = FORMATS[form], families(form)[as_text]
    if f.leading:
        before = ""
    if not as_text or f.listed or form == "hermes":
        arguments = [one for one in arguments if "</tool_call>" not in json.dumps(one)] or [{}]
    if form == "llama3":
        arguments = arguments[:1]
    think = "" if not thought or f.think is None else f"{f.think[0]}\n{thought}\n{f.think[1]}\n\n"
    text = think + before + region(form, [call(form, "get_weather", one) for one in arguments])
    found = run(family, text, cuts)
    assert [json.loads(one["arguments"]) for one in found["calls"]] == arguments
    assert all(one["closed"] and one["name"] == "get_weather" for one in found["calls"])
    assert found["finish"] == "tool_calls"
    assert found["content"].rstrip() == before.rstrip()
    assert found["reasoning"].strip() == (thought if think else "")


@given(cuts=st.lists(st.integers(0, 400), max_size=40), form=st.sampled_from(WITH_TOOLS), as_text=st.booleans())
def test_every_cut_gives_the_same_answer(cuts: list[int], form: str, as_text: bool) -> None:
    family = families(form)[as_text]
    for text in (
        "no call at all, but a < and a [ and {",
        region(form, ['{"name": 5}']),
        region(form, ["nothing that is JSON"]),
        region(form, [call(form, "clock", {})])[:-20],
        "text " + region(form, [call(form, "clock", {"a": 1})]) + " after",
        '{"name": "clock"}',
    ):
        assert run(family, text, cuts) == run(family, text, [])


@pytest.mark.parametrize("form", WITH_TOOLS)
@given(cuts=st.lists(st.integers(0, 400), max_size=40))
def test_the_name_of_no_tool_is_text(form: str, cuts: list[int]) -> None:
    f = FORMATS[form]
    begin = "" if f.leading or f.call is None else f.call[0]
    wrap = (lambda text: f"[{text}]") if f.listed else (lambda text: text)
    other, known = call(form, "rm_rf", {"town": 5}), call(form, "clock", {})
    for said in (wrap(other), wrap(json.dumps({f.names[0]: "Anna", "age": 5}))):
        found = run(families(form)[1], begin + said, cuts)
        assert (found["content"], found["calls"], found["finish"]) == (begin + said, [], "stop")
    if f.listed:
        found = run(families(form)[1], f"{begin}[{known}, {other}]", cuts)
        assert [one["name"] for one in found["calls"]] == ["clock"]
        assert found["content"] == f", {other}]"


def test_ids_of_calls() -> None:
    text = region("mistral", [call("mistral", "clock", {})])
    one, again = (run(families("mistral")[0], text, [])["calls"][0]["id"] for _ in range(2))
    assert one == again
    assert re.fullmatch(r"[a-z2-7]{9}", one)
    other = run(families("hermes")[0], region("hermes", [call("hermes", "clock", {})]), [])["calls"][0]["id"]
    assert re.fullmatch(r"call_[a-z2-7]{24}", other)


def test_without_tools_a_call_is_text() -> None:
    family = families("hermes")[1]
    text = region("hermes", [call("hermes", "clock", {})])
    found = run(family, text, [3, 9], ChannelSettings())
    assert (found["content"], found["calls"], found["finish"]) == (text, [], "stop")


def test_text_cannot_forge_a_marker_that_is_a_token() -> None:
    family = families("hermes")[0]
    machine = family.machine(0, AUTO, "r")
    text = region("hermes", [call("hermes", "clock", {})])
    events = machine.feed(Tokens(0, (5, 6), text))  # no special token among the ids
    assert "".join(e.text for e in events if isinstance(e, Content)) == text


def test_reasoning_that_the_prompt_has_opened() -> None:
    for family in families("hermes"):
        assert family.starts_in_reasoning("<|im_start|>assistant\n<think>\n")
        assert not family.starts_in_reasoning("<think>\n\n</think>\n\n")
        found = run(family, "so\n</think>\n\nyes", [2, 5], ChannelSettings(starts_in_reasoning=True))
        assert (found["reasoning"].strip(), found["content"]) == ("so", "yes")


def test_a_cut_answer_reports_the_call_as_it_is() -> None:
    family = families("hermes")[1]
    machine = family.machine(0, AUTO, "r")
    events = machine.feed(Tokens(0, (1,), '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os'))
    events += machine.feed(Finished(0, "length", None, USAGE))
    assert [e.text for e in events if isinstance(e, ToolArgs)] == ['{"city": "Os']
    assert not any(isinstance(e, ToolEnd) for e in events)
    assert isinstance(events[-1], Finish)
    assert events[-1].reason == "length"


def test_time_is_linear() -> None:
    def seconds(size: int) -> float:
        """Return processor seconds: other work of the machine does not count."""
        family = families("hermes")[1]
        machine = family.machine(0, AUTO, "r")
        pieces = ["<tool_call>", '{"name": "clock", "arguments": {"a": "']
        pieces += ["x<y{z[ "] * (size // 7)
        began = time.thread_time()
        for at, piece in enumerate(pieces):
            machine.feed(Tokens(0, (at,), piece))
        return time.thread_time() - began

    small, large = min(seconds(20_000) for _ in range(3)), min(seconds(200_000) for _ in range(3))
    assert large < 40 * small


def test_the_template_tells_the_format() -> None:
    def known(template: str | None, configured: str = "auto") -> str:
        return detect_family(configured, template, {}, lambda i: b"").name

    assert known("...<tool_call>...") == "hermes"
    assert known("[AVAILABLE_TOOLS]") == "mistral"
    assert known("Environment: ipython") == "llama3"
    assert known("{{ messages }}") == known(None) == "none"
    assert known("<tool_call>", "phi4") == "phi4"
    with pytest.raises(ServeError, match="known are"):
        known("", "gpt-5")


# ---- with a model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[name for name in FORMATS if name != "none"])
def tooled(request: pytest.FixtureRequest, fable: EngineThread) -> Iterator[openai.OpenAI]:
    """The bundled model, said to be of each family."""
    config = ModelConfig(id="fable", path=fable.card.folder, family=request.param)
    live = LiveServer({"fable": fable}, [config])
    yield openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0)
    live.close()


ASKED: dict[str, Any] = {
    "model": "fable",
    "messages": [{"role": "user", "content": "What is the weather?"}],
    "tools": [
        {"type": "function", "function": {"name": tool.name, "parameters": dict(tool.parameters)}} for tool in TOOLS
    ],
    "max_tokens": 300,
}


#: harmony's reasoning, which the bundled model would not end
STRAIGHT: dict[str, Any] = {"extra_body": {"banned_strings": ["analysis"]}}


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_call_that_is_cut_short_is_no_content(tooled: openai.OpenAI, tokens: int) -> None:
    asked = ASKED | {"tool_choice": "required", "max_tokens": tokens, "seed": 1}
    (choice,) = tooled.chat.completions.create(**asked).choices
    assert choice.finish_reason == "length"
    assert not choice.message.content
    chunks = [chunk.choices[0] for chunk in tooled.chat.completions.create(**asked, stream=True)]
    assert not any(chunk.delta.content for chunk in chunks)
    names = [call.function for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert bool(names) == bool(choice.message.tool_calls)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_is_asked_for_is_made(tooled: openai.OpenAI, choice: Any) -> None:
    asked = ASKED | {"tool_choice": choice, "parallel_tool_calls": False} | STRAIGHT
    for seed in range(trials(3, 1)):
        whole = tooled.chat.completions.create(**asked, seed=seed)
        calls = whole.choices[0].message.tool_calls
        assert calls is not None
        assert len(calls) == 1
        assert calls[0].type == "function"
        tool = next(tool for tool in TOOLS if tool.name == calls[0].function.name)
        jsonschema.validate(json.loads(calls[0].function.arguments), dict(tool.parameters))
        assert choice == "required" or tool is WEATHER
        assert whole.choices[0].finish_reason == "tool_calls"
        assert whole.choices[0].message.content is None
        name, arguments, finish = "", "", None
        for chunk in tooled.chat.completions.create(**asked, seed=seed, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or []:
                assert delta.function is not None
                name += delta.function.name or ""
                arguments += delta.function.arguments or ""
            finish = chunk.choices[0].finish_reason or finish
        assert (name, arguments, finish) == (calls[0].function.name, calls[0].function.arguments, "tool_calls")
    told = {"role": "tool", "tool_call_id": calls[0].id, "content": "Rain."}
    again = [*ASKED["messages"], whole.choices[0].message.model_dump(), told]  # its content is null
    answer = tooled.chat.completions.create(**ASKED | {"messages": again, "max_tokens": 10}, tool_choice="none")
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_tools_may_be_left_alone(tooled: openai.OpenAI) -> None:
    answer = tooled.chat.completions.create(**ASKED | {"max_tokens": 20}, tool_choice="auto", seed=1)
    assert answer.choices[0].message.content
    none = tooled.chat.completions.create(**ASKED | {"max_tokens": 20}, tool_choice="none", seed=1)
    assert none.choices[0].message.tool_calls is None


@pytest.mark.parametrize("form", WITH_TOOLS)
def test_the_grammar_takes_calls_and_nothing_else(form: str, fable: EngineThread) -> None:
    """Every text that the grammar accepts reads as a call by the schema."""
    family = OutputFamily(FORMATS[form], {}, lambda i: b"")
    (constraint,) = family.constraints(ChannelSettings(tools=TOOLS, tool_choice="required"), None)
    tokenizer = fable.generator.tokenizer
    made = ExLlamaV2GrammarFilter(None, tokenizer, lark=constraint.source)

    wrap = (lambda one: f"[{one}]") if FORMATS[form].listed else (lambda one: one)
    for name, arguments, taken in (
        ("get_weather", {"city": "Oslo"}, True),
        ("get_weather", {"city": 5}, False),
        ("get_weather", {"town": "Oslo"}, False),
        ("other", {}, False),
    ):
        assert takes(made, tokenizer, wrap(call(form, name, arguments)), whole=False) == taken


def test_a_format_begins_after_the_reasoning() -> None:
    family = OutputFamily(FORMATS["hermes"], {"</think>": 9}, lambda i: b"")
    wanted = Constraint(kind="json_object", source="")
    assert family.constraints(ChannelSettings(), wanted) == (wanted,)
    (after,) = family.constraints(ChannelSettings(starts_in_reasoning=True), wanted)
    assert after.after == 9
    for choice in ("required", "clock"):  # an answer that is a call has no content to shape
        forced = ChannelSettings(tools=TOOLS, tool_choice=choice)
        assert family.constraints(forced, wanted) == family.constraints(forced, None)
