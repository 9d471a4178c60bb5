"""OpenAI's own client against the server, over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from typing import Any

import httpx
import openai
import pytest
from effort import examples, trials
from held import Held
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_serve.config.model import ModelConfig
from exl_serve.stream.answer_queue import AnswerQueue
from exl_serve.stream.events import AnswerEvent, Error
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import until

STORY: list[Any] = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def joined(chunks: list[Any]) -> dict[str, Any]:
    """A stream's chunks as one answer."""
    found: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            one = found.setdefault(choice.index, {"content": "", "finish": None, "logprobs": []})
            assert one["finish"] is None, "nothing follows the end of a choice"
            one["content"] += choice.delta.content or ""
            if choice.logprobs is not None:
                one["logprobs"] += [(entry.token, entry.logprob) for entry in choice.logprobs.content]
            one["finish"] = choice.finish_reason
    return {"choices": [found[i] for i in sorted(found)], "usage": usage}


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fable", "scripted"]
    assert client.models.retrieve("fable").created > 0
    with pytest.raises(openai.NotFoundError, match="there is: fable, scripted"):
        client.models.retrieve("gpt")


@examples(12, 3, [HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 3),
    seed=st.integers(0, 2**40),
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    max_tokens=st.integers(1, 40),
    extra=st.sampled_from([{}, {"top_p": 0.5}, {"stop": ["the", "."]}, {"presence_penalty": 1.0}, {"top_k": 3}]),
)
def test_a_stream_equals_the_whole_answer(
    client: openai.OpenAI, n: int, seed: int, temperature: float, max_tokens: int, extra: dict[str, Any]
) -> None:
    own = {"top_k": extra.pop("top_k")} if "top_k" in extra else {}
    asked: dict[str, Any] = {"model": "fable", "messages": STORY, "n": n, "seed": seed, "temperature": temperature}
    asked |= {"max_tokens": max_tokens, "logprobs": True, "extra_body": own, **extra}
    whole = client.chat.completions.create(**asked)
    stream = joined(list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})))
    for choice, streamed in zip(whole.choices, stream["choices"], strict=True):
        assert streamed["content"] == choice.message.content
        assert streamed["finish"] == choice.finish_reason
        assert choice.logprobs is not None
        assert streamed["logprobs"] == [(one.token, one.logprob) for one in choice.logprobs.content or []]
    assert whole.usage is not None
    assert stream["usage"].completion_tokens == whole.usage.completion_tokens
    assert stream["usage"].prompt_tokens == whole.usage.prompt_tokens


@examples(10, 3, [HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**40), temperature=st.sampled_from([0.0, 0.8]), max_tokens=st.integers(1, 30))
def test_the_library_s_tokens(
    client: openai.OpenAI, fable: EngineThread, seed: int, temperature: float, max_tokens: int
) -> None:
    answer = client.completions.create(
        model="fable", prompt="Once upon a time", seed=seed, temperature=temperature, max_tokens=max_tokens
    )
    generator = ExLlamaV2DynamicGenerator(
        fable.generator.model,
        type(fable.generator.cache)(fable.generator.model, max_seq_len=1024),
        fable.generator.tokenizer,
    )
    neutral = ExLlamaV2Sampler.Settings(temperature=temperature, top_k=0, top_p=0, token_repetition_penalty=1.0)
    ids = fable.generator.tokenizer.encode("Once upon a time", add_bos=True)
    job = ExLlamaV2DynamicJob(
        ids, max_tokens, gen_settings=neutral, seed=seed, stop_conditions=list(fable.card.eos_ids)
    )
    generator.enqueue(job)
    text = ""
    while generator.num_remaining_jobs():
        text += "".join(result.get("text", "") for result in generator.iterate())
    assert answer.choices[0].text == text


def test_a_seed_repeats_and_is_reported(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="fable", prompt="A", temperature=1.0, max_tokens=20)
    seed = int(raw.headers["x-exl-seed"])
    again = client.completions.create(model="fable", prompt="A", temperature=1.0, max_tokens=20, seed=seed)
    assert again.choices[0].text == raw.parse().choices[0].text
    assert raw.headers["x-request-id"].startswith("req-")


