"""A budget closes the reasoning of an answer, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl_serve.engine.budget import ThinkingBudget
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer


class Letters:
    """A token a letter, and two special tokens."""

    pieces = [bytes([97 + i]) for i in range(26)] + [b"<think>", b"</think>", b"<tool_call>"]

    def get_id_to_bytes_list(self, include_special_tokens: bool = False) -> list[bytes]:
        return self.pieces

    def encode(self, text: str) -> Any:
        import torch

        return torch.tensor([[ord(letter) - 97 for letter in text]])


THINK, CLOSE, CALL = 26, 27, 28


@given(st.integers(0, 6), st.booleans(), st.booleans(), st.lists(st.integers(0, 28), max_size=30))
def test_it_has_an_opinion_at_the_limit_alone(limit: int, inside: bool, texts: bool, wanted: list[int]) -> None:
    """A model that wants `wanted`, and takes what is forced. Markers are tokens, or texts over several tokens."""
    markers: tuple[Any, Any, Any] = ("xy", "yz", "qq") if texts else (THINK, CLOSE, CALL)
    made = ThinkingBudget(Letters(), limit, *markers, inside)
    made.begin()
    written: list[int] = []
    forced: list[int] = []
    for token in wanted:
        allowed, _ = made.next()
        taken = token if allowed is None else next(iter(allowed))
        if allowed is not None:
            assert len(list(allowed)) == 1
            forced.append(len(written))
        made.feed(taken)
        written.append(taken)
    if not forced:
        return
    assert forced == list(range(forced[0], forced[-1] + 1)), "in one piece"
    first = forced[0]
    pieces = b"".join(Letters.pieces[i] for i in written[:first])
    opens, closes, calls = (
        (b"xy", b"yz", b"qq") if texts else (Letters.pieces[THINK], Letters.pieces[CLOSE], Letters.pieces[CALL])
    )
    assert calls not in pieces
    begin = 0 if inside else len(pieces[: pieces.index(opens) + len(opens)])
    assert closes not in pieces[begin:]
    assert first - (0 if inside else begin if texts else written.index(THINK) + 1) == limit
    whole = [24, 25] if texts else [CLOSE]
    assert [written[i] for i in forced] == whole[: len(forced)]


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def test_a_clone_has_its_own_state() -> None:
    made = ThinkingBudget(Letters(), 2, THINK, CLOSE, CALL, True)
    made.feed(0)
    copy = made.clone()
    copy.feed(1)
    assert (made.next()[0], copy.next()[0]) == (None, [CLOSE])


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_reasoning_ends_and_content_follows(client: openai.OpenAI, fable: EngineThread, budget: int) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "Tell me a story."},
        {"role": "assistant", "content": "<think>Let me see: "},
    ]
    extra = {"continue_final_message": True, "reasoning_budget": budget, "ignore_eos": True}
    answer = client.chat.completions.create(
        model="fable", messages=messages, max_tokens=60, seed=4, logprobs=True, extra_body=extra
    )
    message = answer.choices[0].message
    assert message.content
    tokens = fable.generator.tokenizer.encode(getattr(message, "reasoning_content", None) or "").shape[1]
    assert tokens <= budget + 1
    if budget:  # the same without one
        return
    without = client.chat.completions.create(
        model="fable", messages=messages, max_tokens=60, seed=4, extra_body=extra | {"reasoning_budget": 10_000}
    )
    assert not without.choices[0].message.content


def test_a_budget_and_a_schema(client: openai.OpenAI) -> None:
    """The format holds after the reasoning."""
    messages: list[Any] = [{"role": "user", "content": "A story."}, {"role": "assistant", "content": "<think>"}]
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="fable",
        messages=messages,
        max_tokens=80,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        extra_body={"continue_final_message": True, "reasoning_budget": 5},
    )
    assert answer.choices[0].message.content is not None
    assert json.loads(answer.choices[0].message.content)["a"] in (True, False)
