"""A response format with tools that may be left alone: the answer follows the format, or calls tools."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from effort import trials
from grammar_texts import takes
from hypothesis import example, given
from hypothesis import strategies as st

from exl_core.tokenizer import TextTokenizer
from exl_filters.errors import FilterRejected
from exl_filters.vocabulary import vocabulary_of
from exl_generate import bundled
from exl_serve.config.model import Limits, ModelConfig
from exl_serve.engine.events import Finished, Tokens, Usage
from exl_serve.engine.jobs import compile_constraints
from exl_serve.errors import ServeError
from exl_serve.request.formats import format_of
from exl_serve.request.internal import Constraint
from exl_serve.stream.channels import OutputFamily
from exl_serve.stream.events import AnswerEvent, Content, Finish, Reasoning, ToolArgs, ToolBegin, ToolEnd
from exl_serve.stream.families.table import FORMATS
from exl_serve.stream.family import ChannelSettings, ToolSpec
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer

WEATHER = ToolSpec(
    "get_weather",
    "",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
CLOCK = ToolSpec("clock", "", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (WEATHER, CLOCK)
#: its keys are those of a call of some formats
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "parameters": {"type": "object", "maxProperties": 0}},
    "required": ["name", "parameters"],
    "additionalProperties": False,
}
FORMS = [name for name, form in FORMATS.items() if form.call is not None or name == "harmony"]
AUTO = ChannelSettings(tools=TOOLS, tool_choice="auto", formatted=True)
THINKING = ChannelSettings(tools=TOOLS, tool_choice="auto", formatted=True, starts_in_reasoning=True)
USAGE = Usage(prompt_tokens=1, completion_tokens=1)


def wanted(**fields: Any) -> Constraint:
    found = format_of(fields, Limits())
    assert found is not None
    return found


BY_SCHEMA = wanted(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_folder(str(bundled.default_model_dir()))


def grammar(form: str, tokenizer: Any, content: Constraint = BY_SCHEMA, settings: ChannelSettings = AUTO) -> Any:
    (constraint,) = OutputFamily(FORMATS[form], {}, lambda i: b"").constraints(settings, content)
    (made,) = compile_constraints([constraint], None, tokenizer)
    return made


def headed(form: str, text: str) -> str:
    """A content, with the header that harmony has before it."""
    return f"<|channel|>final<|message|>{text}" if form == "harmony" else text


@pytest.mark.parametrize("form", FORMS)
def test_the_content_follows_the_format(form: str, tokenizer: TextTokenizer) -> None:
    made = grammar(form, tokenizer)
    assert takes(made, tokenizer, headed(form, '{"name": "Oslo", "parameters": {}}'))
    assert not takes(made, tokenizer, headed(form, '{"name": "Oslo"}'))
    assert not takes(made, tokenizer, headed(form, '{"name": "longer than twelve", "parameters": {}}'))
    assert not takes(made, tokenizer, headed(form, "It rains."))
    pattern = grammar(form, tokenizer, wanted(guided_regex="[0-9]{2}/[a-z]"))
    assert takes(pattern, tokenizer, headed(form, "42/z"))
    assert not takes(pattern, tokenizer, headed(form, "42"))
    choice = grammar(form, tokenizer, wanted(guided_choice=["yes", 'no "way"']))
    assert takes(choice, tokenizer, headed(form, 'no "way"'))
    assert not takes(choice, tokenizer, headed(form, "maybe"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "wrong",
    [{"type": "string", "pattern": "(?=x)y"}, {"type": "object", "patternProperties": {"(?=x)": {}}}],
)
@pytest.mark.parametrize("content", [None, BY_SCHEMA])
def test_the_tool_whose_schema_cannot_be_compiled_is_named(
    form: str, tokenizer: TextTokenizer, wrong: dict[str, Any], content: Constraint | None
) -> None:
    schemas: list[dict[str, Any]] = [{}, *({"type": "object", "properties": {"a": wrong}} for _ in range(2))]
    tools = tuple(ToolSpec(f"tool{at}", "", one, False, f"tools[{at}]") for at, one in enumerate(schemas))
    family = OutputFamily(FORMATS[form], {}, lambda i: b"")
    for choice in ("auto", "required", "tool2"):
        constraints = family.constraints(ChannelSettings(tools=tools, tool_choice=choice), content)
        with pytest.raises(ServeError) as raised:
            compile_constraints(constraints, None, tokenizer)
        named = "tools[2]" if choice == "tool2" else "tools[1]"
        assert (raised.value.code, raised.value.param) == ("invalid_tool_schema", named)
    (constraint, *_) = family.constraints(ChannelSettings(tools=tools[:1], tool_choice="auto"), None)
    assert compile_constraints([constraint], None, tokenizer)


def drawn(made: Any, tokenizer: TextTokenizer, begin: str, draw: random.Random) -> str | None:
    """A text that begins so and that the grammar takes to its end, at random; None for one that is too long."""
    one = made.clone()
    one.begin("")
    ids = list(tokenizer.encode_ids(begin))
    for token in ids:
        one.feed(token)
    for step in range(200):
        if one.is_complete():
            return tokenizer.decode_ids(ids)
        allowed, _ = one.next()
        choices = sorted(allowed)
        if step > 12:
            closing = ('"', "\n", "<", ")", "}", "]", "`", "[", "｜", "/")
            choices = [t for t in choices if tokenizer.decode_ids([t]).startswith(closing)] or choices
        ids.append(draw.choice(choices))
        one.feed(ids[-1])
    return None


def read(form: str, text: str, size: int = 1) -> dict[str, Any]:
    """Return the content and calls that a client receives of an answer, in pieces of `size` characters."""
    machine = OutputFamily(FORMATS[form], {}, lambda i: b"").machine(0, AUTO, "r")
    events: list[AnswerEvent] = []
    for at in range(0, len(text), size):
        events += machine.feed(Tokens(0, (at,), text[at : at + size]))
    events += machine.feed(Finished(0, "filter", None, USAGE))
    calls: list[list[Any]] = [[event.name, "", False] for event in events if isinstance(event, ToolBegin)]
    for event in events:
        if isinstance(event, ToolArgs):
            calls[event.index][1] += event.text
        elif isinstance(event, ToolEnd):
            calls[event.index][2] = True
    assert isinstance(events[-1], Finish)
    return {
        "content": "".join(event.text for event in events if isinstance(event, Content)),
        "reasoning": "".join(event.text for event in events if isinstance(event, Reasoning)),
        "calls": calls,
        "finish": events[-1].reason,
    }


@pytest.mark.parametrize("form", FORMS)
def test_each_way_of_the_grammar_is_read_as_such(form: str, tokenizer: TextTokenizer) -> None:
    made = grammar(form, tokenizer)
    called = "<|channel|>commentary to=functions." if form == "harmony" else (FORMATS[form].call or ("",))[0]
    complete = 0
    for seed in range(trials(6, 2)):
        text = drawn(made, tokenizer, called, random.Random(seed))
        if text is None:
            continue
        complete += 1
        found = read(form, text)
        assert found["content"] == "", text
        assert found["finish"] == "tool_calls"
        for name, arguments, closed in found["calls"]:
            assert closed, text
            tool = next(tool for tool in TOOLS if tool.name == name)
            jsonschema.validate(json.loads(arguments), dict(tool.parameters))
    assert complete
    text = '{"name": "<tool_call>", "parameters": {}}'
    assert takes(made, tokenizer, headed(form, text))
    assert read(form, headed(form, text)) == {"content": text, "reasoning": "", "calls": [], "finish": "stop"}


@pytest.mark.parametrize("size", [1, 7, 200])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "harmony"])
def test_a_content_may_hold_the_marker_of_a_call(form: str, size: int) -> None:
    """Also where both are in one piece, as with drafts."""
    assert FORMATS[form].call is not None
    text = json.dumps({"name": "".join(FORMATS[form].call or ()), "parameters": {}}, ensure_ascii=False)
    found = read(form, text, size)
    assert found == {"content": text, "reasoning": "", "calls": [], "finish": "stop"}


CALL = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
ALIKE = ["<tool_call>", "<tool_call>no", '\n<tool_call> {"name": "x"}', CALL, CALL + "!", "no"]


@given(said=st.sampled_from(ALIKE), cuts=st.lists(st.integers(1, 70), max_size=6))
@example(said=ALIKE[2], cuts=[1])
def test_a_choice_may_begin_as_a_call_does(said: str, cuts: list[int]) -> None:
    """One of the texts is a content, though it may look like a call."""
    settings = ChannelSettings(tools=TOOLS, tool_choice="auto", formatted=True, contents=ALIKE)
    pieces = [said[a:b] for a, b in itertools.pairwise(sorted({0, len(said), *(min(c, len(said)) for c in cuts)}))]
    machine = OutputFamily(FORMATS["hermes"], {}, lambda i: b"").machine(0, settings, "r")
    events: list[AnswerEvent] = []
    for at, piece in enumerate(pieces):
        events += machine.feed(Tokens(0, (at,), piece))
    events += machine.feed(Finished(0, "filter", None, USAGE))
    assert "".join(event.text for event in events if isinstance(event, Content)) == said.lstrip("\n")
    assert sum(len(event.ids) for event in events if isinstance(event, Content)) == len(pieces)
    assert isinstance(events[-1], Finish)
    assert events[-1].reason == "stop"


@pytest.mark.parametrize(
    "contents", [["<tool_call>no", "no"], [CALL + "!"], [CALL[:-2] + "!", '<tool_call>{"name": 5']]
)
@pytest.mark.parametrize("size", [1, 9, 100])
def test_a_call_instead_of_such_choices_is_a_call(contents: list[str], size: int) -> None:
    settings = ChannelSettings(tools=TOOLS, tool_choice="auto", formatted=True, contents=contents)
    machine = OutputFamily(FORMATS["hermes"], {}, lambda i: b"").machine(0, settings, "r")
    events: list[AnswerEvent] = []
    for at in range(0, len(CALL), size):
        events += machine.feed(Tokens(0, (at,), CALL[at : at + size]))
    events += machine.feed(Finished(0, "filter", None, USAGE))
    assert [event.name for event in events if isinstance(event, ToolBegin)] == ["clock"]
    assert "".join(event.text for event in events if isinstance(event, ToolArgs)) == "{}"
    assert not any(isinstance(event, Content) for event in events)
    assert isinstance(events[-1], Finish)
    assert events[-1].reason == "tool_calls"


@pytest.mark.parametrize("form", [form for form in FORMS if form != "harmony"])
def test_texts_that_a_pattern_allows_are_no_calls(form: str, tokenizer: TextTokenizer) -> None:
    """A pattern may match texts that begin as a call does: the grammar leaves these out, so each text is one thing."""
    assert FORMATS[form].call is not None
    marker = (FORMATS[form].call or ("",))[0]
    made = grammar(form, tokenizer, wanted(guided_regex="(?s:.){1,200}"))
    for text in (marker, marker + "x", f"\n\n\n{marker}", f"\n{marker}"):
        assert not takes(made, tokenizer, text), text
    for text in (marker[:-1], f" {marker}", f"{marker[:-1]} {marker}", f"a{marker}", "\n \n" + marker, "\nab"):
        assert takes(made, tokenizer, text), text
        for size in (1, 3, 200):
            found = read(form, text, size)
            assert found == {"content": text.lstrip("\n"), "reasoning": "", "calls": [], "finish": "stop"}, text
    called = drawn(made, tokenizer, marker, random.Random(1))
    assert called is None or read(form, called)["finish"] == "tool_calls"


def test_several_calls_and_one(tokenizer: TextTokenizer) -> None:
    one = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    assert takes(grammar("hermes", tokenizer), tokenizer, f"{one}\n{one}")
    single = ChannelSettings(tools=TOOLS, tool_choice="auto", formatted=True, parallel=False)
    assert takes(grammar("hermes", tokenizer, settings=single), tokenizer, one)
    assert not takes(grammar("hermes", tokenizer, settings=single), tokenizer, f"{one}\n{one}")


def test_harmony_may_think_before_a_format(tokenizer: TextTokenizer) -> None:
    thought = "<|channel|>analysis<|message|>hm {<|end|><|start|>assistant"
    for settings in (AUTO, ChannelSettings()):
        made = grammar("harmony", tokenizer, settings=settings)
        text = f'{thought}<|channel|>final <|constrain|>json<|message|>{{"name": "x", "parameters": {{}}}}'
        assert takes(made, tokenizer, text)
        assert not takes(made, tokenizer, f"{thought}<|channel|>final<|message|>hm")
    assert read("harmony", text)["reasoning"] == "hm {"


def test_the_format_begins_after_the_reasoning() -> None:
    family = OutputFamily(FORMATS["hermes"], {"</think>": 9, "<tool_call>": 10, "</tool_call>": 11}, lambda i: b"")
    (constraint,) = family.constraints(THINKING, BY_SCHEMA)
    assert (constraint.after, constraint.then, constraint.awaited) == (9, "stop", True)
    assert "<[10]>" in constraint.around
    assert "<[11]>" in constraint.around


@pytest.mark.parametrize(
    ("settings", "content"),
    [
        (THINKING, BY_SCHEMA),
        (THINKING, wanted(guided_choice=["yes"])),
        (ChannelSettings(starts_in_reasoning=True), BY_SCHEMA),
        (ChannelSettings(starts_in_reasoning=True), wanted(guided_grammar='start: "yes"')),
    ],
)
def test_the_answer_does_not_end_in_the_reasoning(
    tokenizer: TextTokenizer, settings: ChannelSettings, content: Constraint
) -> None:
    """The format, of any kind, could not follow."""
    made = grammar("hermes", tokenizer, content, settings)
    stops = vocabulary_of(tokenizer).stop_ids
    assert stops
    made.begin("")
    for token in tokenizer.encode_ids("hm <tool_call> </think"):
        allowed, ends = made.next()
        assert token in allowed
        assert stops.isdisjoint(allowed)
        assert not ends
        assert not made.is_complete()
        with pytest.raises(FilterRejected):
            made.clone().feed(min(stops))
        made.feed(token)
    text = "yes" if content.kind != "json_schema" else '{"name": "Oslo", "parameters": {}}'
    assert takes(made, tokenizer, f"hm</think>{text}")
    assert not takes(made, tokenizer, f"hm</think>{text[1:]}")


def test_an_error_names_the_field(tokenizer: TextTokenizer) -> None:
    bad = wanted(guided_json={"type": "nothing"})
    with pytest.raises(ServeError) as told:
        grammar("hermes", tokenizer, bad)
    assert (told.value.status, told.value.param) == (400, "guided_json")
    tool = ToolSpec("f", "", {"type": "nothing"})
    with pytest.raises(ServeError) as told:
        grammar("hermes", tokenizer, settings=ChannelSettings(tools=(tool,), tool_choice="auto", formatted=True))
    assert (told.value.status, told.value.param) == (400, "tools")
    with pytest.raises(ServeError, match="guided_grammar"):
        grammar("hermes", tokenizer, wanted(guided_grammar='start: "a"'))


@pytest.fixture(params=["hermes", "llama3", "gemma3"])
def tooled(request: pytest.FixtureRequest, fable: EngineThread) -> Iterator[openai.OpenAI]:
    live = LiveServer({"fable": fable}, [ModelConfig(id="fable", path=fable.card.folder, family=request.param)])
    yield openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0)
    live.close()


def test_over_http(tooled: openai.OpenAI) -> None:
    """Whichever way the model takes, a client that parses the content or the calls can."""
    asked: dict[str, Any] = {
        "model": "fable",
        "messages": [{"role": "user", "content": "What is the weather?"}],
        "tools": [
            {"type": "function", "function": {"name": tool.name, "parameters": dict(tool.parameters)}} for tool in TOOLS
        ],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "parallel_tool_calls": False,
        "max_tokens": 300,
    }
    for seed in range(trials(4, 1)):
        (choice,) = tooled.chat.completions.create(**asked, seed=seed).choices
        if choice.message.tool_calls:
            assert choice.message.content is None
            for call in choice.message.tool_calls:
                assert call.type == "function"
                tool = next(tool for tool in TOOLS if tool.name == call.function.name)
                jsonschema.validate(json.loads(call.function.arguments), dict(tool.parameters))
            continue
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
        pieces = tooled.chat.completions.create(**asked, seed=seed, stream=True)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert text == choice.message.content