def test_usage_tells_what_was_cached(client: openai.OpenAI) -> None:
    text = "The fox and the crow met at the river. " * 30
    first, second = (client.completions.create(model="fable", prompt=text, max_tokens=1).usage for _ in range(2))
    assert first is not None
    assert second is not None
    assert second.prompt_tokens_details is not None
    assert (second.prompt_tokens_details.cached_tokens or 0) >= 256
    assert first.prompt_tokens == second.prompt_tokens


def test_salts_share_no_cache(client: openai.OpenAI) -> None:
    text = "The owl and the mouse met at the mill. " * 30

    def cached(**extra: str) -> int:
        usage = client.completions.create(model="fable", prompt=text, max_tokens=1, extra_body=extra).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert [cached(cache_salt="a"), cached(cache_salt="b")] == [0, 0]
    assert cached() < 256, "no page of theirs; an earlier prompt without a salt may begin alike"
    assert cached(cache_salt="a") >= 256


def test_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="fable",
        messages=STORY,
        max_tokens=120,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert set(found) == {"name", "age"}
    assert answer.choices[0].finish_reason == "stop"


def test_guided_output_by_other_servers_names(client: openai.OpenAI) -> None:
    def ask(**extra: Any) -> str:
        body: dict[str, Any] = {"model": "fable", "messages": STORY, "max_tokens": 40, "seed": 2, "extra_body": extra}
        return client.chat.completions.create(**body).choices[0].message.content or ""

    assert ask(guided_choice=["yes", "no"]) in ("yes", "no")
    assert ask(guided_regex="[0-9]{3}").isdecimal()
    assert ask(structured_outputs={"grammar": 'start: "a" | "b"'}) in ("a", "b")
    assert ask(grammar_string='root ::= "x" "y"') == "xy"


def test_logit_bias_and_logprobs(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="fable", prompt="Once", max_tokens=1, temperature=0, logprobs=3)
    shown = plain.choices[0].logprobs
    assert shown is not None
    assert shown.tokens == [plain.choices[0].text]
    assert shown.top_logprobs is not None
    best = shown.top_logprobs[0]
    assert shown.token_logprobs == [max(best.values())]
    assert len(best) == 3
    banned = client.completions.create(
        model="fable",
        prompt="Once",
        max_tokens=1,
        temperature=0,
        logit_bias={str(_first_id(client, "Once")): -100},
        logprobs=0,
    )
    assert banned.choices[0].text != plain.choices[0].text


def _first_id(client: openai.OpenAI, prompt: str) -> int:
    answer = client.completions.create(
        model="fable", prompt=prompt, max_tokens=1, temperature=0, extra_body={"return_token_ids": True}
    )
    extra = answer.choices[0].model_extra
    assert extra is not None
    return int(extra["token_ids"][0])


