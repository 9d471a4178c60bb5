"""An answer that may hold one call ends after it, and shows no other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from grammar_texts import LOOK

from exl_core.tokenizer import TextTokenizer
from exl_generate import bundled
from exl_serve.config.model import ModelConfig
from exl_serve.engine.events import Finished, Tokens, Usage
from exl_serve.engine.jobs import compile_constraints
from exl_serve.stream.channels import OutputFamily
from exl_serve.stream.events import Content, Finish, Reasoning, ToolBegin, ToolEnd
from exl_serve.stream.families.table import FORMATS
from exl_serve.stream.family import ChannelSettings
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer

JSON = '{"name": "look", "arguments": {"n": 1}}'
#: one call, as each format writes it
ONE = {
    "hermes": f"<tool_call>\n{JSON}\n</tool_call>",
    "glm": "<tool_call>look\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "llama4": "<|python_start|>[look(n=1)]<|python_end|>",
    "gemma3": "```tool_code\nlook(n=1)\n```",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>"
    '{"n": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "mistral_args": '[TOOL_CALLS]look[ARGS]{"n": 1}',
    "granite": f"<|tool_call|>[{JSON}]",
    "harmony": '<|channel|>commentary to=functions.look<|message|>{"n": 1}<|call|>',
}
MARKERS = ("<tool_call>", "</tool_call>")


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_folder(str(bundled.default_model_dir()))


def left_of(form: str, tokenizer: TextTokenizer, text: str, **settings: Any) -> str | None:
    """Return the text after the end of the answer; None where the answer does not end."""
    asked = ChannelSettings(tools=(LOOK,), tool_choice="auto", **settings)
    constraints = OutputFamily(FORMATS[form], {}, lambda i: b"").constraints(asked, None)
    (made,) = compile_constraints(constraints, None, tokenizer)
    made.begin("")
    ids = list(tokenizer.encode_ids(text))
    for at, token in enumerate(ids):
        allowed, _ = made.next()
        assert allowed is None or token in allowed, text
        made.feed(token)
        if made.ended():
            return str(tokenizer.decode_ids(ids[at + 1 :]))
    return None


@pytest.mark.parametrize("form", ONE)
def test_the_call_ends_the_answer(form: str, tokenizer: TextTokenizer) -> None:
    left = left_of(form, tokenizer, f"{'' if form == 'harmony' else 'Yes. '}{ONE[form]}", parallel=False)
    assert left is not None
    assert left.strip() in ("", "</tool_call>", "<|python_end|>", "<|call|>"), "the end of the region at most"
    assert left_of(form, tokenizer, ONE[form]) is None


@pytest.mark.parametrize("form", [form for form in ONE if FORMATS[form].think is not None])
def test_a_call_in_reasoning_is_text(form: str, tokenizer: TextTokenizer) -> None:
    assert FORMATS[form].call is not None
    _, end = FORMATS[form].think or ("", "")
    thought = f"{(FORMATS[form].call or ('',))[0]} is for calls, {ONE[form]}{end}\n\n"
    settings = {"starts_in_reasoning": True, "parallel": False}
    assert left_of(form, tokenizer, thought, **settings) is None
    assert left_of(form, tokenizer, thought + ONE[form], **settings) is not None


def test_reasoning_that_the_model_opens(tokenizer: TextTokenizer) -> None:
    """Its markers are tokens."""
    (think,), (end,), (call,) = (tokenizer.encode_ids(letter)[-1:] for letter in "xyz")
    special = {"<think>": think, "</think>": end, "<tool_call>": call}
    asked = ChannelSettings(tools=(LOOK,), tool_choice="auto", parallel=False)
    constraints = OutputFamily(FORMATS["hermes"], special, lambda i: b"").constraints(asked, None)
    (made,) = compile_constraints(constraints, None, tokenizer)
    made.begin("")
    for token in (think, call):
        made.feed(token)
        assert made.next()[0] is None
    copy = made.clone()
    copy.feed(call)
    assert copy.next()[0] is None
    for token in (end, call):
        made.feed(token)
    assert call not in made.next()[0]
    made.rewind(2)
    made.feed(call)
    assert made.next()[0] is None


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("form", ONE)
def test_a_second_call_is_left_out(form: str, size: int) -> None:
    second = ONE[form].replace('"n": 1', '"nonsense": [2]').replace("n=1", "m=2")
    text = f"{ONE[form]}{'<|start|>assistant' if form == 'harmony' else ''}{second}"
    for parallel, count in ((False, 1), (True, 2)):
        settings = ChannelSettings(tools=(LOOK,), tool_choice="auto", parallel=parallel)
        machine = OutputFamily(FORMATS[form], {}, lambda i: b"").machine(0, settings, "r")
        events = []
        for at in range(0, len(text), size):
            events += machine.feed(Tokens(0, (at,), text[at : at + size]))
        events += machine.feed(Finished(0, "stop_token", 2, Usage(prompt_tokens=1, completion_tokens=1)))
        assert sum(isinstance(one, ToolBegin) for one in events) == count
        assert sum(isinstance(one, ToolEnd) for one in events) == count
        assert not any(isinstance(one, Content | Reasoning) for one in events)
        assert isinstance(events[-1], Finish)
        assert events[-1].reason == "tool_calls"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The bundled model, whose last tokens are the markers of a call."""
    folder = tmp_path_factory.mktemp("model") / "marked"
    shutil.copytree(bundled.default_model_dir(), folder)
    _mark(folder / "tokenizer.json")
    thread = EngineThread(ModelConfig(id="marked", path=str(folder), device="cpu", family="hermes"))
    live = LiveServer({"marked": thread}, [ModelConfig(id="marked", path=str(folder), family="hermes")])
    yield live.url
    live.close()
    thread.close()


def _mark(file: Path) -> None:
    made = json.loads(file.read_text())
    model = made["model"]
    by_id = {at: text for text, at in model["vocab"].items()}
    gone = set()
    for at, marker in enumerate(MARKERS):
        token = len(by_id) - 1 - at
        gone.add(by_id[token])
        del model["vocab"][by_id[token]]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        made["added_tokens"].append({"id": token, "content": marker, "special": True, **flags})
        model["vocab"][marker] = token
    pairs = [(one, one if isinstance(one, list) else one.split(" ")) for one in model["merges"]]
    model["merges"] = [one for one, (a, b) in pairs if not {a, b, a + b} & gone]
    file.write_text(json.dumps(made))


def test_over_http(url: str) -> None:
    """A model that wants nothing but calls makes one."""
    tool = {"type": "function", "function": {"name": "look", "parameters": LOOK.parameters}}
    messages = [{"role": "user", "content": "Look."}]
    body = {"messages": messages, "tools": [tool], "max_tokens": 60, "seed": 1, "logit_bias": {"3071": 60}}
    for parallel in (False, True):
        asked = body | {"parallel_tool_calls": parallel}
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=600)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        calls = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
        assert (len(calls) == 1, choice["finish_reason"]) == (not parallel, "length" if parallel else "tool_calls")
        assert parallel or choice["message"]["content"] is None
        content, said = "", [""] * len(calls)
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked | {"stream": True}, timeout=600) as stream:
            lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
        for line in lines:
            delta = json.loads(line)["choices"][0]["delta"]
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                said[call["index"]] += call["function"].get("arguments") or ""
        assert (content, said) == (choice["message"]["content"] or "", calls)
