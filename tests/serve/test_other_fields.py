"""Requests in the form in which clients of TabbyAPI, vLLM and llama.cpp send them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import httpx
import pytest

from exl_generate import bundled
from exl_serve.api.chat import FIELDS as CHAT
from exl_serve.api.completions import FIELDS as COMPLETIONS
from exl_serve.api.text import FolderText
from exl_serve.errors import ServeError
from exl_serve.metrics import NoMeter
from exl_serve.request.fields import IGNORED, UNSUPPORTED, read_fields
from exl_serve.request.responses import FIELDS as RESPONSES
from exl_serve.request.responses import OWN as RESPONSES_OWN
from exl_serve.testing.server import LiveServer

SILLYTAVERN: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_new_tokens": 12,
    "max_tokens": 12,
    "logprobs": 10,
    "temperature": 0,
    "top_p": 1,
    "typical_p": 1,
    "typical": 1,
    "sampler_seed": -1,
    "min_p": 0,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_k": 0,
    "skew": 0,
    "min_length": 0,
    "min_tokens": 0,
    "add_bos_token": True,
    "smoothing_factor": 0,
    "smoothing_curve": 1,
    "dry_allowed_length": 2,
    "dry_multiplier": 0.8,
    "dry_base": 1.75,
    "dry_sequence_breakers": '["\\n", ":", "\\"", "*"]',
    "dry_penalty_last_n": 0,
    "max_tokens_second": 0,
    "stopping_strings": ["\nUser:"],
    "stop": ["\nUser:"],
    "truncation_length": 1024,
    "ban_eos_token": False,
    "skip_special_tokens": True,
    "include_reasoning": False,
    "top_a": 0,
    "tfs": 1,
    "mirostat_mode": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "custom_token_bans": "7,8, 9",
    "banned_strings": [],
    "api_type": "tabby",
    "api_server": "http://127.0.0.1:8000/",
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
    "json_schema": None,
    "repeat_penalty": 1.2,
    "repeat_last_n": 0,
    "n_predict": 12,
    "num_predict": 12,
    "num_ctx": 1024,
    "mirostat": 0,
    "ignore_eos": False,
    "n_probs": 10,
    "rep_pen_slope": 1,
    "n": 1,
}
"""SillyTavern's request to TabbyAPI with its default settings, some of them switched on."""
MEANT: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 12,
    "logprobs": 10,
    "temperature": 0,
    "repetition_penalty": 1.2,
    "repetition_range": 0,
    "dry_multiplier": 0.8,
    "dry_allowed_length": 2,
    "dry_base": 1.75,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "stop": ["\nUser:"],
    "banned_tokens": [7, 8, 9],
    "temperature_last": True,
}
"""The same in the names of this server."""


def test_a_request_of_sillytavern_means_what_it_says(server: LiveServer) -> None:
    answers = [
        httpx.post(f"{server.url}/v1/completions", json={"model": "fable"} | body, timeout=120)
        for body in (SILLYTAVERN, MEANT)
    ]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    one, other = (answer.json()["choices"] for answer in answers)
    assert one == other
    ignored = answers[0].headers["x-exl-ignored"].split(",")
    assert not set(ignored) & COMPLETIONS.keys()


