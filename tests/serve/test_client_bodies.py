"""Requests with the fields and headers that widely used clients send by default.

Each body is written from the fields in the client's source. The server must take it, and answer in the shape that the
client reads. Fields that say nothing to a server are named in x-exl-ignored, and no other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from exl_serve.api.auth import Authenticator
from exl_serve.config.model import Auth, ModelConfig
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
COMPLETIONS = "/v1/completions"
SYSTEM: dict[str, Any] = {"role": "system", "content": "You are helpful."}
USER: dict[str, Any] = {"role": "user", "content": "Hello"}
PARTS: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string", "maxLength": 8}},
    "required": ["path"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "read_file", "description": "Reads a file.", "parameters": SCHEMA}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
FLAT: dict[str, Any] = {"type": "function", **FUNCTION, "strict": False}
CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "read_file", "arguments": '{"path": "a"}'},
}
CALLED: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "text"},
]
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
SPOKEN: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
]
"""Items as Codex CLI sends them."""
WORKED: list[dict[str, Any]] = [
    *SPOKEN,
    {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
    {"type": "function_call", "name": "read_file", "arguments": '{"path": "a"}', "call_id": "call_1"},
    {"type": "function_call_output", "call_id": "call_1", "output": "text"},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Done."}],
        "phase": "final_answer",
    },
    SPOKEN[1],
]


@dataclass(frozen=True)
class Sent:
    """A request of a client, and the fields of it that the server may name as ignored."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


