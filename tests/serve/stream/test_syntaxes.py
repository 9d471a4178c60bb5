"""Tool calls that are not one JSON value: written by the format's documentation, read in every way of cutting them."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from typing import Any

import jsonschema
import pytest
from effort import examples, trials
from grammar_texts import takes
from hypothesis import given
from hypothesis import strategies as st

from exl_core.tokenizer import TextTokenizer
from exl_filters import FilterCompileError
from exl_filters.grammar import ExLlamaV2GrammarFilter
from exl_generate import bundled
from exl_serve.engine.events import Finished, Started, TokenLogprob, Tokens, Usage
from exl_serve.errors import ServeError
from exl_serve.stream.channels import OutputFamily
from exl_serve.stream.events import AnswerEvent, Content, Finish, Reasoning, ToolArgs, ToolBegin, ToolEnd
from exl_serve.stream.families.table import FORMATS
from exl_serve.stream.family import ChannelSettings, ToolSpec

pytestmark = pytest.mark.sampled(3)

WEATHER = ToolSpec(
    "get_weather",
    "",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 40},
            "days": {"type": "integer", "maximum": 9},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "note": {"type": ["string", "null"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
CLOCK = ToolSpec("clock", "", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (WEATHER, CLOCK)
AUTO = ChannelSettings(tools=TOOLS, tool_choice="auto")
USAGE = Usage(prompt_tokens=1, completion_tokens=1)
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FORMS = [
    "qwen3_coder",
    "glm",
    "llama4",
    "gemma3",
    "deepseek_v3",
    "deepseek_v31",
    "mistral_args",
    "harmony",
]
#: every marker of a format, which its tokenizers have as special tokens
MARKERS: dict[str, list[str]] = {
    "qwen3_coder": ["<think>", "</think>", "<tool_call>", "</tool_call>"],
    "glm": [f"<{end}{tag}>" for tag in ("think", "tool_call", "arg_key", "arg_value") for end in ("", "/")],
    "llama4": ["<|python_start|>", "<|python_end|>"],
    "gemma3": [],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", BEGIN, SEP, END],
    "deepseek_v31": ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", BEGIN, SEP, END],
    "mistral_args": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
    "harmony": ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"],
}

Call = tuple[str, dict[str, Any]]


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def written(form: str, calls: list[Call]) -> str:
    """The region of these calls, markers and all."""
    if form == "qwen3_coder":
        return "\n".join(
            f"<tool_call>\n<function={name}>\n"
            + "".join(f"<parameter={k}>\n{plain(v)}\n</parameter>\n" for k, v in args.items())
            + "</function>\n</tool_call>"
            for name, args in calls
        )
    if form == "glm":
        return "\n".join(
            f"<tool_call>{name}\n"
            + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{plain(v)}</arg_value>\n" for k, v in args.items())
            + "</tool_call>"
            for name, args in calls
        )
    if form in ("llama4", "gemma3"):
        texts = [f"{name}({', '.join(f'{k}={v!r}' for k, v in args.items())})" for name, args in calls]
        if form == "llama4":
            return f"<|python_start|>[{', '.join(texts)}]<|python_end|>"
        return "```tool_code\n" + "\n".join(texts) + "\n```"
    made = [(name, json.dumps(args, ensure_ascii=False)) for name, args in calls]
    if form == "mistral_args":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{args}" for name, args in made)
    if form == "deepseek_v3":
        inside = "\n".join(f"{BEGIN}function{SEP}{name}\n```json\n{args}\n```{END}" for name, args in made)
        return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"
    if form == "deepseek_v31":
        inside = "".join(f"{BEGIN}{name}{SEP}{args}{END}" for name, args in made)
        return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{args}<|call|>" for name, args in made
    )


def answer(form: str, thought: str, before: str, calls: list[Call]) -> str:
    if form == "harmony":
        parts = [f"<|channel|>analysis<|message|>{thought}<|end|>"] if thought else []
        parts += [f"<|channel|>final<|message|>{before}<|end|>"] if before else []
        parts += [written(form, calls)] if calls else []
        return "<|start|>assistant".join(parts)
    think = FORMATS[form].think
    head = f"{think[0]}\n{thought}\n{think[1]}\n\n" if thought and think is not None else ""
    return head + before + (written(form, calls) if calls else "")


def family(form: str, as_text: bool) -> OutputFamily:
    special = {} if as_text else {mark: 100 + i for i, mark in enumerate(MARKERS[form])}
    return OutputFamily(FORMATS[form], special, lambda i: b"")


def events_of(
    form: str, text: str, cuts: list[int], as_text: bool, chosen: ChannelSettings = AUTO, reason: Any = "stop_token"
) -> list[AnswerEvent]:
    one = family(form, as_text)
    special = one.special
    machine = one.machine(0, chosen, "request")
    events = machine.feed(Started(0, 1, 0))
    pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    number = 10_000
    for part in re.split(f"({pattern})", text) if special else [text]:
        if part in special:
            events += machine.feed(Tokens(0, (special[part],), part, (TokenLogprob(special[part], -0.5),)))
            continue
        ends = sorted({cut % (len(part) + 1) for cut in cuts} | {0, len(part)})
        for begin, end in itertools.pairwise(ends):
            number += 1
            events += machine.feed(Tokens(0, (number,), part[begin:end], (TokenLogprob(number, -0.5),)))
    return events + machine.feed(Finished(0, reason, 2, USAGE))


def joined(events: list[AnswerEvent]) -> dict[str, Any]:
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
            assert not calls[-1]["closed"]
            calls[-1]["closed"] = True
        elif isinstance(event, Content | Reasoning):
            assert len(event.ids) == len(event.logprobs)
    assert isinstance(events[-1], Finish)
    return {
        "content": "".join(e.text for e in events if isinstance(e, Content)),
        "reasoning": "".join(e.text for e in events if isinstance(e, Reasoning)),
        "calls": calls,
        "finish": events[-1].reason,
    }


CITIES = [
    "Oslo", 'a "quoted" \\ name', "{[}]", "Zürich 🏔 東京", "", " spaced ", "line\nbreak", "\n", "5", "null", "a=b, c)",
    "<b>&amp;</b>", "it's", "</", "`code`", "\\n", "<para",
]  # fmt: skip
ARGUMENTS = st.fixed_dictionaries(
    {"city": st.sampled_from(CITIES)},
    optional={
        "days": st.integers(-5, 9),
        "unit": st.sampled_from(["C", "F"]),
        "note": st.sampled_from(["n", None, "7", "[1]"]),
        "tags": st.lists(st.sampled_from(["a", 'b"', "}", "]"]), max_size=3),
    },
)
CALLS: st.SearchStrategy[Call] = st.one_of(
    st.tuples(st.just("get_weather"), ARGUMENTS), st.tuples(st.just("clock"), st.just({}))
)


@examples(300, 30)
@given(
    form=st.sampled_from(FORMS),
    as_text=st.booleans(),
    calls=st.lists(CALLS, max_size=3),
    before=st.sampled_from(["", "Let me look.\n", "a < b [x] {y} <too ", "<", "``", "to=functions."]),
    thought=st.sampled_from(["", "I should call get_weather {", "hm </thin k>", "[clock()]"]),
    cuts=st.lists(st.integers(0, 600), max_size=60),
)
def test_calls_are_read_however_they_are_cut(
    form: str, as_text: bool, calls: list[Call], before: str, thought: str, cuts: list[int]
) -> None:
    found = joined(events_of(form, answer(form, thought, before, calls), cuts, as_text))
    assert [(one["name"], json.loads(one["arguments"])) for one in found["calls"]] == calls
    assert all(one["closed"] for one in found["calls"])
    assert found["finish"] == ("tool_calls" if calls else "stop")
    assert found["content"].rstrip() == before.rstrip()
    if form == "harmony" or FORMATS[form].think is not None:
        assert found["reasoning"].strip() == thought


BROKEN: dict[str, list[str]] = {
    "qwen3_coder": [
        "<tool_call>\nno function</tool_call>",
        "<tool_call>\n<function=clock>\nloose text</function>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOs",
        "<tool_call>\n<function=get_w",
        "<tool_call>\n<function=bad name>\n</function>",
    ],
    "glm": [
        "<tool_call>clock",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Os",
        "<tool_call>get_weather\n<arg_key>city</arg_key> x",
        "<tool_call>two words\n</tool_call>",
    ],
    "llama4": ["[x] a list", "[clock(", "[clock(a=)]", "[get_weather(city='Os", "[clock(a=f())]", "[clock]"],
    "gemma3": [
        "```tool_code\n",
        "```tool_code\nx = 5\n```",
        "```tool_code\nget_weather(city='Os",
        "```python\nf()\n```",
    ],
    "deepseek_v3": [
        f"<｜tool▁calls▁begin｜>{BEGIN}function{SEP}clock\n```json\n{{",
        f"<｜tool▁calls▁begin｜>{BEGIN}function{SEP}clock\n```json\nnone\n```{END}",
        "<｜tool▁calls▁begin｜>nothing",
    ],
    "deepseek_v31": [
        f"<｜tool▁calls▁begin｜>{BEGIN}clock{SEP}{{a: 1}}{END}<｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜>{BEGIN}clo",
    ],
    "mistral_args": [
        "[TOOL_CALLS]clock[ARGS]",
        "[TOOL_CALLS]clock[ARGS]5",
        "[TOOL_CALLS]clock",
        "[TOOL_CALLS]a b[ARGS]{}",
    ],
    "harmony": [
        "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{",
        "<|channel|>commentary to=functions.clock<|message|>no JSON<|call|>",
        "<|channel|>analysis<|message|>only thought",
        "<|channel|>commentary<|message|>a preamble<|end|>",
        "no header at all",
    ],
}


@given(form=st.sampled_from(FORMS), as_text=st.booleans(), cuts=st.lists(st.integers(0, 400), max_size=40))
def test_broken_calls_are_the_same_however_they_are_cut(form: str, as_text: bool, cuts: list[int]) -> None:
    for text in BROKEN[form]:
        for reason in ("stop_token", "length"):
            found = joined(events_of(form, text, cuts, as_text, reason=reason))
            assert found == joined(events_of(form, text, [], as_text, reason=reason))
            for one in found["calls"]:
                if one["closed"]:
                    json.loads(one["arguments"])
            if reason == "length":
                assert found["finish"] == "length"
            else:
                assert (found["finish"] == "tool_calls") == any(one["closed"] for one in found["calls"])


@pytest.mark.parametrize("form", [one for one in FORMS if one != "harmony"])
def test_without_tools_a_call_is_text(form: str) -> None:
    text = written(form, [("clock", {})])
    found = joined(events_of(form, text, [3, 9], True, ChannelSettings()))
    assert (found["content"], found["calls"], found["finish"]) == (text, [], "stop")


def test_an_answer_for_the_user_in_harmony() -> None:
    text = "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>"
    for as_text in (True, False):
        events = events_of("harmony", text, [1, 2, 3, 5], as_text, ChannelSettings())
        found = joined(events)
        assert (found["reasoning"], found["content"], found["finish"]) == ("think", "Hello", "stop")
        finish = events[-1]
        assert isinstance(finish, Finish)
        if not as_text:
            assert finish.reasoning_tokens > 0


def test_the_last_tokens_of_harmony_without_text_have_ids() -> None:
    machine = family("harmony", False).machine(0, ChannelSettings(), "r")
    marks = {mark: 100 + i for i, mark in enumerate(MARKERS["harmony"])}
    said: list[AnswerEvent] = []
    pieces = [
        ("<|channel|>", marks["<|channel|>"]),
        ("final", 5),
        ("<|message|>", marks["<|message|>"]),
        ("Hi", 11),
        ("", 12),
    ]
    for text, token in pieces:
        said += machine.feed(Tokens(0, (token,), text))
    said += machine.feed(Finished(0, "length", 5, USAGE))
    assert [e.ids for e in said if isinstance(e, Content | Finish)] == [(11,), (12,)]


def test_text_cannot_forge_a_marker_that_is_a_token() -> None:
    for form in ("glm", "deepseek_v31", "mistral_args", "llama4"):
        machine = family(form, False).machine(0, AUTO, "r")
        text = "x" + written(form, [("clock", {})])
        events = machine.feed(Tokens(0, (5, 6), text)) + machine.feed(Finished(0, "stop_token", 2, USAGE))
        assert "".join(e.text for e in events if isinstance(e, Content)) == text


@pytest.mark.parametrize("form", FORMS)
def test_time_is_linear(form: str) -> None:
    def seconds(size: int) -> float:
        """Return processor seconds: other work of the machine does not count."""
        text = answer(form, "", "", [("get_weather", {"city": "x<y{z[ " * (size // 7)})])
        machine = family(form, True).machine(0, AUTO, "r")
        pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
        began = time.thread_time()
        for at, piece in enumerate(pieces):
            machine.feed(Tokens(0, (at,), piece))
        return time.thread_time() - began

    small, large = min(seconds(20_000) for _ in range(3)), min(seconds(200_000) for _ in range(3))
    assert large < 40 * small


# ---- grammars -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_folder(str(bundled.default_model_dir()))


def inside(form: str, calls: list[Call]) -> str:
    """The region without the markers that a forced answer's prompt has."""
    text = written(form, calls)
    if form == "harmony":
        return text.removesuffix("<|call|>")
    call = FORMATS[form].call
    assert call is not None
    text = text.removeprefix("" if FORMATS[form].leading else call[0])
    if FORMATS[form].leading:
        text = text.removeprefix(call[0]).removesuffix(call[1])
    return text.removesuffix("\n</tool_call>") if form == "qwen3_coder" else text