def test_prompts_of_every_kind(client: openai.OpenAI, fable: EngineThread) -> None:
    ids = fable.generator.tokenizer.encode_ids("Once upon a time", add_bos=True)
    asked: dict[str, Any] = {"model": "fable", "max_tokens": 8, "temperature": 0}
    text = client.completions.create(**asked, prompt="Once upon a time").choices[0].text
    assert client.completions.create(**asked, prompt=ids).choices[0].text == text
    both = client.completions.create(**asked, prompt=["Once upon a time", "The"], n=2, echo=True)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text == "Once upon a time" + text
    assert client.completions.create(**asked, prompt=[ids, ids]).choices[1].text == text
    assert len(client.completions.create(**asked, prompt=ids, n=2, best_of=2).choices) == 2
    with pytest.raises(openai.BadRequestError, match="best_of is 3 and n is 2") as caught:
        client.completions.create(**asked, prompt=ids, n=2, best_of=3)
    assert caught.value.param == "best_of"


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "there is: fable"),
        ({"model": ""}, openai.BadRequestError, "model is missing; it must be one of fable"),
        ({"temperature": 9}, openai.BadRequestError, "a number from 0 to 5"),
        ({"temperature": "hot"}, openai.BadRequestError, "a number from 0 to 5"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens is 0"),
        ({"max_tokens": 5000}, openai.BadRequestError, "context of 1024 tokens"),
        ({"n": 99}, openai.BadRequestError, "at most 8"),
        ({"messages": []}, openai.BadRequestError, "at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, openai.BadRequestError, "robot"),
        ({"messages": [{"content": "x"}]}, openai.BadRequestError, "the role is missing; it must be one of system"),
        ({"top_logprobs": 2}, openai.BadRequestError, "needs logprobs"),
        ({"logit_bias": {"99999": 1}}, openai.BadRequestError, "vocabulary"),
        ({"stop": [""]}, openai.BadRequestError, "stop"),
        ({"store": True}, openai.BadRequestError, "not offered"),
        ({"response_format": {"type": "json_schema"}}, openai.BadRequestError, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
         openai.BadRequestError, "no"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
         openai.BadRequestError, "must be an object"),
        ({"prompt_cache_key": 5}, openai.BadRequestError, "prompt_cache_key is 5"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "for streams"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]},
         openai.BadRequestError, "takes no images"),
        ({"extra_body": {"repeat_penalty": 1.1, "repetition_penalty": 1.2}}, openai.BadRequestError, "two values"),
    ],
)  # fmt: skip
def test_refusals(client: openai.OpenAI, change: dict[str, Any], kind: type[Exception], says: str) -> None:
    asked: dict[str, Any] = {"model": "fable", "messages": STORY, "max_tokens": 4} | change
    with pytest.raises(kind, match=says) as caught:
        client.chat.completions.create(**asked)
    assert set(caught.value.body) == {"message", "type", "param", "code"}  # type: ignore[attr-defined]


NOTE: Any = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Write something down.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "maxLength": 20}, "stars": {"enum": [1, 2, 3]}},
            "required": ["text", "stars"],
            "additionalProperties": False,
        },
    },
}


def test_the_bundled_model_takes_tools(client: openai.OpenAI) -> None:
    """Its template shows them, so that the first server that somebody starts can be tried with them."""
    asked: dict[str, Any] = {"model": "fable", "messages": STORY, "tools": [NOTE], "max_tokens": 90, "seed": 2}
    whole = client.chat.completions.create(**asked, tool_choice="required")
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, set(arguments), arguments["stars"] in (1, 2, 3)) == ("note", {"text", "stars"}, True)
    streamed, names, finish = "", [], ""
    for chunk in client.chat.completions.create(**asked, tool_choice="required", stream=True):
        for one in chunk.choices:
            finish = one.finish_reason or finish
            for part in one.delta.tool_calls or []:
                assert part.function is not None
                names += [part.function.name] if part.function.name else []
                streamed += part.function.arguments or ""
    assert (names, streamed, finish) == (["note"], call.function.arguments, "tool_calls")
    free = client.chat.completions.create(**asked)
    assert free.choices[0].message.content
    again = [*STORY, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "written"}]
    answer = client.chat.completions.create(**asked | {"messages": again})
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert free.usage is not None
    assert answer.usage.prompt_tokens > free.usage.prompt_tokens


def test_only_allowed_tools_are_called(client: openai.OpenAI) -> None:
    """The prompt shows all tools, so that it stays the same while a program allows some of them at a time."""
    tools = [NOTE, {"type": "function", "function": {"name": "stop"}}]
    asked: dict[str, Any] = {"model": "fable", "messages": STORY, "tools": tools, "max_tokens": 90}
    asked["parallel_tool_calls"] = False

    def allowed(mode: str, *names: str) -> Any:
        named = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}

    every = client.chat.completions.create(**asked, tool_choice="auto")
    for name in ("note", "stop"):
        for seed in range(trials(3, 1)):
            answer = client.chat.completions.create(**asked, seed=seed, tool_choice=allowed("required", name))
            (call,) = answer.choices[0].message.tool_calls or []
            assert call.type == "function"
            assert call.function.name == name
    free = client.chat.completions.create(**asked, seed=1, tool_choice=allowed("auto", "stop"))
    assert free.choices[0].message.tool_calls is None
    assert free.usage is not None
    assert every.usage is not None
    assert free.usage.prompt_tokens == every.usage.prompt_tokens
    function = {"type": "function", "name": "stop"}
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [function]}
    shown: Any = [function | {"parameters": {}, "strict": False}]
    response = client.responses.create(model="fable", input="Hi", tools=shown, tool_choice=choice)
    assert {one.type for one in response.output} == {"function_call"}
    assert response.to_dict()["tool_choice"] == choice
    wrongs: list[Any] = [allowed("none", "note"), allowed("auto"), allowed("auto", "sing"), {"type": "allowed_tools"}]
    for wrong in wrongs:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**asked, tool_choice=wrong)
        assert caught.value.param == "tool_choice"


