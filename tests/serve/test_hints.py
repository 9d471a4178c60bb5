"""Fields that clients send by default, and that ask for nothing which an answer here could lack."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
COMPLETIONS = "/v1/completions"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 6},
    RESPONSES: {"input": "Tell me a story.", "max_output_tokens": 6},
    COMPLETIONS: {"prompt": "Once upon", "max_tokens": 6},
}


def ask(server: LiveServer, path: str, **fields: Any) -> httpx.Response:
    body = {"model": "fable", "temperature": 0, **ASKED[path], **fields}
    return httpx.post(server.url + path, json=body, timeout=HANG_SECONDS)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    found = answer.json()
    if "output" in found:
        return "".join(part["text"] for item in found["output"] for part in item["content"])
    choice = found["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        (CHAT, {"service_tier": "flex"}),
        (CHAT, {"prompt_cache_retention": "24h"}),
        (CHAT, {"verbosity": "low"}),
        (COMPLETIONS, {"prompt_cache_retention": "in_memory"}),
        (RESPONSES, {"service_tier": "priority"}),
        (RESPONSES, {"prompt_cache_retention": "in-memory"}),
        (RESPONSES, {"text": {"verbosity": "high"}}),
        (RESPONSES, {"reasoning": {"summary": "auto"}}),
        (RESPONSES, {"reasoning": {"generate_summary": "auto", "effort": "low"}}),
        (RESPONSES, {"max_tool_calls": 3}),
        (RESPONSES, {"client_metadata": {"x-installation": "1"}}),
    ],
)
def test_a_hint_changes_no_token(server: LiveServer, path: str, hint: dict[str, Any]) -> None:
    hinted = ask(server, path, **hint)
    assert text_of(hinted) == text_of(ask(server, path))
    assert "x-exl-ignored" not in hinted.headers


@pytest.mark.parametrize("tier", ["auto", "default", "flex", "priority", "scale"])
def test_an_answer_names_the_tier_that_it_had(server: LiveServer, tier: str) -> None:
    """Where the request names one, as OpenAI does."""
    assert ask(server, CHAT, service_tier=tier).json()["service_tier"] == "default"
    assert ask(server, RESPONSES, service_tier=tier).json()["service_tier"] == "default"
    streamed = ask(server, CHAT, service_tier=tier, stream=True).text.split("\n\n")
    chunks = [json.loads(unit.removeprefix("data: ")) for unit in streamed if unit.startswith("data: {")]
    assert [chunk["service_tier"] for chunk in chunks] == ["default"] * len(chunks)
    assert "service_tier" not in ask(server, CHAT).json()


def test_a_response_repeats_its_hints(server: LiveServer) -> None:
    asked = {"text": {"verbosity": "low"}, "max_tool_calls": 3, "reasoning": {"effort": "low", "summary": "auto"}}
    answer = ask(server, RESPONSES, **asked).json()
    assert answer["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert answer["max_tool_calls"] == 3
    assert answer["reasoning"] == {"effort": "low", "summary": None}, "no summary is made"