CLIENTS: dict[str, Sent] = {
    "Codex CLI": Sent(
        RESPONSES,
        {
            "instructions": "You are a coding agent.",
            "input": SPOKEN,
            "tools": [
                FLAT,
                {"type": "web_search", "external_web_access": False},
                {"type": "namespace", "name": "mcp__docs__", "description": "Tools of docs.", "tools": [FLAT]},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": None,
            "store": False,
            "stream": True,
            "include": [],
            "prompt_cache_key": "0199-thread",
            "client_metadata": {"x-codex-installation-id": "1"},
        },
        {"accept": "text/event-stream", "originator": "codex_cli_rs", "session_id": "0199-thread", "version": "0.90.0"},
        ("tools[1]", "tools[2].description"),
    ),
    "Codex CLI, a model that reasons": Sent(
        RESPONSES,
        {
            "instructions": "You are a coding agent.",
            "input": WORKED,
            "tools": [FLAT, {"type": "image_generation", "output_format": "png"}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "service_tier": "priority",
            "prompt_cache_key": "0199-thread",
            "text": {"verbosity": "medium"},
        },
        ignored=("tools[1]",),
    ),
    "OpenAI Agents SDK, responses": Sent(
        RESPONSES,
        {"include": [], "input": [USER], "instructions": "Help.", "tools": [FLAT], "stream": False},
        {"user-agent": "Agents/Python 0.20.0", "x-stainless-lang": "python"},
    ),
    "OpenAI Agents SDK, chat": Sent(CHAT, {"messages": [SYSTEM, USER], "tools": [TOOL], "stream": False}),
    "AI SDK, openai, store false": Sent(
        RESPONSES,
        {
            "input": [
                SYSTEM,
                {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "Hi."}], "id": "msg_1"},
                {"type": "function_call", "call_id": "c", "name": "read_file", "arguments": "{}", "id": "fc_1"},
                {"type": "function_call_output", "call_id": "c", "output": "text"},
            ],
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "tools": [FLAT],
            "tool_choice": "auto",
            "stream": True,
        },
    ),
    "AI SDK, openai.chat": Sent(CHAT, {"messages": CALLED, "tools": [TOOL], "tool_choice": "auto", **STREAM}),
    "AI SDK, openai-compatible": Sent(CHAT, {"messages": [SYSTEM, USER], "temperature": 0, "stream": True}),
    "opencode": Sent(
        CHAT,
        {"messages": CALLED, "max_tokens": 32, "tools": [TOOL], "tool_choice": "auto", "top_p": 1, **STREAM},
    ),
    "opencode, responses": Sent(
        RESPONSES,
        {
            "input": SPOKEN,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "medium", "summary": "auto"},
            "prompt_cache_key": "ses_1",
            "text": {"verbosity": "low"},
            "stream": True,
        },
    ),
    "Roo Code, responses": Sent(
        RESPONSES,
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
            "instructions": "Help.",
            "stream": True,
            "store": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "text": {"verbosity": "medium"},
            "tools": [FLAT | {"strict": True}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "prompt_cache_retention": "24h",
            "service_tier": "auto",
        },
    ),
    "Cline": Sent(CHAT, {"messages": [SYSTEM, PARTS], "temperature": 0, "reasoning_effort": None, **STREAM}),
    "Roo Code": Sent(
        CHAT,
        {
            "messages": [SYSTEM, PARTS],
            "temperature": 0,
            "max_completion_tokens": 32,
            "tools": [TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            **STREAM,
        },
    ),
    "Zed": Sent(
        CHAT,
        {
            "messages": [SYSTEM, USER, {"role": "assistant", "content": []}, PARTS],
            "max_completion_tokens": 32,
            "temperature": 1.0,
            "tools": [TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "prompt_cache_key": "thread",
            **STREAM,
        },
    ),
    "Continue": Sent(CHAT, {"messages": [SYSTEM, PARTS], "max_tokens": 32, "stream": True}),
    "Continue, autocomplete": Sent(
        COMPLETIONS,
        {
            "prompt": "def f():",
            "max_tokens": 32,
            "temperature": 0.01,
            # Of the model, of all languages, and of TypeScript.
            "stop": [
                *("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<|endoftext|>", "</fim_middle>"),
                *("</code>", "\n\n", "\r\n\r\n", "/src/", "#- coding: utf-8", "```"),
                *("\nfunction", "\nclass", "\nmodule", "\nexport", "\nimport"),
            ],
            "stream": True,
        },
    ),
    "Open WebUI": Sent(
        CHAT,
        {"messages": [USER], "stream": True},
        {"x-openwebui-user-name": "a", "x-openwebui-chat-id": "b"},
    ),
    "LibreChat": Sent(CHAT, {"messages": [SYSTEM, USER], "user": "65f0", "temperature": 1, "top_p": 1, **STREAM}),
    "LobeChat": Sent(
        CHAT,
        {"messages": [USER], "temperature": 1, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, **STREAM},
    ),
    "LangChain JS": Sent(
        CHAT,
        {
            "messages": CALLED,
            "tools": [TOOL],
            "parallel_tool_calls": False,
            "stream": False,
        },
        {"user-agent": "OpenAI/JS 6.1.0", "x-stainless-lang": "js", "x-stainless-retry-count": "0"},
    ),
    "Semantic Kernel": Sent(
        CHAT,
        {
            "messages": [SYSTEM, {**PARTS, "name": "ann"}],
            "tools": [TOOL],
            "tool_choice": "auto",
            "max_completion_tokens": 32,
            **STREAM,
        },
    ),
    "SillyTavern, chat completion": Sent(
        CHAT,
        {
            "messages": [SYSTEM, USER],
            "temperature": 1,
            "max_tokens": 32,
            "stream": True,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "top_p": 1,
            "stop": [],
            "logit_bias": {},
        },
    ),
    "SillyTavern, text completion": Sent(
        COMPLETIONS,
        {
            "prompt": "Ann: Hello\nBob:",
            "max_new_tokens": 32,
            "max_tokens": 32,
            "temperature": 0.7,
            "top_p": 0.5,
            "typical_p": 1,
            "typical": 1,
            "min_p": 0,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "top_k": 40,
            "skew": 0,
            "min_length": 0,
            "min_tokens": 0,
            "num_beams": 1,
            "length_penalty": 1,
            "early_stopping": False,
            "add_bos_token": True,
            "smoothing_factor": 0,
            "smoothing_curve": 1,
            "dry_allowed_length": 2,
            "dry_multiplier": 0,
            "dry_base": 1.75,
            "dry_sequence_breakers": '["\\n", ":", "\\"", "*"]',
            "dry_penalty_last_n": 0,
            "stop": ["\nAnn:"],
            "truncation_length": 512,
            "ban_eos_token": False,
            "skip_special_tokens": True,
            "include_reasoning": True,
            "top_a": 0,
            "tfs": 1,
            "mirostat_mode": 0,
            "mirostat_tau": 5,
            "mirostat_eta": 0.1,
            "custom_token_bans": "",
            "banned_strings": [],
            "api_type": "tabby",
            "api_server": "http://127.0.0.1:8000",
            "xtc_threshold": 0.1,
            "xtc_probability": 0,
            "nsigma": 0,
            "top_n_sigma": 0,
            "min_keep": 0,
            "adaptive_target": -0.01,
            "adaptive_decay": 0.9,
            "rep_pen": 1.2,
            "rep_pen_range": 0,
            "repetition_decay": 0,
            "repetition_penalty_range": 0,
            "temperature_last": True,
            "speculative_ngram": False,
            "guidance_scale": 1,
            "negative_prompt": "",
            "grammar_string": "",
            "repeat_penalty": 1.2,
            "repeat_last_n": 0,
            "n_predict": 32,
            "num_predict": 32,
            "tfs_z": 1,
            "mirostat": 0,
            "stream": True,
        },
        ignored=(
            *("max_new_tokens", "num_predict", "num_beams", "truncation_length"),
            *("api_type", "api_server", "adaptive_decay"),
        ),
    ),
    "big-AGI": Sent(CHAT, {"messages": [SYSTEM, PARTS], "temperature": 0.5, "max_tokens": 32, "n": 1, **STREAM}),
    "Jan": Sent(
        CHAT,
        {
            "messages": [USER],
            "stream": True,
            "temperature": 0.7,
            "top_k": 40,
            "top_p": 0.95,
            "max_tokens": 32,
            "stop": [],
            "frequency_penalty": 0,
            "presence_penalty": 0,
        },
    ),
    "Home Assistant": Sent(
        RESPONSES,
        {
            "input": [{"type": "message", "role": "developer", "content": "Help."}, USER | {"type": "message"}],
            "max_output_tokens": 32,
            "top_p": 1.0,
            "temperature": 1.0,
            "user": "01J",
            "service_tier": "auto",
            "store": False,
            "stream": True,
            "tools": [FLAT],
        },
    ),
    "Aider": Sent(CHAT, {"messages": [SYSTEM, USER], "temperature": 0, "stream": True}),
    "pi": Sent(
        CHAT,
        {
            "messages": [SYSTEM, PARTS],
            "store": False,
            "max_completion_tokens": 32,
            "tools": [TOOL],
            "prompt_cache_key": "session",
            "prompt_cache_retention": "24h",
            "reasoning_effort": "medium",
            **STREAM,
        },
    ),
}


@pytest.fixture(scope="module")
def http(fable: EngineThread) -> Iterator[httpx.Client]:
    """The bundled model with calls in the form of Hermes."""
    live = LiveServer({"fable": fable}, [ModelConfig(id="fable", path=fable.card.folder, family="hermes")])
    with httpx.Client(base_url=live.url, timeout=HANG_SECONDS) as client:
        yield client
    live.close()


def post(http: httpx.Client, sent: Sent, **more: Any) -> httpx.Response:
    limit = "max_output_tokens" if sent.path == RESPONSES else "max_tokens"
    given = {"max_completion_tokens", limit} & sent.body.keys()
    body = {"model": "fable", "seed": 3, **({} if given else {limit: 32}), **sent.body, **more}
    return http.post(sent.path, json=body, headers={"authorization": "Bearer none", **sent.headers})


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which ends with [DONE]."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


def check_chunks(sent: Sent, chunks: list[dict[str, Any]]) -> None:
    """Chunks of chat and of text: one finish, usage at the end where it is asked for."""
    ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert len(ends) == 1
    assert all(isinstance(chunk["created"], int) and chunk["model"] == "fable" and chunk["id"] for chunk in chunks)
    if "stream_options" in sent.body:
        assert chunks[-1]["choices"] == []
        usage = chunks[-1]["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert isinstance(usage["prompt_tokens_details"]["cached_tokens"], int)
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            # zod refuses null where a list of calls is optional.
            assert delta.get("tool_calls", []) is not None
            assert all({"index", "function"} <= call.keys() for call in delta.get("tool_calls", []))


def check_response(found: dict[str, Any]) -> None:
    """A response: what Codex CLI and the AI SDK refuse to do without."""
    assert isinstance(found["created_at"], int)
    assert found["store"] is False
    assert {"input_tokens", "output_tokens", "total_tokens"} <= found["usage"].keys()
    assert isinstance(found["usage"]["input_tokens_details"]["cached_tokens"], int)
    assert isinstance(found["usage"]["output_tokens_details"]["reasoning_tokens"], int)
    needed = {
        "message": {"id", "role", "content"},
        "function_call": {"id", "call_id", "name", "arguments"},
        "reasoning": {"id", "summary", "content"},
    }
    for item in found["output"]:
        assert needed[item["type"]] <= item.keys()


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_s_default_request_is_answered(http: httpx.Client, client: str) -> None:
    sent = CLIENTS[client]
    answer = post(http, sent)
    assert answer.status_code == 200, answer.text
    named = answer.headers.get("x-exl-ignored", "")
    assert sorted(filter(None, named.split(","))) == sorted(sent.ignored)
    if not sent.body.get("stream"):
        found = answer.json()
        if sent.path == RESPONSES:
            check_response(found)
        else:
            assert found["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
        return
    told = events(answer)
    if sent.path != RESPONSES:
        check_chunks(sent, told)
        return
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    assert told[-1]["type"] in ("response.completed", "response.incomplete")
    assert all("output_index" in event for event in told[2:-1])
    check_response(told[-1]["response"])


@pytest.mark.parametrize("client", [name for name, sent in CLIENTS.items() if "tools" in sent.body])
def test_a_client_s_request_is_answered_with_a_call(http: httpx.Client, client: str) -> None:
    sent = CLIENTS[client]
    name = {"type": "function", "name": "read_file"}
    choice: Any = name if sent.path == RESPONSES else {"type": "function", "function": {"name": "read_file"}}
    room = {next(iter({"max_completion_tokens", "max_tokens"} & sent.body.keys()), "max_tokens"): 80}
    more = {"max_output_tokens": 80} if sent.path == RESPONSES else room
    whole = post(http, sent, tool_choice=choice, **more, stream=False, stream_options=None)
    assert whole.status_code == 200, whole.text
    if sent.path == RESPONSES:
        (item,) = whole.json()["output"]
        called, arguments = item["name"], item["arguments"]
    else:
        (call,) = whole.json()["choices"][0]["message"]["tool_calls"]
        called, arguments = call["function"]["name"], call["function"]["arguments"]
    assert called == "read_file"
    assert set(json.loads(arguments)) == {"path"}


def test_models_are_listed_as_clients_read_them(http: httpx.Client) -> None:
    """Also with Codex CLI's query, and for a look at the head alone."""
    found = http.get("/v1/models", params={"client_version": "0.90.0"}).json()
    assert found["object"] == "list"
    (card,) = found["data"]
    assert {"id", "object", "created", "owned_by", "max_model_len"} <= card.keys()
    assert http.head("/v1/models").status_code == 200


def test_errors_have_the_members_that_clients_match(http: httpx.Client) -> None:
    """Codex CLI and Cline look for the code, the AI SDK refuses errors without a message."""
    long = CLIENTS["Cline"].body | {"messages": [{"role": "user", "content": "word " * 3000}]}
    refused = post(http, Sent(CHAT, long))
    error = refused.json()["error"]
    assert refused.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert {"message", "type", "param", "code"} == error.keys()


def test_a_stop_string_after_many_others_ends_the_answer(http: httpx.Client) -> None:
    body = {"messages": [USER], "temperature": 0, "max_tokens": 40}
    text = post(http, Sent(CHAT, body)).json()["choices"][0]["message"]["content"]
    word = text.split()[3]
    others = [f"<|stop {at}|>" for at in range(63)]
    (choice,) = post(http, Sent(CHAT, body | {"stop": [*others, word]})).json()["choices"]
    assert choice["message"]["content"] == text[: text.index(word)]
    assert choice["finish_reason"] == "stop"
    refused = post(http, Sent(CHAT, body | {"stop": [*others, word, "x"]}))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop")


def test_sillytavern_finds_models_of_tabbyapi_with_a_key_for_inference(fable: EngineThread, tmp_path: Path) -> None:
    """SillyTavern asks for the list, then for the loaded model; TabbyAPI wants no key of an admin for that."""
    key, admin = "exl-" + "k" * 43, "exl-" + "a" * 43
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    file.write_text(
        f'[[key]]\nname = "ann"\nkey = "{key}"\nmodels = ["mine"]\n'
        f'[[key]]\nname = "boss"\nkey = "{admin}"\nscopes = ["admin"]\n'
    )
    models = [ModelConfig(id=name, path=fable.card.folder) for name in ("other", "mine")]
    auth = Authenticator(Auth(key_file=str(file)))
    live = LiveServer({"mine": fable, "other": fable}, models, None, auth)
    try:
        with httpx.Client(base_url=live.url, timeout=HANG_SECONDS) as client:
            for given, seen in ((key, ["mine"]), (admin, ["other", "mine"])):
                headers = {"x-api-key": given, "authorization": f"Bearer {given}"}
                listed = client.get("/v1/model/list", headers=headers)
                assert [one["id"] for one in listed.json()["data"]] == seen
                assert client.get("/v1/model", headers=headers).json()["id"] == seen[0]
            assert client.get("/v1/model/list").status_code == 401
            assert client.post("/v1/model/unload", headers={"x-api-key": key}).status_code == 403
    finally:
        live.close()
