"""Random requests over all fields: however one is sent, and whatever else runs, the answer is the library's.

Alone, streamed, among others, without cached pages and with drafts the answers are equal to the last bit, which a CPU
promises (docs/reference/reproducibility.md).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from effort import trials

from exl_filters.grammar import ExLlamaV2GrammarFilter
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.sampling import SparseBias
from exl_generate.testing.small import AsAsked
from exl_serve.config.model import ModelConfig
from exl_serve.request.sampling import seeds_of
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS

AT_ONCE = 64
WORDS = (
    "Once upon a time",
    "The fox and the crow",
    "A",
    "Tell me about the river.",
    'She said: "no',
    "1, 2, 3",
    "é — 中",
)
LONG = "The fox and the crow met at the river. " * 40
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["n"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": " the", "schema": SCHEMA, "end": "."}], "triggers": [" the"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("count", "look")]
OPENS_REASONING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
SAMPLING: dict[str, Any] = {
    "temperature": lambda r: r.choice([0.0, 0.3, 1.0, 1.7]),
    "top_p": lambda r: r.choice([0.3, 0.9]),
    "top_k": lambda r: r.choice([1, 5, 60]),
    "min_p": lambda r: r.choice([0.02, 0.2]),
    "top_a": lambda r: 0.1,
    "typical": lambda r: 0.8,
    "tfs": lambda r: 0.9,
    "skew": lambda r: r.choice([-0.5, 0.5]),
    "presence_penalty": lambda r: r.choice([-0.5, 1.0]),
    "frequency_penalty": lambda r: r.choice([-0.2, 0.7]),
    "repetition_penalty": lambda r: r.choice([1.05, 1.3]),
    "repetition_range": lambda r: r.choice([4, 64]),
    "temperature_last": lambda r: True,
    "smoothing_factor": lambda r: 0.3,
    "min_temp": lambda r: 0.2,
    "max_temp": lambda r: r.choice([0.8, 1.5]),
    "temp_exponent": lambda r: r.choice([0.7, 1.4]),
    "mirostat_mode": lambda r: r.choice([1, 2]),
    "mirostat_tau": lambda r: r.choice([2.0, 5.0]),
    "mirostat_eta": lambda r: 0.3,
    "repetition_decay": lambda r: 32,
    "xtc_probability": lambda r: 0.5,
    "xtc_threshold": lambda r: r.choice([0.05, 0.3]),
    "dry_multiplier": lambda r: 0.8,
    "dry_base": lambda r: 1.4,
    "dry_allowed_length": lambda r: 1,
    "dry_range": lambda r: 40,
    "allowed_token_ids": lambda r: r.sample(range(3, 600), 300),
    "banned_tokens": lambda r: r.sample(range(3, 600), 100),
    "logit_bias": lambda r: {str(r.randrange(3, 400)): r.choice([-100, -2, 5]) for _ in range(3)},
}
"""Fields of sampling, each with a random value."""
NAMES = {
    "presence_penalty": "token_presence_penalty",
    "frequency_penalty": "token_frequency_penalty",
    "repetition_penalty": "token_repetition_penalty",
    "repetition_range": "token_repetition_range",
    "repetition_decay": "token_repetition_decay",
}
"""Fields that the library's settings name otherwise."""


def sampled(r: random.Random) -> dict[str, Any]:
    return {name: SAMPLING[name](r) for name in r.sample(sorted(SAMPLING), r.randrange(5))}


def common(r: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"seed": r.randrange(1 << 40), "n": r.choice([1, 1, 1, 2, 3]), **sampled(r)}
    if r.random() < 0.3:
        body["stop"] = r.sample([" the", ".", "e ", "\n", "fox", " a"], r.randrange(1, 4))
    if r.random() < 0.15:
        body["stop_token_ids"] = r.sample(range(3, 400), 20)
    if r.random() < 0.2:
        body["min_tokens"] = r.randrange(1, 5)
    if r.random() < 0.2:
        body["ignore_eos"] = True
    if "stop" in body and r.random() < 0.3:
        body["include_stop_str_in_output"] = True
    if r.random() < 0.15:
        body["skip_special_tokens"] = False
    if r.random() < 0.15:
        body["stream_interval"] = r.choice([2, 7])
    if r.random() < 0.15:
        body["banned_strings"] = r.sample([" and", "fox", "the", " was"], 2)
    if r.random() < 0.3:
        body["return_token_ids"] = True
    return body


