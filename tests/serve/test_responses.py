"""POST /v1/responses: what OpenAI's client gets, the order of events, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from effort import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseError, ResponseStreamEvent
from pydantic import TypeAdapter

from exl_serve.config.model import Limits, ModelConfig
from exl_serve.engine.events import TokenLogprob, Usage
from exl_serve.errors import ServeError
from exl_serve.request.carried import carried
from exl_serve.request.responses import asked_of
from exl_serve.stream.events import AnswerEvent, Begun, Content, Error, Finish, Reasoning, ToolArgs, ToolBegin, ToolEnd
from exl_serve.stream.responses import Responses
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer

STORY = "Tell me a story about a fox."
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]},
}

SHAPE: dict[str, Any] = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def tooled(fable: EngineThread) -> Iterator[openai.OpenAI]:
    live = LiveServer({"fable": fable}, [ModelConfig(id="fable", path=fable.card.folder, family="hermes")])
    yield openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0)
    live.close()


def replayed(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that a stream tells piece by piece, its order checked."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] in ("completed", "incomplete", "failed")
    output: list[dict[str, Any]] = []
    expected: set[str] = {"output_item.added"}
    for kind, event in zip(kinds[2:-1], events[2:-1], strict=True):
        assert kind in expected, f"{kind} where {sorted(expected)} may stand"
        if kind == "output_item.added":
            item = dict(event["item"])
            assert event["output_index"] == len(output)
            assert item["status"] == "in_progress"
            output.append(item)
            expected = {
                "message": {"content_part.added"},
                "reasoning": {"reasoning_text.delta"},
                "function_call": {"function_call_arguments.delta", "function_call_arguments.done"},
            }[item["type"]]
            continue
        item = output[-1]
        assert event["output_index"] == len(output) - 1
        assert event.get("item_id", item["id"]) == item["id"]
        if kind == "content_part.added":
            item["content"] = [{**event["part"]}]
            expected = {"output_text.delta"}
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            if not item["content"]:
                item["content"] = [{"type": "reasoning_text", "text": ""}]
            item["content"][0]["text"] += event["delta"]
            expected = {kind, kind.replace(".delta", ".done")}
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert item["arguments"] == event["arguments"]
            expected = {"output_item.done"}
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert item["content"][0]["text"] == event["text"]
            expected = {"content_part.done"} if item["type"] == "message" else {"output_item.done"}
        elif kind == "content_part.done":
            item["content"][0]["logprobs"] = event["part"]["logprobs"]
            assert item["content"][0] == event["part"]
            expected = {"output_item.done"}
        else:
            item["status"] = event["item"]["status"]
            if "encrypted_content" in item:
                item["encrypted_content"] = carried(item["content"][0]["text"])
            assert item == event["item"]
            expected = {"output_item.added"}
    assert expected == {"output_item.added"}, "an item was left open"
    response: dict[str, Any] = events[-1]["response"]
    assert response["status"] == kinds[-1]
    assert response["output"] == output
    return response


def of_a_stream(client: openai.OpenAI, **asked: Any) -> dict[str, Any]:
    """Check the bytes: `event` is the type, and [DONE] comes last."""
    body = {key: value for key, value in asked.items() if key != "extra_body"} | asked.get("extra_body", {})
    answer = httpx.post(f"{client.base_url}responses", json=body | {"stream": True}, timeout=180)
    assert answer.status_code == 200, answer.text
    units = answer.text.split("\n\n")
    assert units[-2:] == ["data: [DONE]", ""]
    events = []
    for unit in units[:-2]:
        if unit.startswith(":"):
            continue
        name, data = unit.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return replayed(events)


def without_names(response: dict[str, Any]) -> dict[str, Any]:
    """Without what is drawn anew for every answer, and what the cache knew."""
    drawn = {"id", "created_at", "call_id"}
    found = {key: value for key, value in response.items() if key not in drawn}
    found["usage"] = {key: value for key, value in found["usage"].items() if key != "input_tokens_details"}
    found["output"] = [{key: one for key, one in item.items() if key not in drawn} for item in response["output"]]
    return found


@examples(8, 3, [HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**40),
    temperature=st.sampled_from([0.0, 0.9]),
    most=st.integers(1, 40),
    logprobs=st.booleans(),
)
def test_a_stream_the_whole_and_chat_are_one(
    client: openai.OpenAI, seed: int, temperature: float, most: int, logprobs: bool
) -> None:
    asked: dict[str, Any] = {"model": "fable", "input": STORY, "temperature": temperature, "max_output_tokens": most}
    asked["extra_body"] = {"seed": seed}
    if logprobs:
        asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(**asked)
    assert without_names(of_a_stream(client, **asked)) == without_names(whole.model_dump(exclude_unset=True))
    told: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if logprobs else {}
    chat = client.chat.completions.create(
        model="fable",
        messages=[{"role": "user", "content": STORY}],
        temperature=temperature,
        max_tokens=most,
        seed=seed,
        **told,
    )
    assert whole.output_text == chat.choices[0].message.content
    cut = chat.choices[0].finish_reason == "length"
    assert whole.status == ("incomplete" if cut else "completed")
    assert (whole.incomplete_details is not None) == cut
    assert whole.usage is not None
    assert chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    if logprobs and whole.output_text:
        (part,) = whole.output[0].content
        assert chat.choices[0].logprobs is not None
        expected = [(one.token, one.logprob) for one in chat.choices[0].logprobs.content or []]
        assert [(one.token, one.logprob) for one in part.logprobs] == expected


def test_the_client_s_own_stream(client: openai.OpenAI) -> None:
    until_a_point = {"stop": ["."], "seed": 1}
    with client.responses.stream(model="fable", input=STORY, extra_body=until_a_point) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text != ""


def test_items_are_the_messages_of_a_chat(client: openai.OpenAI, server: LiveServer) -> None:
    """A conversation with a call counts the tokens that chat counts."""
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]},
        {"role": "user", "content": "Go on"},
    ]
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Go on"},
    ]
    body: dict[str, Any] = {"model": "fable", "input": items, "instructions": "Be short."}
    counted = httpx.post(f"{server.url}/v1/responses/input_tokens", json=body, timeout=180).json()
    chat = httpx.post(f"{server.url}/tokenize", json={"model": "fable", "messages": messages}, timeout=180).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": chat["count"]}
    answer = client.responses.create(**body, max_output_tokens=3)
    assert answer.usage is not None
    assert answer.usage.input_tokens == chat["count"]
    assert answer.instructions == "Be short."


def test_calls_become_one_message_of_the_assistant() -> None:
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    found = asked_of(
        {
            "input": [
                {"role": "user", "content": "x"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"role": "assistant", "content": "Let me see."},
                call | {"call_id": "a"},
                call | {"call_id": "b"},
                {"type": "function_call_output", "call_id": "b", "output": "2"},
                call | {"call_id": "c"},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "3"}]},
            ]
        },
        {},
        Limits(),
    ).messages
    assert [(m["role"], m["content"], [c["id"] for c in m.get("tool_calls", [])]) for m in found] == [
        ("user", "x", []),
        ("assistant", "Let me see.", ["a", "b"]),
        ("tool", "2", []),
        ("assistant", "", ["c"]),
        ("tool", "3", []),
    ]
    assert [m.get("reasoning_content") for m in found] == [None, "hm", None, None, None]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_call(tooled: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {"model": "fable", "input": "The weather?", "tools": [WEATHER], "tool_choice": choice}
    asked |= {"max_output_tokens": 300, "extra_body": {"seed": 2}}
    whole = tooled.responses.create(**asked)
    (call,) = whole.output
    assert call.type == "function_call"
    assert call.name == "get_weather"
    jsonschema.validate(json.loads(call.arguments), WEATHER["parameters"])
    assert whole.status == "completed"
    assert without_names(of_a_stream(tooled, **asked)) == without_names(whole.model_dump(exclude_unset=True))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    items = [{"role": "user", "content": "The weather?"}, call.model_dump(exclude_unset=True), output]
    again = tooled.responses.create(model="fable", input=items, tools=[WEATHER], max_output_tokens=5)  # type: ignore[list-item]
    assert again.status in ("completed", "incomplete")


def test_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    shape: Any = {"type": "json_schema", "name": "number", "schema": schema, "strict": True}
    answer = client.responses.create(model="fable", input="A number?", text={"format": shape}, max_output_tokens=100)
    assert json.loads(answer.output_text)["n"] in (1, 2)
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"


STREAMED: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.mark.parametrize(
    "more",
    [
        {"instructions": "Be brief.", "user": "u", "metadata": {"a": "b"}},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"tools": [WEATHER], "tool_choice": "required"},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}}},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": '{"type": "integer"}', "strict": None}}},
    ],
)
def test_answers_are_of_openais_types(tooled: openai.OpenAI, more: dict[str, Any]) -> None:
    body = {"model": "fable", "input": STORY, "max_output_tokens": 8, **more}
    answer = httpx.post(f"{tooled.base_url}responses", json=body, timeout=180)
    Response.model_validate(answer.json())
    told = httpx.post(f"{tooled.base_url}responses", json=body | {"stream": True}, timeout=180).text
    events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]
    assert events
    for event in events:
        STREAMED.validate_python(event)


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"store": True}, "store", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"truncation": "old"}, "truncation", "invalid_value"),
        ({"conversation": "c"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"max_tool_calls": 0}, "max_tool_calls", "invalid_value"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "unsupported_parameter"),
        ({"include": ["file_search_call.results"]}, "include", "unsupported_parameter"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "invalid_value"),
        ({"verbosity": "low"}, "verbosity", "unsupported_parameter"),
        ({"service_tier": "fast"}, "service_tier", "invalid_value"),
        ({"prompt_cache_retention": "1h"}, "prompt_cache_retention", "invalid_value"),
        ({"text": {"format": {"type": "x"}}}, "text.format.type", "unsupported_parameter"),
        ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format.schema", "invalid_schema"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex", "invalid_value"),
        ({"text": {"format": {**SHAPE, "description": 5}}}, "text.format.description", "invalid_value"),
        ({"text": {"format": {**SHAPE, "name": "\ud800"}}}, "text.format.name", "invalid_value"),
        ({"text": {"format": {**SHAPE, "schema": '{"\\ud800": 1}'}}}, "text.format.schema", "invalid_value"),
        ({"metadata": ["a"]}, "metadata", "invalid_value"),
        ({"metadata": {"a": 5}}, "metadata", "invalid_value"),
        ({"metadata": {"a": "\ud800"}}, "metadata.a", "invalid_value"),
        ({"reasoning": {"effort": "\ud800"}}, "reasoning.effort", "invalid_value"),
        ({"tools": [{**WEATHER, "strict": "x"}]}, "tools[0].strict", "invalid_value"),
        ({"tools": [{**WEATHER, "x": ["\ud800"]}]}, "tools[0].x[0]", "invalid_value"),
        ({"tools": [WEATHER], "tool_choice": {"x": "\ud800"}}, "tool_choice.x", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "invalid_value"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "unsupported_parameter"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options", "unsupported_parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"max_output_tokens": 1 << 20}, "max_output_tokens", "context_length_exceeded"),
        ({"input": []}, "input", "invalid_messages"),
        ({"input": None}, "input", "invalid_messages"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "unsupported_parameter"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "invalid_messages"),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]},
            "input[0].call_id",
            "invalid_messages",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            "input[0].content[0]",
            "unsupported_modality",
        ),
        (
            {
                "input": [
                    {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"},
                    {
                        "type": "function_call_output",
                        "call_id": "x",
                        "output": [{"type": "input_image", "image_url": "data:"}],
                    },
                ]
            },
            "input[1].output[0]",
            "unsupported_modality",
        ),
    ],
)
def test_refused_fields_are_named(server: LiveServer, more: dict[str, Any], param: str, code: str) -> None:
    body = {"model": "fable", "input": "x", **more}
    for stream in (False, True):
        content = json.dumps(body | {"stream": stream})  # httpx's own has no lone surrogates
        answer = httpx.post(f"{server.url}/v1/responses", content=content, headers=JSON, timeout=180)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (param, code)


def test_nothing_is_kept(client: openai.OpenAI, server: LiveServer) -> None:
    made = client.responses.create(model="fable", input="x", max_output_tokens=1)
    assert made.store is False  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match="keeps none"):
        client.responses.retrieve(made.id)
    assert httpx.delete(f"{server.url}/v1/responses/{made.id}", timeout=180).status_code == 404
    assert httpx.post(f"{server.url}/v1/responses/{made.id}/cancel", timeout=180).json()["error"]["param"] == "id"


def test_unknown_fields_are_listed(server: LiveServer) -> None:
    body = {"model": "fable", "input": "x", "max_output_tokens": 1, "n": 2, "colour": "red"}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=180)
    assert sorted(answer.headers["x-exl-ignored"].split(",")) == ["colour", "n"]


# ---- events without a server ---------------------------------------------------------------------------------------


class FakeText:
    def piece(self, token: int) -> bytes:
        return b"<%d>" % token


texts = st.text(min_size=1, max_size=5)
pieces = st.one_of(
    st.builds(lambda t: [Reasoning(0, t)], texts),
    st.builds(lambda t, p: [Content(0, t, (1,), (TokenLogprob(1, p, ((1, p),)),))], texts, st.floats(-9, 0)),
    st.builds(lambda ts: ["call", *ts], st.lists(texts, max_size=3)),
)


@given(
    parts=st.lists(pieces, max_size=8),
    end=st.sampled_from(["stop", "length", "error"]),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=30),
    logprobs=st.booleans(),
    carries=st.booleans(),
)
def test_any_events_in_any_portions(
    parts: list[list[Any]], end: str, cuts: list[int], logprobs: bool, carries: bool
) -> None:
    events: list[AnswerEvent] = [Begun(0, 5, 2)]
    calls = 0
    for part in parts:
        if part[0] != "call":
            events += part
            continue
        events.append(ToolBegin(0, calls, f"call_{calls}", "f"))
        events += [ToolArgs(0, calls, text) for text in part[1:]]
        events.append(ToolEnd(0, calls))
        calls += 1
    usage = Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=2)
    if end == "error":
        events.append(Error(0, 500, "server_error", "engine_error", "it broke"))
    else:
        events.append(Finish(0, end, None, usage, reasoning_tokens=3))  # type: ignore[arg-type]
    head, options = {"id": "resp_x", "model": "m"}, {"logprobs": logprobs, "carried": carries}
    streamed, whole = (Responses(head, FakeText(), **options) for _ in range(2))  # type: ignore[arg-type]
    told, at = [], 0
    for cut in [*cuts, len(events)]:
        told += streamed.chunks(events[at : at + cut])
        at += cut
    told += streamed.last_chunks()
    assert streamed.finished
    response = replayed(told)
    whole.chunks(events)
    if end == "error":
        assert response["error"] == {"code": "server_error", "message": "engine_error: it broke"}
        ResponseError.model_validate(response["error"])
        with pytest.raises(ServeError, match="it broke"):
            whole.whole()
        return
    assert response == whole.whole()
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    joined = "".join(e.text for e in events if isinstance(e, Content))
    said = "".join(item["content"][0]["text"] for item in response["output"] if item["type"] == "message")
    assert said == joined
    assert sum(item["type"] == "function_call" for item in response["output"]) == calls
