"""`echo` with `logprobs` on /v1/completions: how evaluation harnesses score texts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from exl_serve.config.model import ModelConfig, ServeConfig, ServerConfig
from exl_serve.engine.events import Started, TokenLogprob, Tokens
from exl_serve.ray.resume import Completion
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS

TEXT = "Once upon a time there was a fox. It lived in an old forest — and it was naïve."


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=HANG_SECONDS) as client:
        yield client


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"model": "fable", "echo": True, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def streamed(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a stream, joined."""
    body = {"model": "fable", "echo": True, "temperature": 0, "stream": True, **fields}
    found: dict[int, dict[str, Any]] = {}
    for line in http.post("/v1/completions", json=body).text.splitlines():
        if not line.startswith("data: {"):
            continue
        for piece in json.loads(line[6:])["choices"]:
            one = found.setdefault(piece["index"], {"text": "", "logprobs": {}, "finish_reason": None})
            one["text"] += piece["text"]
            one["finish_reason"] = piece["finish_reason"] or one["finish_reason"]
            for name, values in (piece["logprobs"] or {}).items():
                one["logprobs"].setdefault(name, []).extend(values)
    return [found[i] for i in sorted(found)]


def logprobs(fable: EngineThread, ids: list[int]) -> torch.Tensor:
    """By one pass of the model over all ids."""
    logits = fable.generator.model.forward(torch.tensor([ids]))[0, :, : fable.card.vocab_size]
    return torch.log_softmax(logits.double(), -1)


def test_a_text_is_scored_without_a_new_token(http: httpx.Client, fable: EngineThread) -> None:
    answer = complete(http, prompt=TEXT, max_tokens=0, logprobs=3)
    (choice,) = answer["choices"]
    ids = fable.generator.tokenizer.encode_ids(TEXT, add_bos=True)
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["completion_tokens"] == 0
    told, rows = choice["logprobs"], logprobs(fable, ids)
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    for at in range(1, len(ids)):
        assert told["token_logprobs"][at] == pytest.approx(float(rows[at - 1, ids[at]]), abs=1e-3)
        best = told["top_logprobs"][at]
        assert max(best, key=lambda text: best[text]) == piece(fable, int(rows[at - 1].argmax()))
        assert told["tokens"][at] in best
        assert 3 <= len(best) <= 4


def piece(fable: EngineThread, token: int) -> str:
    return str(fable.generator.tokenizer.get_id_to_bytes_list(True)[token].decode("utf-8", "replace"))


def test_offsets_are_places_in_the_text(http: httpx.Client) -> None:
    (choice,) = complete(http, prompt=TEXT, max_tokens=4, logprobs=0)["choices"]
    told, text = choice["logprobs"], choice["text"]
    assert text.startswith(TEXT)
    assert told["text_offset"][0] == 0, "the beginning of a text has no place in it"
    for token, at in zip(told["tokens"][1:], told["text_offset"][1:], strict=True):
        assert "�" in token or text[at : at + len(token)] == token


@pytest.mark.sampled(2)
@pytest.mark.parametrize("new", [0, 1, 6])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_equals_the_answer_and_prompts_are_scored_one_by_one(http: httpx.Client, new: int, n: int) -> None:
    texts = [TEXT, "A", TEXT * 8, "The fox"]
    asked = {"prompt": texts, "max_tokens": new, "logprobs": 2, "n": n}
    answer = complete(http, **asked)
    assert len(answer["choices"]) == 4 * n
    for whole, joined in zip(answer["choices"], streamed(http, **asked), strict=True):
        for name in ("text", "logprobs", "finish_reason"):
            assert whole[name] == joined[name]
    for at, text in enumerate(texts):
        alone = complete(http, prompt=text, max_tokens=new, logprobs=2)["choices"][0]
        for choice in answer["choices"][at * n : at * n + n]:
            assert (choice["text"], choice["logprobs"]) == (alone["text"], alone["logprobs"])


def test_the_sum_over_a_continuation_is_what_the_model_would_say(http: httpx.Client) -> None:
    """A harness scores a continuation by the tokens after its context, sent as ids, with one token to spare."""
    context, continuation = "Once upon a time there was a", " little fox"
    ids = [
        http.post("/tokenize", json={"model": "fable", "prompt": text}).json()["tokens"]
        for text in (context, context + continuation)
    ]
    told = complete(http, prompt=[ids[1]], max_tokens=1, logprobs=1, seed=1234)["choices"][0]["logprobs"]
    scored = told["token_logprobs"][len(ids[0]) : -1]
    assert len(scored) == len(ids[1]) - len(ids[0])
    forced = sum(scored)
    again = complete(http, prompt=[ids[1]], max_tokens=0, logprobs=1)["choices"][0]["logprobs"]
    assert sum(again["token_logprobs"][len(ids[0]) :]) == forced
    assert math.isfinite(forced)
    assert forced < 0