def completion(r: random.Random) -> dict[str, Any]:
    body = {"model": "fable", "max_tokens": r.randrange(5, 25), **common(r)}
    text = r.choice([*WORDS, LONG + r.choice(WORDS)])
    body["prompt"] = text
    if r.random() < 0.15:
        body["prompt"] = [r.randrange(3, 400) for _ in range(r.randrange(1, 300))]
    if r.random() < 0.2:
        body["truncate_prompt_tokens"] = r.choice([5, 40])
    if r.random() < 0.3:
        body["logprobs"] = r.randrange(4)
    plain = isinstance(body["prompt"], str) and not {"truncate_prompt_tokens", "skip_special_tokens"} & body.keys()
    if plain and r.random() < 0.25:
        body["echo"] = True
    elif r.random() < 0.2:
        body["token_healing"] = True
    if r.random() < 0.15:
        body |= {"negative_prompt": "A sad story", "cfg_scale": 1.5}
    form = r.random()
    if form < 0.1:
        body["guided_regex"] = "[a-z]{2,9}, [0-9]{1,3}!"
    elif form < 0.2:
        body["guided_json"] = SCHEMA
    elif form < 0.3:
        body["guided_choice"] = ["yes", "no", "perhaps so"]
    elif form < 0.35:
        body["guided_grammar"] = 'start: /[a-z]{1,6}/ (" and " /[a-z]{1,6}/)*'
    elif form < 0.4:
        body["structured_outputs"] = r.choice([{"regex": "[A-Z][a-z]+"}, {"json": SCHEMA}])
    elif form < 0.45:
        body["structured_outputs"] = {"structural_tag": TAG}
    return body


def chat(r: random.Random) -> dict[str, Any]:
    body = {"model": r.choice(["hermes", "hermes", "thinks"]), "max_tokens": r.randrange(8, 50), **common(r)}
    messages = [{"role": "system", "content": "Be brief."}] if r.random() < 0.3 else []
    body["messages"] = [*messages, {"role": "user", "content": r.choice([*WORDS, LONG])}]
    # Where markers are text and a step has several tokens, it is unknown which of them ends the reasoning.
    if body["model"] != "thinks" and r.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": r.randrange(4)}
    if r.random() < (0.5 if body["model"] == "thinks" else 0.1):
        body["reasoning_budget"] = r.randrange(12)
    form = r.random()
    if form < 0.3:
        body |= {
            "tools": TOOLS,
            "tool_choice": r.choice(["auto", "none", "required", {"type": "function", "function": {"name": "look"}}]),
        }
        body["parallel_tool_calls"] = r.random() < 0.5
    if form < 0.15 or 0.3 < form < 0.45:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    return body