def test_the_metrics_count_ignored_fields_by_common_names(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: Counter[str] = Counter()

    class Counts(NoMeter):
        def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
            if name == "exl_ignored_fields_total":
                counted[labels["field"]] += int(amount)

    assert server.state is not None
    monkeypatch.setattr(server.state, "meter", Counts())
    for name in ("keep_alive", "keep_alive", "mine", 'a"b\nc', "x" * 1000):
        body = {"model": "fable", "prompt": "a", "max_tokens": 1, name: 1}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code == 200
    assert counted == {"keep_alive": 2, "other": 3}
    assert len(IGNORED) <= 64
    routes = (
        CHAT.keys() | {"messages", "functions", "function_call"},
        COMPLETIONS.keys() | {"prompt", "suffix"},
        RESPONSES.keys() | RESPONSES_OWN,
    )
    for name in IGNORED:  # some route knows nothing of it
        assert not all(name in route for route in routes), name
        assert name not in UNSUPPORTED


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ({"seed": -1}, {}),
        ({"seed": -2}, {"seed": -2}),
        ({"cfg_scale": 1}, {}),
        ({"guidance_scale": 1.0, "negative_prompt": "sad"}, {}),
        ({"negative_prompt": ""}, {}),
        ({"cfg_scale": 1.5, "negative_prompt": ""}, {"cfg_scale": 1.5, "negative_prompt": ""}),
        ({"grammar_string": ""}, {}),
        ({"regex_pattern": ""}, {}),
        ({"json_schema": ""}, {}),
        ({"json_schema": {}}, {"guided_json": {}}),
        ({"custom_token_bans": ""}, {"banned_tokens": ()}),
        ({"banned_tokens": "5,17"}, {"banned_tokens": (5, 17)}),
        ({"dry_sequence_breakers": "\n"}, {"dry_sequence_breakers": ("\n",)}),
        ({"dry_sequence_breakers": '"\\n", ":"'}, {"dry_sequence_breakers": ("\n", ":")}),
        ({"dry_sequence_breakers": "[]"}, {"dry_sequence_breakers": ()}),
        ({"dry_sequence_breakers": "["}, {"dry_sequence_breakers": ("[",)}),
        ({"dry_sequence_breakers": '"'}, {"dry_sequence_breakers": ('"',)}),
        ({"n_probs": 0}, {}),
        ({"n_probs": 0, "logprobs": 5}, {"logprobs": 5}),
        ({"allowed_tokens": ""}, {}),
        ({"dry_penalty_last_n": -1}, {"dry_range": -1}),
        ({"smoothing_curve": 2}, {}),
        ({"smoothing_curve": 2, "smoothing_factor": 0}, {"smoothing_factor": 0}),
    ],
)
def test_values_of_other_servers(sent: dict[str, Any], read: dict[str, Any]) -> None:
    assert read_fields(sent, COMPLETIONS) == (read, [])


@pytest.mark.parametrize(
    "sent",
    [
        {"banned_tokens": "5,x"},
        {"banned_tokens": "5,," * 20000},
        {"dry_sequence_breakers": "[1]"},
        {"dry_sequence_breakers": "[" * 60000},
    ],
)
def test_lists_that_are_none(sent: dict[str, Any]) -> None:
    with pytest.raises(ServeError) as caught:
        read_fields(sent, COMPLETIONS)
    assert (caught.value.status, (caught.value.param or "").partition("[")[0]) == (400, next(iter(sent)))