def made(form: str, tokenizer: TextTokenizer, tools: tuple[ToolSpec, ...] = TOOLS) -> ExLlamaV2GrammarFilter:
    one = OutputFamily(FORMATS[form], {}, lambda i: b"")
    (constraint,) = one.constraints(ChannelSettings(tools=tools, tool_choice="required", parallel=False), None)
    return ExLlamaV2GrammarFilter(None, tokenizer, lark=constraint.source)


@pytest.mark.parametrize("form", FORMS)
def test_the_grammar_takes_calls_and_nothing_else(form: str, tokenizer: TextTokenizer) -> None:
    grammar = made(form, tokenizer)

    def fits(name: str, arguments: dict[str, Any]) -> bool:
        text = inside(form, [(name, arguments)])
        if FORMATS[form].inside is not None and form in ("llama4", "gemma3"):
            values = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in arguments.items())
            text = f"[{name}({values})]" if form == "llama4" else f"{name}({values})\n```"
        return takes(grammar, tokenizer, text, whole=False)

    assert fits("clock", {})
    assert fits("get_weather", {"city": "Oslo"})
    assert fits("get_weather", {"city": "Zürich <b>", "days": 3, "unit": "F", "note": None, "tags": ["a"]})
    assert not fits("get_weather", {"city": "x" * 41})
    assert not fits("get_weather", {"city": "Oslo", "days": 10})
    assert not fits("get_weather", {"city": "Oslo", "unit": "K"})
    assert not fits("get_weather", {"town": "Oslo"})
    assert not fits("get_weather", {})
    assert not fits("other", {})