def test_functions_are_answered_in_their_own_shape(client: openai.OpenAI) -> None:
    """Programs of 2023 read `function_call`, and send it back with a message of the role `function`."""
    new: dict[str, Any] = {"model": "fable", "messages": STORY, "max_tokens": 90, "seed": 2}
    old = new | {"functions": [NOTE["function"]]}
    of_tools = client.chat.completions.create(**new, tools=[NOTE], tool_choice="required").choices[0].message
    (call,) = of_tools.tool_calls or []
    assert call.type == "function"
    (choice,) = client.chat.completions.create(**old, function_call={"name": "note"}).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("function_call", None)
    made = choice.message.function_call
    assert made is not None
    assert (made.name, made.arguments) == ("note", call.function.arguments)
    names, streamed, finish = [], "", ""
    for chunk in client.chat.completions.create(**old, function_call={"name": "note"}, stream=True):
        for one in chunk.choices:
            finish = one.finish_reason or finish
            assert one.delta.tool_calls is None
            if (part := one.delta.function_call) is not None:
                names += [part.name] if part.name else []
                streamed += part.arguments or ""
    assert (names, streamed, finish) == (["note"], made.arguments, "function_call")

    written: dict[str, Any] = {"role": "tool", "tool_call_id": call.id, "content": "written"}
    after_tools = client.chat.completions.create(
        **new | {"messages": [*STORY, of_tools.model_dump(), written]}, tools=[NOTE]
    )
    written = {"role": "function", "name": "note", "content": "written"}
    after = client.chat.completions.create(**old | {"messages": [*STORY, choice.message.model_dump(), written]})
    assert after.choices[0].message.content == after_tools.choices[0].message.content
    assert after.usage is not None
    assert after_tools.usage is not None
    assert after.usage.prompt_tokens == after_tools.usage.prompt_tokens


def test_a_model_without_a_format_of_calls_takes_no_tools(fable: EngineThread) -> None:
    live = LiveServer({"fable": fable}, [ModelConfig(id="fable", path=fable.card.folder, family="none")])
    try:
        asked = openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0)
        with pytest.raises(openai.APIStatusError, match="name it as `family`") as caught:
            asked.chat.completions.create(model="fable", messages=STORY, tools=[NOTE], max_tokens=4)
        assert caught.value.status_code == 501
        assert asked.chat.completions.create(
            model="fable", messages=STORY, tools=[NOTE], tool_choice="none", max_tokens=4
        )
    finally:
        live.close()


def test_unknown_fields_are_named(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="fable", messages=STORY, max_tokens=2, extra_body={"frobnicate": 1, "top_k": 0, "best_of": 1}
    )
    assert raw.headers["x-exl-ignored"] == "frobnicate"


def test_hints_that_change_no_answer_are_accepted(client: openai.OpenAI) -> None:
    """Programs send them to every server: to refuse them would refuse the programs."""
    hints: dict[str, Any] = {"prompt_cache_key": "chat 1", "safety_identifier": "somebody", "user": "somebody"}
    chat = client.chat.completions.with_raw_response.create(model="fable", messages=STORY, max_tokens=2, **hints)
    told = client.responses.with_raw_response.create(model="fable", input="x", max_output_tokens=2, **hints)
    text = client.completions.with_raw_response.create(
        model="fable", prompt="x", max_tokens=2, extra_body={"prompt_cache_key": "x", "safety_identifier": "y"}
    )
    for raw in (chat, told, text):
        assert "x-exl-ignored" not in raw.headers