@pytest.mark.parametrize(
    ("name", "neutral", "other"),
    [
        ("best_of", 1, 2),
        ("spaces_between_special_tokens", True, False),
        ("logprob_token_ids", None, [5]),
        ("top_n_sigma", -1, 1.5),
        ("dynatemp_range", 0, 0.5),
        ("min_keep", 0, 2),
        ("t_max_predict_ms", 0, 500),
        ("post_sampling_probs", False, True),
        ("reasoning_format", "auto", "none"),
        ("lora", [], [{"id": 0, "scale": 0.5}]),
        ("response_prefix", "", "Sure:"),
        ("prompt_template", None, "alpaca"),
        ("prompt_embeds", None, "AAAA"),
        ("repetition_detection", None, {"max_pattern_size": 5}),
        ("adaptive_target", -0.01, 0.7),
        ("smoothing_curve", 1, 2),
        ("generate_window", None, 512),
        ("n_discard", 0, 64),
        ("n_cache_reuse", 0, 256),
        ("response_fields", [], ["content"]),
        ("return_tokens", False, True),
        ("thinking", None, {"type": "disabled"}),
    ],
)
def test_the_error_names_a_field_of_vllm_or_llama_cpp(name: str, neutral: Any, other: Any) -> None:
    assert read_fields({name: neutral}, CHAT) == ({}, [])
    with pytest.raises(ServeError) as caught:
        read_fields({"smoothing_factor": 0.3, name: other}, CHAT)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize(
    ("sent", "param", "code"),
    [
        ({"prompt": "x " * 3000}, "prompt", "context_length_exceeded"),
        ({"prompt": "", "add_special_tokens": False}, "prompt", "invalid_value"),
        ({"stop_token_ids": [99_999_999]}, "stop_token_ids", "token_id"),
        ({"banned_tokens": [99_999_999]}, "banned_tokens", "token_id"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias", "token_id"),
        ({"banned_tokens": [*range(5000)]}, "banned_tokens", "token_id"),
        ({"banned_tokens": [*range(2, 9)], "allowed_token_ids": [5, 8]}, "banned_tokens", "invalid_value"),
        ({"logit_bias": {"5": -100}, "allowed_token_ids": [5]}, "logit_bias", "invalid_value"),
    ],
)
def test_the_error_names_the_field_of_the_request(
    server: LiveServer, sent: dict[str, Any], param: str, code: str
) -> None:
    body = {"model": "fable", "prompt": "x", "max_tokens": 1} | sent
    error = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert param in error["message"]


def test_a_ban_of_the_whole_vocabulary_is_named(server: LiveServer) -> None:
    vocabulary = [*range(FolderText(str(bundled.default_model_dir())).vocab_size)]
    body = {"model": "fable", "prompt": "x", "max_tokens": 1, "banned_tokens": vocabulary}
    error = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["error"]
    assert (error["param"], error["code"]) == ("banned_tokens", "invalid_value")
    body["banned_tokens"] = vocabulary[1:]
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code == 200


OF_OPENAI = """audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
messages metadata modalities model n parallel_tool_calls prediction presence_penalty prompt_cache_key
prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store stream
stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options"""
OF_VLLM = """add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
chat_template_kwargs continue_final_message documents echo ignore_eos include_reasoning include_stop_str_in_output
kv_transfer_params length_penalty logits_processors media_io_kwargs min_p min_tokens mm_processor_kwargs priority
prompt_logprobs repetition_detection repetition_penalty return_token_ids return_tokens_as_token_ids
skip_special_tokens spaces_between_special_tokens stop_token_ids structured_outputs thinking_token_budget top_k
truncate_prompt_tokens use_beam_search vllm_xargs"""
OF_LLAMA_CPP = """cache_prompt dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers
dynatemp_exponent dynatemp_range grammar id_slot json_schema lora min_keep mirostat mirostat_eta mirostat_tau
n_cache_reuse n_cmpl n_discard n_indent n_keep n_predict n_probs post_sampling_probs reasoning_format repeat_last_n
repeat_penalty response_fields return_progress return_tokens samplers t_max_predict_ms timings_per_token top_n_sigma
typical_p xtc_probability xtc_threshold"""
OF_TABBYAPI = """add_bos_token allowed_tokens ban_eos_token banned_strings banned_tokens cfg_scale generate_window
grammar_string guidance_scale json_schema logit_bias max_temp min_temp min_tokens mirostat_mode negative_prompt
penalty_range prompt_template regex_pattern repetition_decay response_prefix skew smoothing_factor speculative_ngram
template_vars temp_exponent temperature_last tfs token_healing top_a typical"""


@pytest.mark.parametrize(
    ("fields", "own"),
    [
        (OF_OPENAI, {"messages", "functions", "function_call"}),
        (OF_VLLM, set()),
        (OF_LLAMA_CPP, set()),
        (OF_TABBYAPI, set()),
        ("best_of echo logprobs prompt prompt_embeds suffix", {"prompt", "suffix"}),
    ],
    ids=["openai", "vllm", "llama.cpp", "tabbyapi", "completions"],
)
def test_the_fields_of_other_servers_are_known(fields: str, own: set[str]) -> None:
    table = COMPLETIONS if "prompt" in own else CHAT
    assert not set(fields.split()) - table.keys() - UNSUPPORTED.keys() - own


def test_the_whole_context_of_dry_has_two_names(server: LiveServer) -> None:
    body = {"model": "fable", "prompt": "The fox. The fox. The", "max_tokens": 12, "dry_multiplier": 2, "seed": 3}
    answers = [
        httpx.post(f"{server.url}/v1/completions", json=body | more, timeout=120).json()["choices"]
        for more in ({}, {"dry_penalty_last_n": 0}, {"dry_penalty_last_n": -1})
    ]
    assert answers[0] == answers[1] == answers[2]


def test_text_completions_take_no_tools(server: LiveServer) -> None:
    tools = [{"type": "function", "function": {"name": "note"}}]
    body = {"model": "fable", "prompt": "A", "tools": tools}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "refusal"])