CLOSING = ('"', "\n", "<", ")", "}", "]", "`")


def drawn(
    grammar: ExLlamaV2GrammarFilter, tokenizer: TextTokenizer, begin: str, draw: random.Random
) -> list[int] | None:
    """Tokens that begin so and that the grammar takes to its end: some at random, then those that end a text."""
    one = grammar.clone()
    one.begin("")
    ids = tokenizer.encode_ids(begin)
    for token in ids:
        one.feed(token)
    for step in range(300):
        allowed, ends = one.next()
        assert allowed
        choices = sorted(allowed)
        if step > 20:
            choices = [t for t in choices if tokenizer.decode_ids([t]).startswith(CLOSING)] or choices
        token = draw.choice(choices)
        if token == tokenizer.eos_token_id:
            return ids
        ids.append(token)
        if token in ends:
            return ids
        one.feed(token)
    return None


@pytest.mark.parametrize("form", FORMS)
def test_texts_of_the_grammar_are_read_as_calls_by_the_schema(form: str, tokenizer: TextTokenizer) -> None:
    grammar = made(form, tokenizer)
    begin = "<|channel|>commentary to=functions." if form == "harmony" else ""
    complete = 0
    for seed in range(trials(12, 3)):
        ids = drawn(grammar, tokenizer, begin, random.Random(seed))
        if ids is None:
            continue
        complete += 1
        text = tokenizer.decode_ids(ids)
        machine = family(form, True).machine(0, ChannelSettings(tools=TOOLS, tool_choice="required"), "r")
        events = machine.feed(Tokens(0, tuple(ids), text)) + machine.feed(Finished(0, "filter", None, USAGE))
        found = joined(events)
        (call,) = found["calls"]
        assert call["closed"], text
        tool = next(tool for tool in TOOLS if tool.name == call["name"])
        jsonschema.validate(json.loads(call["arguments"]), dict(tool.parameters))
        assert found["finish"] == "tool_calls"
    assert complete