@pytest.mark.parametrize("streamed", [True, False])
def test_a_deadline_in_the_middle_of_a_call_is_an_error(
    client: openai.OpenAI, scripted: EngineThread, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    """Neither a finished call nor a finish reason is invented, and the engine holds nothing of the request."""
    monkeypatch.setattr(scripted.host, "step_floor", lambda jobs: 0.01)  # the call takes longer than the deadline
    endless = {"type": "object", "properties": {"t": {"type": "string", "minLength": 4000}}, "required": ["t"]}
    asked: dict[str, Any] = {
        "model": "scripted",
        "messages": STORY,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": endless}}],
        "tool_choice": "required",
        "stream": streamed,
        "extra_headers": {"x-exl-timeout-ms": "700"},
    }
    ends: list[Any] = []

    def read() -> None:
        for chunk in client.chat.completions.create(**asked):
            ends.extend(choice.finish_reason for choice in chunk.choices if choice.finish_reason)

    with pytest.raises(openai.APIError) as caught:
        read()
    assert caught.value.code == "deadline_exceeded"
    assert not ends
    until(lambda: not scripted.host.requests() and not scripted.generator.snapshot().pinned_pages)


def test_leaving_in_the_middle_frees_everything(
    client: openai.OpenAI, server: LiveServer, scripted: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that were made for a client that left are in the log and in the metrics."""
    generator = scripted.generator
    logged: list[Any] = []
    assert server.state is not None

    def log(fields: Mapping[str, Any]) -> None:
        if fields["model"] == "scripted":  # a request of the test before may be logged after its answer
            logged.append(fields)

    monkeypatch.setattr(server.state, "log_request", log)
    counted: list[float] = []

    def count(name: str, amount: float = 1.0, **labels: str) -> None:
        if name == "exl_generation_tokens_total" and labels["model_name"] == "scripted":
            counted.append(amount)

    monkeypatch.setattr(server.state.meter, "count", count)
    held = Held(scripted, monkeypatch)
    for _ in range(3):
        held.steps = 20
        stream = client.completions.create(
            model="scripted", prompt="x y z", max_tokens=900, stream=True, extra_body={"ignore_eos": True}, n=3
        )
        next(iter(stream))
        stream.close()
        # Jobs that are not cancelled yet would take the steps of the next ones.
        until(lambda: not generator.num_remaining_jobs())
    until(lambda: not generator.referenced_pages)
    until(lambda: len(logged) == 3)
    assert all((one["status"], one["finish"]) == (499, "abort") for one in logged)
    assert all(one["completion_tokens"] >= 1 for one in logged)
    assert counted == [one["completion_tokens"] for one in logged]


def test_a_whole_answer_whose_client_leaves_is_cancelled(
    server: LiveServer, scripted: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    Held(scripted, monkeypatch, steps=5)
    short = 0.3  # seconds until the client gives up, which is what is tested
    impatient = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", timeout=short, max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        impatient.completions.create(model="scripted", prompt="x", max_tokens=900, n=8, extra_body={"ignore_eos": True})
    until(lambda: not scripted.generator.num_remaining_jobs())


def test_the_operator_cancels_all_of_a_request(
    server: LiveServer, scripted: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(scripted, monkeypatch, steps=5)
    body = {"model": "scripted", "prompt": ["x", "y"], "n": 2, "max_tokens": 900, "ignore_eos": True}
    answers: list[httpx.Response] = []

    def ask() -> None:
        headers = {"x-request-id": "mine"}
        answers.append(httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120))

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: len(httpx.get(f"{server.url}/v1/requests", timeout=120).json()["data"]) == 2)
    assert httpx.delete(f"{server.url}/v1/requests/mine", timeout=120).json()["cancelled"]
    thread.join()
    held.release()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (409, "cancelled")
    until(lambda: not scripted.generator.num_remaining_jobs())
    assert httpx.delete(f"{server.url}/v1/requests/mine", timeout=120).status_code == 404


def test_an_error_in_the_middle_ends_the_stream(
    client: openai.OpenAI, scripted: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter(range(10**9))
    iterate = scripted.generator.iterate_columns

    def failing() -> Any:
        if next(steps) > 20:
            raise RuntimeError("a device error, say")
        return iterate()

    monkeypatch.setattr(scripted.generator, "iterate_columns", failing)
    seen: list[Any] = []
    with pytest.raises(openai.APIError, match="engine failed"):  # noqa: PT012
        stream = client.completions.create(
            model="scripted", prompt="x", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        seen.extend(chunk for chunk in stream)
    assert seen


def test_an_error_that_comes_with_the_first_text(
    client: openai.OpenAI, scripted: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text comes once, role first, and the prompt is counted once."""
    steps, iterate = iter(range(10**9)), scripted.generator.iterate_columns
    put, take, failed = AnswerQueue.put, AnswerQueue.take, set[AnswerQueue]()

    def failing() -> Any:
        if next(steps) > 10:
            raise RuntimeError("a device error, say")
        return iterate()

    def noted(queue: AnswerQueue, event: AnswerEvent) -> None:
        put(queue, event)
        if isinstance(event, Error):
            failed.add(queue)

    async def late(queue: AnswerQueue, seconds: float | None = None) -> Any:
        while queue not in failed:
            await asyncio.sleep(0.01)
        return await take(queue, seconds)

    monkeypatch.setattr(scripted.generator, "iterate_columns", failing)
    monkeypatch.setattr(AnswerQueue, "put", noted)
    monkeypatch.setattr(AnswerQueue, "take", late)
    chunks: list[Any] = []
    asked: dict[str, Any] = {"model": "scripted", "messages": STORY, "max_tokens": 500, "stream": True}
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    with pytest.raises(openai.APIError, match="engine failed"):
        chunks.extend(client.chat.completions.create(**asked, stream_options=options, extra_body={"ignore_eos": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.role for chunk in chunks[1:]] == [None] * (len(chunks) - 1)
    assert len(chunks) == 2
    assert chunks[1].usage.completion_tokens <= 11


def test_sixty_four_at_once_get_what_each_gets_alone(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        made = client.completions.create(model="fable", prompt="The", seed=seed, temperature=1.0, max_tokens=12)
        return made.choices[0].text

    alone = {seed: ask(seed) for seed in range(8)}
    found: list[tuple[int, str]] = []
    threads = [threading.Thread(target=lambda s=s: found.append((s % 8, ask(s % 8)))) for s in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 24
    assert all(text == alone[seed] for seed, text in found)


def test_tokenize_and_back(server: LiveServer, fable: EngineThread) -> None:
    with httpx.Client(base_url=server.url) as http:
        made = http.post("/tokenize", json={"model": "fable", "prompt": "Once upon a time"}).json()
        assert made["tokens"] == fable.generator.tokenizer.encode_ids("Once upon a time", add_bos=True)
        assert made["count"] == len(made["tokens"])
        back = http.post("/detokenize", json={"model": "fable", "tokens": made["tokens"][1:]}).json()
        assert back["prompt"] == "Once upon a time"
        long = http.post("/detokenize", json={"model": "fable", "tokens": made["tokens"][1:] * 1500}).json()
        assert long["prompt"] == "Once upon a time" * 1500
        bad = http.post("/detokenize", json={"model": "fable", "tokens": [*made["tokens"] * 1500, 1 << 20]})
        assert "tokens has token 1048576" in bad.json()["error"]["message"]
        shown = http.post("/apply-template", json={"model": "fable", "messages": STORY}).json()["prompt"]
        counted = http.post("/tokenize", json={"model": "fable", "messages": STORY}).json()
        answer = http.post("/v1/chat/completions", json={"model": "fable", "messages": STORY, "max_tokens": 1}).json()
        assert counted["count"] == answer["usage"]["prompt_tokens"]
        assert "Tell me a story" in shown