def test_generated_tokens_get_the_scores_of_their_generation(http: httpx.Client) -> None:
    first = complete(http, prompt=TEXT, max_tokens=12, logprobs=2)["choices"][0]["logprobs"]
    ids = http.post("/tokenize", json={"model": "fable", "prompt": TEXT}).json()["tokens"]
    answer = http.post(
        "/v1/completions",
        json={"model": "fable", "prompt": TEXT, "max_tokens": 12, "temperature": 0, "return_token_ids": True},
    )
    ids += answer.json()["choices"][0]["token_ids"]
    again = complete(http, prompt=ids, max_tokens=0, logprobs=2)["choices"][0]["logprobs"]
    assert again["tokens"] == first["tokens"]
    assert again["token_logprobs"] == first["token_logprobs"], "bitwise, on a CPU"


def test_a_prompt_may_fill_the_context(http: httpx.Client, fable: EngineThread) -> None:
    length = fable.card.max_seq_len
    told = complete(http, prompt=[5] * length, max_tokens=0, logprobs=0)["choices"][0]["logprobs"]
    assert len(told["tokens"]) == length
    for size, new in ((length + 1, 0), (length, 1)):
        body = {"model": "fable", "prompt": [5] * size, "max_tokens": new, "echo": True, "logprobs": 0}
        answer = http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 1, "token_healing": True}, "token_healing"),
    ],
)
def test_impossible_requests_are_refused(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/completions", json={"model": "fable", "prompt": "x", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_chats_have_at_least_one_token(http: httpx.Client) -> None:
    body = {"model": "fable", "messages": [{"role": "user", "content": "x"}], "max_tokens": 0}
    answer = http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


def test_a_second_run_repeats_no_score() -> None:
    """The first replica ends within the prompt; the second one begins again."""
    scores = [TokenLogprob(i, -float(i)) for i in range(6)]
    one = Completion()
    heard: list[TokenLogprob] = []
    for run in ([scores[:2], scores[2:3]], [scores[:1], scores[1:5], scores[5:]]):
        for event in [Started(0, 6, 0), *(Started(0, 6, 0, tuple(part)) for part in run)]:
            found = one.feed(event)
            if found is not None:
                assert isinstance(found, Started)
                heard += found.prompt_logprobs
    assert heard == scores
    assert one.feed(Tokens(0, (7,), "x")) == Tokens(0, (7,), "x")


@pytest.fixture(scope="module")
def scoring(fable: EngineThread) -> Iterator[httpx.Client]:
    """A server that allows `prompt_logprobs`."""
    config = ServeConfig(server=ServerConfig(allow_prompt_logprobs=True))
    live = LiveServer({"fable": fable}, [ModelConfig(id="fable", path=fable.card.folder)], config)
    with httpx.Client(base_url=live.url, timeout=HANG_SECONDS) as client:
        yield client
    live.close()


def test_prompt_logprobs_of_both_apis(scoring: httpx.Client, fable: EngineThread) -> None:
    """The answer is vLLM's: the token itself and the most likely ones, by id, in the order of the prompt."""
    body = {"prompt": TEXT, "max_tokens": 2, "prompt_logprobs": 2, "return_token_ids": True, "n": 2, "seed": 1}
    answer = scoring.post("/v1/completions", json=body).json()
    ids = fable.generator.tokenizer.encode_ids(TEXT, add_bos=True)
    wanted = logprobs(fable, ids)
    for choice in answer["choices"]:
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        assert len(rest) == len(ids) - 1
        for at, entry in enumerate(rest):
            assert entry[str(ids[at + 1])]["logprob"] == pytest.approx(float(wanted[at, ids[at + 1]]), abs=2e-3)
            best = max(entry.values(), key=lambda one: one["logprob"])
            assert best["rank"] == 1
            assert 2 <= len(entry) <= 3
    chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2, "prompt_logprobs": 0}
    found = scoring.post("/v1/chat/completions", json=chat).json()
    assert len(found["prompt_logprobs"]) == found["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in found["prompt_logprobs"][1:])


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_prompt_logprobs_are_refused_with_a_reason(http: httpx.Client, scoring: httpx.Client, path: str) -> None:
    body = {"prompt": TEXT} if path == "completions" else {"messages": [{"role": "user", "content": TEXT}]}
    off = http.post(f"/v1/{path}", json=body | {"model": "fable", "prompt_logprobs": 1})
    assert (off.status_code, off.json()["error"]["code"]) == (400, "unsupported_parameter")
    assert "allow_prompt_logprobs" in off.json()["error"]["message"]
    for wrong in ({"stream": True}, {"token_healing": True}, {"prompt_logprobs": 21}):
        answer = scoring.post(f"/v1/{path}", json=body | {"prompt_logprobs": 1} | wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs"), wrong


def test_echo_and_prompt_logprobs_agree_on_a_number(scoring: httpx.Client) -> None:
    body = {"prompt": TEXT, "max_tokens": 1, "echo": True, "logprobs": 2, "prompt_logprobs": 3}
    assert "give one number" in scoring.post("/v1/completions", json=body).json()["error"]["message"]
    both = scoring.post("/v1/completions", json=body | {"prompt_logprobs": 2}).json()["choices"][0]
    assert len(both["prompt_logprobs"]) == len(both["logprobs"]["tokens"]) - 1