@pytest.mark.parametrize("form", ["qwen3_coder", "glm", "llama4"])
def test_a_schema_that_the_syntax_cannot_follow_is_refused(form: str) -> None:
    tool = ToolSpec("f", "", {"type": "object", "anyOf": [{"required": ["a"]}], "properties": {"a": {}}})
    with pytest.raises(ServeError, match=r"tools\[0\].function.parameters.anyOf"):
        family(form, True).constraints(ChannelSettings(tools=(tool,), tool_choice="auto"), None)


TEXTS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"format": "date"}, "yes", "2026-12-01"),
    ({"pattern": "^[ab]+$"}, "c", "ab"),
    ({"pattern": r"^a\$"}, "ab", "a$b"),
    ({"pattern": r"b\\$"}, "b$c", "ab\\"),
    ({"anyOf": [{"const": "a"}, {"maxLength": 2, "minLength": 2}]}, "abc", "a"),
    ({"oneOf": [{"const": "a"}, {"const": "b"}]}, "c", "b"),
    ({"allOf": [{"maxLength": 2}]}, "abc", "ab"),
    ({"$ref": "#/$defs/short"}, "abc", "ab"),
    ({"not": {"const": "a"}}, "a", None),
    ({"enum": ["a", "bc"], "minLength": 2}, "a", "bc"),
    ({"enum": ["a", "b"], "const": "b"}, "a", "b"),
    ({"enum": ["a", "b"], "pattern": "b"}, "a", "b"),
]
"""Keywords beside `type: string`, a text that they forbid, and one that they allow."""