def test_answers_without_a_content_are_taken_back(server: LiveServer, name: str) -> None:
    said = {"role": "assistant", "content": None, name: "It is about a fox."}
    user = {"role": "user", "content": "Go on."}
    body = {"model": "fable", "messages": [user, said, user], "max_tokens": 2}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).status_code == 200
    empty = body | {"messages": [user, {"role": "assistant", "content": None}, user]}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=empty, timeout=120).status_code == 400


def test_the_path_models_with_a_slash_lists_models(server: LiveServer) -> None:
    """`/v1/models/` is the list, whatever a request without a model means."""
    listed = [httpx.get(f"{server.url}/v1/models{end}", timeout=120).json() for end in ("", "/")]
    assert listed[0] == listed[1]


def test_a_priority_that_a_key_lacks_is_named(server: LiveServer) -> None:
    body = {"model": "fable", "prompt": "A", "max_tokens": 1, "priority": 0}
    error = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["error"]
    assert (error["code"], error["param"]) == ("insufficient_scope", "priority")


@pytest.mark.parametrize("wanted", [{}, {"guided_choice": ["abc"]}, {"skip_special_tokens": False}])
def test_a_special_token_is_not_healed(server: LiveServer, wanted: dict[str, Any]) -> None:
    """The prompt of a chat ends with one. It would stand in the answer again, or be no begin of the wanted format."""
    body = {"model": "fable", "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 8}
    body |= {"temperature": 0, "logprobs": True, "return_token_ids": True, **wanted}
    found = [
        httpx.post(f"{server.url}/v1/chat/completions", json={**body, "token_healing": healed}, timeout=120)
        for healed in (False, True)
    ]
    assert [one.status_code for one in found] == [200, 200]
    plain, healed = ({**one.json()["choices"][0], "usage": one.json()["usage"]["total_tokens"]} for one in found)
    assert healed == plain


@pytest.mark.parametrize("streamed", [False, True])
def test_offsets_of_a_healed_answer_are_places_in_its_text(server: LiveServer, streamed: bool) -> None:
    """The first token begins with the end of the prompt, which is no part of the text."""
    body = {"model": "fable", "prompt": ["Once upo", "Once", "Once upon "], "max_tokens": 5, "temperature": 0}
    body |= {"logprobs": 0, "token_healing": True, "stream": streamed}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    parts = [choice for one in (lines if streamed else [answer.text]) for choice in json.loads(one)["choices"]]
    for index in range(3):
        own = [part for part in parts if part["index"] == index]
        text = "".join(part["text"] for part in own)
        shown = [part["logprobs"] for part in own if part["logprobs"]]
        places = [at for one in shown for at in one["text_offset"]]
        tokens = [token for one in shown for token in one["tokens"]]
        assert places[0] == 0
        assert all(text[at:].startswith(token) for at, token in list(zip(places, tokens, strict=True))[1:])
        assert len(tokens) > 3