@pytest.fixture(scope="module")
def http(fable: EngineThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """One model as `fable`, as `hermes` with tool calls, as `thinks` with a template that begins the reasoning, and
    with drafts as the same names with `-drafts`.
    """
    drafting = EngineThread(
        ModelConfig(id="drafts", path=fable.card.folder, device="cpu", max_batch_size=8, ngram=True)
    )
    drafting.generator.drafter.length = AsAsked(drafting.generator.num_draft_tokens)  # whatever it costs
    template = tmp_path_factory.mktemp("templates") / "think.jinja"
    template.write_text(OPENS_REASONING)
    options: dict[str, dict[str, Any]] = {
        "fable": {},
        "hermes": {"family": "hermes"},
        "thinks": {"family": "hermes", "template": str(template)},
    }
    engines = {id + end: one for end, one in (("", fable), ("-drafts", drafting)) for id in options}
    models = [
        ModelConfig(id=id + end, path=fable.card.folder, **more)
        for end in ("", "-drafts")
        for id, more in options.items()
    ]
    live = LiveServer(engines, models)
    with httpx.Client(base_url=live.url, timeout=HANG_SECONDS) as client:
        yield client
    live.close()
    drafting.close()


def path_of(body: dict[str, Any]) -> str:
    return "/v1/completions" if "prompt" in body else "/v1/chat/completions"


def clean(answer: dict[str, Any]) -> Any:
    """Return the content of an answer, without names, times, ids of calls, and what was cached or guessed."""
    if "error" in answer:
        return answer["error"]["code"]
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls") or ():
            call.pop("id")
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return answer["choices"], usage, answer.get("prompt_token_ids")


def whole(http: httpx.Client, body: dict[str, Any], **more: Any) -> Any:
    return clean(http.post(path_of(body), json=body | more).json())


def streamed(http: httpx.Client, body: dict[str, Any]) -> Any:
    """Return the answer that the chunks of the stream amount to."""
    extra = {"stream": True, "stream_options": {"include_usage": True}}
    answer = http.post(path_of(body), json=body | extra)
    if answer.headers["content-type"] == "application/json":
        return clean(answer.json())
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    if "error" in chunks[-1]:
        return chunks[-1]["error"]["code"]
    found = [joined([c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == i]) for i in range(body["n"])]
    if "top_logprobs" in body:
        for choice in found:  # a stream of calls alone has no place for an empty list
            choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
    answered = {"choices": found, "usage": chunks[-1]["usage"]}
    for chunk in chunks:
        answered |= {name: ids for name, ids in chunk.items() if name == "prompt_token_ids"}
    return clean(answered)


def joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    one: dict[str, Any] = {"index": pieces[0]["index"], "logprobs": None, "finish_reason": None, "stop_reason": None}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        delta = piece.get("delta", {})
        texts.append(piece.get("text") or delta.get("content") or "")
        thoughts.append(delta.get("reasoning_content") or "")
        for change in delta.get("tool_calls") or ():
            if "id" in change:
                assert change["index"] == len(calls)
                calls.append({"id": change["id"], "type": "function", "function": dict(change["function"])})
            else:
                calls[change["index"]]["function"]["arguments"] += change["function"]["arguments"]
        for name, values in (piece["logprobs"] or {}).items():
            own = one["logprobs"] = one["logprobs"] or {}
            own[name] = values if values is None else [*(own.get(name) or ()), *values]
        if "token_ids" in piece:
            one["token_ids"] = one.get("token_ids", []) + piece["token_ids"]
        one |= {name: ids for name, ids in piece.items() if name == "prompt_token_ids"}
        one["finish_reason"] = piece["finish_reason"] or one["finish_reason"]
        one["stop_reason"] = piece.get("stop_reason", one["stop_reason"])
    text = "".join(texts)
    if "text" in pieces[0]:
        return one | {"text": text}
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    return one | {"message": message | ({"tool_calls": calls} if calls else {})}


def as_response(body: dict[str, Any]) -> dict[str, Any]:
    """The same conversation for /v1/responses."""
    found = {name: value for name, value in body.items() if name not in ("messages", "max_tokens", "n")}
    if (shape := found.pop("response_format", None)) is not None:
        found["text"] = {"format": {"type": "json_schema", **shape["json_schema"]}}
    if "tools" in found:
        found["tools"] = [{"type": "function", **tool["function"]} for tool in found["tools"]]
    if isinstance(choice := found.get("tool_choice"), dict):
        found["tool_choice"] = {"type": "function", "name": choice["function"]["name"]}
    return found | {"input": body["messages"], "max_output_tokens": body["max_tokens"]}


def responded(http: httpx.Client, body: dict[str, Any]) -> Any:
    """Return the content of a response: reasoning, text, calls, number of tokens; or the code of its error."""
    answer = http.post("/v1/responses", json=as_response(body)).json()
    if answer.get("error"):
        return answer["error"]["code"]
    parts: dict[str, str] = {"reasoning": "", "message": ""}
    calls = []
    for item in answer["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
        else:
            parts[item["type"]] += "".join(one["text"] for one in item["content"])
    return *parts.values(), calls, answer["usage"]["output_tokens"]


def said(answer: Any) -> Any:
    """The same of an answer of chat with one choice."""
    if isinstance(answer, str):
        return answer
    (choice,), usage, _ = answer
    message = choice["message"]
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls") or ()]
    return message.get("reasoning_content", ""), message["content"] or "", calls, usage["completion_tokens"]


def library(
    fable: EngineThread, body: dict[str, Any], prompts: list[list[int]]
) -> list[tuple[str, int, list[int]]] | None:
    """Text, number of tokens and ids of each completion by jobs of the library, each in a generator of its own.

    `prompts`: the ids of the prompt, and of the negative one if there is one. None where a job fails.
    """
    tokenizer, model = fable.generator.tokenizer, fable.generator.model
    settings = ExLlamaV2Sampler.Settings(temperature=1.0, top_k=0, top_p=0.0, token_repetition_penalty=1.0)
    settings.token_repetition_range = -1
    for name in SAMPLING.keys() & body.keys() - {"logit_bias", "allowed_token_ids", "banned_tokens", "mirostat_mode"}:
        setattr(settings, NAMES.get(name, name), body[name])
    settings.mirostat = "mirostat_mode" in body
    bias = {
        int(token): float("-inf") if value == -100 else value for token, value in body.get("logit_bias", {}).items()
    }
    bias |= dict.fromkeys(body.get("banned_tokens", ()), float("-inf"))
    if "allowed_token_ids" in body:
        allowed = {token: bias.get(token, 0.0) for token in body["allowed_token_ids"]}
        settings.token_bias = SparseBias.of(allowed, rest=float("-inf"))
    elif bias:
        settings.token_bias = SparseBias.of(bias)
    settings.cfg_scale = body.get("cfg_scale")
    inputs = [torch.tensor([ids]) for ids in prompts]
    other = body.get("structured_outputs", {})
    given = {
        "regex": body.get("guided_regex", other.get("regex")),
        "json_schema": body.get("guided_json", other.get("json")),
        "choice": body.get("guided_choice"),
        "lark": body.get("guided_grammar"),
    }
    grammar = {name: value for name, value in given.items() if value is not None}
    found = []
    for seed in seeds_of(body["seed"], body["n"]):
        job = ExLlamaV2DynamicJob(
            inputs if len(inputs) > 1 else inputs[0],
            body["max_tokens"],
            body.get("min_tokens", 0),
            gen_settings=settings,
            seed=seed,
            stop_conditions=[
                *body.get("stop", ()),
                *body.get("stop_token_ids", ()),
                *(() if body.get("ignore_eos") else fable.card.eos_ids),
            ],
            banned_strings=body.get("banned_strings"),
            token_healing=body.get("token_healing", False),
            decode_special_tokens=body.get("skip_special_tokens") is False,
            filters=[ExLlamaV2GrammarFilter(model, tokenizer, on_complete="end", **grammar)] if grammar else [],
        )
        generator = ExLlamaV2DynamicGenerator(model, type(fable.generator.cache)(model, max_seq_len=2048), tokenizer)
        generator.enqueue(job)
        results: list[dict[str, Any]] = []
        while generator.num_remaining_jobs():
            results += generator.iterate()
        if "exception" in results[-1]:
            return None
        stop = results[-1].get("eos_triggering_string") if body.get("include_stop_str_in_output") else None
        ids = [int(one) for result in results if "token_ids" in result for one in result["token_ids"].flatten()]
        found.append((job.full_completion + (stop or ""), results[-1]["new_tokens"], ids))
    return found


def has_library_call(body: dict[str, Any]) -> bool:
    """Whether the library alone gives the text: structural tags, tools and a budget are the server's filters."""
    own = {"tools", "response_format", "reasoning_budget"}
    return not own & body.keys() and "structural_tag" not in body.get("structured_outputs", {})


def check_library(http: httpx.Client, fable: EngineThread, body: dict[str, Any], answer: Any) -> None:
    """Compare an answer with the library's."""

    def ids(**text: Any) -> list[int]:
        found: list[int] = http.post("/tokenize", json={"model": body["model"], **text}).json()["tokens"]
        return found

    if "messages" in body:
        prompts = [ids(messages=body["messages"])]
    else:
        prompt = body["prompt"] if isinstance(body["prompt"], list) else ids(prompt=body["prompt"])
        most = body.get("truncate_prompt_tokens", len(prompt))
        if len(prompt) > most:
            front = [] if isinstance(body["prompt"], list) else prompt[:1]
            prompt = front + prompt[len(prompt) - most + len(front) :]
        prompts = [prompt, *([ids(prompt=body["negative_prompt"])] if "negative_prompt" in body else [])]
    expected = library(fable, body, prompts)
    if expected is None:
        assert isinstance(answer, str), body
        return
    choices, usage, _ = answer
    assert usage == {
        "prompt_tokens": usage["prompt_tokens"], "completion_tokens": sum(tokens for _, tokens, _ in expected)
    }, body  # fmt: skip
    for choice, (text, _, tokens) in zip(choices, expected, strict=True):
        if "return_token_ids" in body:
            assert choice["token_ids"] == tokens, body
        if "messages" in body:
            message = choice["message"]
            if "think>" not in text and "<tool" not in text:
                assert message.get("reasoning_content", "") + (message["content"] or "") == text, body
        else:
            assert choice["text"] == (body["prompt"] if body.get("echo") else "") + text, body


def check(http: httpx.Client, fable: EngineThread, bodies: list[dict[str, Any]]) -> None:
    alone = [whole(http, body) for body in bodies]
    assert sum(isinstance(one, str) for one in alone) <= len(bodies) // 4, "most of them have an answer"
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ways = {
            "streams": list(pool.map(lambda body: streamed(http, body), bodies)),
            "no cached pages": list(pool.map(lambda at: whole(http, at[1], cache_salt=f"s{at[0]}"), enumerate(bodies))),
            "drafts": list(pool.map(lambda body: whole(http, body, model=f"{body['model']}-drafts"), bodies)),
        }
    for name, found in ways.items():
        for body, one, other in zip(bodies, alone, found, strict=True):
            assert other == one, (name, body)
    for body, one in zip(bodies, alone, strict=True):
        if has_library_call(body):
            check_library(http, fable, body, one)
        if "messages" in body and body["n"] == 1 and "logprobs" not in body:
            assert responded(http, body) == said(one), body


def drawn(seed: int, count: int) -> list[dict[str, Any]]:
    r = random.Random(seed)
    return [r.choice([completion, chat])(r) for _ in range(count)]


def test_a_few_random_requests(http: httpx.Client, fable: EngineThread) -> None:
    check(http, fable, drawn(7, trials(16, 3)))


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_five_hundred_random_requests(http: httpx.Client, fable: EngineThread, part: int) -> None:
    check(http, fable, drawn(1000 + part, 50))