@pytest.mark.parametrize("form", ["qwen3_coder", "glm", "mistral_args", "harmony"])
@pytest.mark.parametrize(("more", "forbidden", "allowed"), TEXTS)
def test_texts_of_strict_tools_are_enforced_or_refused(
    form: str, more: dict[str, Any], forbidden: str, allowed: str | None, tokenizer: TextTokenizer
) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"t": {"type": "string"} | more}, "required": ["t"]}
    schema |= {"additionalProperties": False, "$defs": {"short": {"maxLength": 2}}}
    try:
        grammar = made(form, tokenizer, (ToolSpec("f", "", schema, strict=True),))
    except (ServeError, FilterCompileError):
        assert form in ("qwen3_coder", "glm") or "not" in more
        return
    assert not takes(grammar, tokenizer, inside(form, [("f", {"t": forbidden})]), whole=False)
    if allowed is not None:
        assert takes(grammar, tokenizer, inside(form, [("f", {"t": allowed})]), whole=False)
    assert form not in ("qwen3_coder", "glm") or set(more) == {"pattern"}


@pytest.mark.parametrize("form", FORMS)
def test_special_tokens_stand_in_the_grammar_by_their_ids(form: str) -> None:
    one = family(form, False)
    (constraint,) = one.constraints(AUTO, None)
    for mark in MARKERS[form]:
        assert json.dumps(mark, ensure_ascii=False) not in constraint.source
