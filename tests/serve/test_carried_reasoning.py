"""Reasoning that a client sends back as `encrypted_content`, as clients of reasoning models do by default."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from exl_serve.config.model import ModelConfig
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS

THINKING = (
    "{% for one in messages %}<|{{ one.role }}|>{{ one.reasoning_content or '' }}{{ one.content }}\n"
    "{% endfor %}<think>\n"
)
SAID = [{"role": "user", "content": "Tell me a story."}]
INCLUDE = {"include": ["reasoning.encrypted_content"]}


@pytest.fixture(scope="module")
def http(fable: EngineThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The bundled model, whose answers are reasoning."""
    file = tmp_path_factory.mktemp("templates") / "thinking.jinja"
    file.write_text(THINKING)
    plain = ModelConfig(id="fable", path=fable.card.folder)
    model = ModelConfig(**msgspec.structs.asdict(plain) | {"template": str(file)})
    live = LiveServer({"fable": fable}, [model])
    with httpx.Client(base_url=live.url, timeout=HANG_SECONDS) as client:
        yield client
    live.close()


def ask(http: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": "fable", "input": SAID, "seed": 1, "max_output_tokens": 12}
    answer = http.post("/v1/responses", json=body | fields)
    assert answer.status_code == 200, answer.text
    return answer


def reasoning_of(http: httpx.Client) -> dict[str, Any]:
    (item,) = ask(http, **INCLUDE).json()["output"]
    assert (item["type"], item["summary"]) == ("reasoning", [])
    return dict(item)


def test_it_is_there_where_it_is_asked_for(http: httpx.Client) -> None:
    item = reasoning_of(http)
    assert item["encrypted_content"]
    (plain,) = ask(http).json()["output"]
    assert "encrypted_content" not in plain
    assert plain["content"] == item["content"]
    lines = ask(http, stream=True, **INCLUDE).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    items = [event["item"] for event in events if event["type"].startswith("response.output_item")]
    assert [one["encrypted_content"] for one in items] == [None, item["encrypted_content"]]
    assert events[-1]["response"]["output"] == [items[-1]]
    assert items[-1]["content"] == item["content"]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}])
def test_it_counts_as_the_reasoning(http: httpx.Client, content: dict[str, Any]) -> None:
    """The prompt is the same whether a client sends back the text or what carries it."""
    item = reasoning_of(http)
    rest = [{"role": "assistant", "content": "Once."}, {"role": "user", "content": "Go on."}]
    carried = {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"], **content}
    told = {"type": "reasoning", "summary": [], "content": item["content"]}
    tokens = {
        name: ask(http, input=[*SAID, *items, *rest]).json()["usage"]["input_tokens"]
        for name, items in {"carried": [carried], "told": [told], "both": [told | carried | told], "none": []}.items()
    }
    assert tokens["carried"] == tokens["told"] == tokens["both"] > tokens["none"]


@pytest.mark.parametrize("foreign", ["gAAAAABo", "exl1:", "exl1:?", "exl1:/w=="])
def test_content_that_another_server_has_encrypted_is_no_reasoning(http: httpx.Client, foreign: str) -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": foreign}
    with_it = ask(http, input=[*SAID, item, *SAID]).json()["usage"]["input_tokens"]
    assert with_it == ask(http, input=[*SAID, *SAID]).json()["usage"]["input_tokens"]
