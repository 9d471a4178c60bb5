"""The bytes of HTTP: streams, errors, hostile bodies, headers."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import httpx
import pytest
from effort import examples, trials
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exl_generate import bundled
from exl_serve.api import http as serve_http
from exl_serve.api.app import ROUTES
from exl_serve.api.text import FolderText
from exl_serve.config.model import Limits
from exl_serve.errors import ServeError
from exl_serve.metrics import NoMeter
from exl_serve.request import body as serve_body
from exl_serve.request.body import check_depth, read_json
from exl_serve.request.fields import COMMON, SAMPLING, UNSUPPORTED, by_name, read_fields
from exl_serve.request.sampling import seeds_of
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def check_stream(data: bytes, *, usage: bool, n: int) -> None:
    """The grammar of a chat stream."""
    assert data.endswith(b"data: [DONE]\n\n")
    events = [part for part in data.decode().split("\n\n") if part and not part.startswith(":")]
    assert all(re.fullmatch(r"data: [^\n]*", event) for event in events)
    assert events.count("data: [DONE]") == 1
    chunks = [json.loads(event[6:]) for event in events[:-1]]
    heads = {(c["id"], c["created"], c["model"], c["system_fingerprint"], c["object"]) for c in chunks}
    assert len(heads) == 1
    if usage:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["total_tokens"] > 0
        assert all(c["usage"] is None for c in chunks[:-1])
        chunks = chunks[:-1]
    begun: set[int] = set()
    ended: set[int] = set()
    for chunk in chunks:
        (choice,) = chunk["choices"]
        index, delta = choice["index"], choice["delta"]
        assert index not in ended
        if index not in begun:
            assert delta == {"role": "assistant", "content": ""}
            begun.add(index)
        elif choice["finish_reason"] is None:
            assert delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls")
        else:
            assert delta == {}
            ended.add(index)
    assert begun == ended == set(range(n))


@examples(15, 6, [HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 4),
    usage=st.booleans(),
    max_tokens=st.integers(1, 60),
    stop=st.sampled_from([None, "the", ["and", "a "]]),
    seed=st.integers(0, 999),
)
def test_the_grammar_of_a_stream(
    http: httpx.Client, n: int, usage: bool, max_tokens: int, stop: Any, seed: int
) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "model": "fable", "stream": True, "n": n}
    body |= {"max_tokens": max_tokens, "seed": seed, "stop": stop}
    if usage:
        body["stream_options"] = {"include_usage": True}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    check_stream(answer.content, usage=usage, n=n)
    stops = [stop] if isinstance(stop, str) else stop or []
    texts = [""] * n
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
    assert not any(one in text for one in stops for text in texts)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "JSON object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"prompt": "\\ud800", "model": "fable"}', "surrogate"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "64 levels"),
        (b'{"prompt": 5, "model": "fable"}', "prompt"),
        (b'{"prompt": [], "model": "fable"}', "prompt"),
        (b'{"prompt": [1, "x"], "model": "fable"}', "prompt"),
        (b'{"prompt": [999999], "model": "fable"}', "token 999999"),
        (b'{"prompt": "x", "model": 5}', "model"),
        (b'{"prompt": "x", "model": "fable", "n": 1.5}', "whole number"),
        (b'{"prompt": "x", "model": "fable", "logprobs": true}', "whole number"),
        (b'{"model": "fable"}', "missing"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "at most 4300"),
        (b'{"prompt": "x", "stop": [null]}', "stop[0] is null; it"),
        (b'{"prompt": "x", "seed": true}', "seed is true; it"),
        (b'{"prompt": "x", "temperature": [' + b"1," * 300_000 + b"1]}", "temperature is a list; it"),
        (b'{"prompt": "x", "model": "fable", "allowed_token_ids": []}', "name at least one"),
    ],
)
def test_malformed_bodies(http: httpx.Client, body: bytes, says: str) -> None:
    answer = http.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert says in error["message"]


def test_sizes(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", content=b'{"prompt": "' + b"x" * (2 << 20) + b'"}', headers=JSON)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert http.post("/v1/completions", content=b"a=b").status_code == 400
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert http.post("/v1/completions", content=b"a=b", headers=form).status_code == 415


def test_an_error_of_a_long_prompt_gives_advice_that_can_be_followed(http: httpx.Client) -> None:
    body: dict[str, Any] = {"model": "fable", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5000}
    told = http.post("/v1/chat/completions", json=body).json()["error"]["message"]
    most = int(told.rpartition("ask for at most ")[2])
    assert http.post("/v1/chat/completions", json=body | {"max_tokens": most, "stop": [" "]}).status_code == 200
    body["messages"][0]["content"] = "x y" * 2000
    told = http.post("/v1/chat/completions", json=body).json()["error"]["message"]
    assert told.endswith("shorten the prompt")


def test_a_large_body_is_read_outside_the_loop(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def reading(data: bytes, limits: Limits) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return read_json(data, limits)

    monkeypatch.setattr(serve_http, "read_json", reading)
    body: dict[str, Any] = {"model": "fable", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    for more in ({}, {"metadata": {"a": "b" * (2 << 20)}}, {}):
        http.post("/v1/chat/completions", json=body | more)
    assert threads[0] == threads[2] != threads[1]


@given(data=st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
))  # fmt: skip
def test_bodies_are_read_as_they_are(data: Any) -> None:
    body = json.dumps({"x": data}).encode()
    assert read_json(body, Limits()) == json.loads(body)


URL_TEXT = st.builds("data:{}".format, st.text(st.sampled_from('a,/+é\\"\n'), max_size=12))
PIECES = st.sampled_from(['"', '"data:', "a,b", "\\", "é", "\n", "{", "}", "[", "]", ":", ",", '"x"', '"data:aaaa"'])


@given(data=st.recursive(
    st.none() | st.text(max_size=5) | URL_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | URL_TEXT, inner, max_size=4),
    max_leaves=20,
))  # fmt: skip
def test_bodies_are_read_as_they_are_where_urls_are_cut_out(data: Any) -> None:
    for body in (json.dumps({"x": data}).encode(), json.dumps({"x": data}, ensure_ascii=False).encode()):
        with mock.patch.object(serve_body, "LONG_URL", 4), mock.patch.object(serve_body, "PIECE", 3):
            assert read_json(body, Limits()) == json.loads(body)


@settings(max_examples=trials(300, 30))
@given(inside=st.lists(PIECES, max_size=8))
def test_bodies_that_are_no_json_stay_none_where_urls_are_cut_out(inside: list[str]) -> None:
    body = ('{"x":' + "".join(inside) + "}").encode()

    def read() -> Any:
        try:
            return read_json(bytearray(body), Limits())
        except ServeError as error:
            return error.code

    plain = read()
    with mock.patch.object(serve_body, "LONG_URL", 4):
        assert read() == plain


@given(
    body=st.dictionaries(
        st.sampled_from([*by_name(COMMON, SAMPLING), *UNSUPPORTED, "unknown"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=4)
        | st.lists(st.integers(), max_size=2),
        max_size=4,
    )
)
def test_fields_are_accepted_or_the_error_names_them(body: dict[str, Any]) -> None:
    refused: ServeError | None = None
    found: dict[str, Any] = {}
    unknown: list[str] = []
    try:
        found, unknown = read_fields(body, by_name(COMMON, SAMPLING))
    except ServeError as error:
        refused = error
    if refused is not None:
        assert refused.status == 400
        assert refused.param is not None
        assert refused.param.partition("[")[0].partition(".")[0] in body
    assert set(unknown) <= {"unknown"}
    assert all(value is not None for value in found.values())


def test_seeds_of_choices_differ() -> None:
    made = {seed for start in range(50) for seed in seeds_of(start, 8)[1:]}
    assert len(made) == 350
    assert seeds_of(7, 1) == (7,)
    assert all(0 <= seed < 1 << 63 for seed in made)


def test_each_prompt_has_seeds_of_its_own(http: httpx.Client) -> None:
    """The largest seed too: the seeds of choices are drawn from it, not counted on."""
    body = {"model": "fable", "prompt": ["a", "b"], "max_tokens": 1, "n": 2, "seed": (1 << 64) - 1}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    sent = {"prompt": "Once", "max_tokens": 8, "model": "fable"}
    both = http.post("/v1/completions", json=sent | {"prompt": ["Once", "Once"], "n": 2, "seed": 5}).json()["choices"]
    alone = [
        http.post("/v1/completions", json=sent | {"seed": seed}).json()["choices"][0]["text"] for seed in seeds_of(5, 4)
    ]
    assert [choice["text"] for choice in both] == alone


def test_routes_and_methods(http: httpx.Client) -> None:
    missing = http.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert "/openapi.json" in missing.json()["error"]["message"]
    wrong = http.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert [http.head(path).status_code for path in ("/", "/health", "/v1/models")] == [200, 200, 200]
    assert len({(path.method, path.path) for path in ROUTES}) == len(ROUTES)
    for path in ("/health", "/health/live", "/health/ready", "/ping", "/version"):
        assert http.get(path).status_code == 200


@pytest.mark.parametrize("base", ["", "/", "/v1/", "/v1/v1", "//v1", "/v1/v1//v1"])
def test_base_urls_with_the_version_once_or_not(server: LiveServer, base: str) -> None:
    url = server.url + base
    asked = {"model": "fable", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    for end in ("", "/"):
        answer = httpx.post(f"{url}/chat/completions{end}", json=asked, timeout=120)
        assert answer.json()["object"] == "chat.completion"
        assert httpx.get(f"{url}/models{end}", timeout=120).json()["object"] == "list"
    assert httpx.get(f"{url}/models/fable", timeout=120).json()["id"] == "fable"
    assert httpx.get(f"{url}/chat/completions", timeout=120).headers["allow"] == "POST"


@pytest.mark.parametrize(
    "path", ["//metrics", "/metrics/", "/v1/metrics", "//load", "/lora/list", "/v1/model/", "/requests"]
)
def test_routes_of_operators_have_one_path(server: LiveServer, path: str) -> None:
    """A proxy in front may close them by it."""
    assert httpx.get(server.url + path, timeout=120).status_code == 404


@pytest.mark.parametrize("streamed", [False, True])
def test_a_last_token_without_text_has_an_id(http: httpx.Client, fable: EngineThread, streamed: bool) -> None:
    """Where an answer ends within a character, or in a token that is not shown: ids are those that the usage counts."""
    pieces = fable.generator.tokenizer.get_id_to_bytes_list(True)
    part = next(i for i, piece in enumerate(pieces) if piece and piece[0] >= 0xC2 and len(piece) == 1)
    hidden = fable.generator.tokenizer.bos_token_id
    for token in (part, hidden):
        body = {"model": "fable", "prompt": "a", "max_tokens": 2, "logit_bias": {str(token): 100}, "temperature": 0}
        body |= {"return_token_ids": True, "logprobs": 0, "ignore_eos": True, "stream": streamed}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines] or answer.json()["choices"]
        assert [id for choice in choices for id in choice["token_ids"]] == [token, token]
        assert sum(len(choice["logprobs"]["token_logprobs"]) for choice in choices if choice["logprobs"]) == 2


def test_embeddings_answer_501(http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"model": "fable", "input": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (501, "unsupported")
    assert "/v1/embeddings" in answer.json()["error"]["message"]


def test_a_client_may_see_the_settings_of_its_request(http: httpx.Client) -> None:
    """The header x-exl-debug adds them, also to a stream with its usage; without it nothing changes."""
    messages = [{"role": "user", "content": "a"}]
    asked = {"model": "fable", "messages": messages, "max_tokens": 3, "seed": 5, "temperature": 0.5, "min_p": 0.25}
    asked |= {"logit_bias": {"40": -100}, "stop": ["x"], "top_k": 7, "repetition_penalty": 1.5}
    for path, body in (
        ("/v1/chat/completions", asked),
        ("/v1/completions", {k: v for k, v in asked.items() if k != "messages"} | {"prompt": "a"}),
    ):
        assert "exl" not in http.post(path, json=body).json()
        found = http.post(path, json=body, headers={"x-exl-debug": "1"}).json()["exl"]
        settings = found["settings"]
        assert (settings["temperature"], settings["min_p"], settings["top_k"]) == (0.5, 0.25, 7)
        assert settings["token_repetition_penalty"] == 1.5
        assert (settings["max_tokens"], settings["stop_strings"], settings["logit_bias"]) == (3, ["x"], {"40": -100.0})
        assert len(settings["seeds"]) == 1
        assert set(found["timings"]) >= {"queue_seconds", "prefill_seconds", "generate_seconds"}
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        lines = http.post(path, json=streamed, headers={"x-exl-debug": "1"}).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert chunks[-1]["exl"]["settings"] == settings
        assert all("exl" not in chunk for chunk in chunks[:-1])


def test_a_request_that_the_engine_rejects_is_logged_with_its_status(
    server: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log counts no client that left, and no finished request."""
    assert server.state is not None
    lines: list[Any] = []
    counted: list[str] = []

    class Counts(NoMeter):
        def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
            counted.append(name)

    monkeypatch.setattr(server.state, "log_request", lines.append)
    monkeypatch.setattr(server.state, "meter", Counts())
    body = {"model": "fable", "prompt": "a", "max_tokens": 5, "guided_regex": "(["}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    (line,) = lines
    assert (line["id"], line["status"], line["finish"]) == (answer.headers["x-request-id"], 400, "rejected")
    assert (line["model"], line["code"], line["param"]) == ("fable", "invalid_grammar", "guided_regex")
    assert counted == ["exl_rejected_total"]


def test_rejected_requests_have_a_line_in_the_log(
    server: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log names what a client was refused; probes of health are not in it."""
    assert server.state is not None
    lines: list[Any] = []
    monkeypatch.setattr(server.state, "log_request", lines.append)
    monkeypatch.setattr(server.state, "draining", True)
    body = {"messages": [{"role": "user", "content": "a secret prompt"}], "max_tokens": 2}
    chat = "/v1/chat/completions"
    answers = [
        http.post(chat, json=body | {"model": "gpt"}),
        http.post(chat, json=body | {"model": "fable", "temperature": -1}),
        http.post(chat, content=b"{", headers=JSON),
        http.get("/v1/props"),
        http.get(chat),
    ]
    assert [http.get(path).status_code for path in ("/health/ready", "/health", "/ping")] == [503] * 3
    assert [(one["status"], one["code"], one["param"], one["route"]) for one in lines] == [
        (404, "model_not_found", "model", f"POST {chat}"),
        (400, "invalid_value", "temperature", f"POST {chat}"),
        (400, "invalid_value", None, f"POST {chat}"),
        (404, "not_found", None, "GET /v1/props"),
        (405, "method_not_allowed", None, f"GET {chat}"),
    ]
    assert [one["id"] for one in lines] == [one.headers["x-request-id"] for one in answers]
    assert "secret" not in str(lines)


def test_the_load_of_an_engine_that_ends_while_it_is_asked(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.state is not None
    handle = next(one for one in server.state.models.list() if one.config.id == "fable")

    async def ended() -> None:
        monkeypatch.setattr(handle, "state", "unloaded")
        raise ServeError.unavailable("model_unloaded", "it is unloaded")

    monkeypatch.setattr(handle, "engine", ended)
    found = httpx.get(f"{server.url}/load", timeout=120).json()["models"]
    assert found["fable"] == {"state": "unloaded"}
    assert found["scripted"]["running"] == 0


def test_every_route_but_open_ones_asks_for_a_key(fable: Any) -> None:
    from exl_serve.config.model import ModelConfig

    def authenticate(scope: Any, needed: str) -> Any:
        raise ServeError(401, "authentication_error", "invalid_api_key", f"{needed} needs a key")

    config = ModelConfig(id="fable", path=fable.card.folder)
    live = LiveServer({"fable": fable}, [config], authenticate=authenticate)
    try:
        for path in ROUTES:
            place = re.sub(r"\{\w+(:\w+)?\}", "x", path.path)
            answer = httpx.request(path.method, live.url + place, headers=JSON)
            assert (answer.status_code == 401) == (path.scope != "open"), path
    finally:
        live.close()


def test_a_page_of_another_name_does_not_get_in(http: httpx.Client) -> None:
    for host in ("testserver", "evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]:80"):
        answer = http.get("/v1/models", headers={"host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed"), host
    for host in ("localhost:8000", "127.0.0.1", "[::1]:1", "x.localhost"):
        assert http.get("/v1/models", headers={"host": host}).status_code == 200, host
    answer = http.options("/v1/models", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_a_page_of_another_site_changes_nothing(http: httpx.Client, server: LiveServer) -> None:
    body = {"model": "fable", "prompt": "x", "max_tokens": 1}
    for headers in ({"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        for path in ("/v1/completions", "/reset_prefix_cache"):
            answer = http.post(path, json=body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed"), (path, headers)
    assert http.post("/v1/completions", json=body, headers={"origin": server.url}).status_code == 200


def test_headers(http: httpx.Client) -> None:
    answer = http.get("/v1/models", headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert http.get("/v1/models", headers={"x-request-id": "a b"}).headers["x-request-id"].startswith("req-")
    assert answer.headers["x-content-type-options"] == "nosniff"
    page = http.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    again = http.get("/", headers={"if-none-match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert http.get("/ui/../errors.py").status_code == 404


def test_a_body_that_is_coded_is_refused(http: httpx.Client) -> None:
    body = {"model": "fable", "prompt": "x", "max_tokens": 1}
    answer = http.post("/v1/completions", json=body, headers={"content-encoding": "gzip"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert http.post("/v1/completions", json=body, headers={"content-encoding": "identity"}).status_code == 200


@pytest.mark.parametrize("value", ["", "0", "-5", "1.5", "soon", "9" * 30])
def test_a_deadline_that_is_none_is_refused(http: httpx.Client, value: str) -> None:
    body = {"model": "fable", "prompt": "x", "max_tokens": 1}
    answer = http.post("/v1/completions", json=body, headers={"x-exl-timeout-ms": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-exl-timeout-ms")
    assert http.post("/v1/completions", json=body, headers={"x-exl-timeout-ms": "60000"}).status_code == 200


def test_workers_and_supervisor_import_no_torch() -> None:
    modules = "exl_serve.api.__main__, exl_serve.super.supervisor, exl_serve.cli"
    code = f"import sys, {modules}; print(sorted({{'torch', 'exl_generate.dynamic', 'jinja2'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


RESERVED = ("chat_template", "parse_special_in_content", "parse_special", "tokenizer", "self", "messages", "tools")


@pytest.mark.parametrize("name", [*RESERVED, "tokenize", "return_dict"])
def test_variables_of_a_template_do_not_change_how_it_is_rendered(http: httpx.Client, name: str) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/responses/input_tokens", {"input": "x"}),
    ):
        answer = http.post(path, json={"model": "fable", **body, "chat_template_kwargs": {name: "{{ 'x' }}"}})
        assert answer.status_code == 400, answer.text
        assert name in answer.json()["error"]["message"]


def test_a_rendered_prompt_without_utf8_is_refused() -> None:
    """Templates that write tools or calls make such prompts."""
    text = FolderText(str(bundled.default_model_dir()), "{{ messages[0].name }}")
    with pytest.raises(ServeError, match="surrogate") as error:
        asyncio.run(text.render([{"role": "user", "content": "x", "name": "\ud800"}], None, {}))
    assert error.value.status == 400


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 900 + "1" + "}" * 900])
def test_a_schema_in_a_text_is_no_deeper_than_a_body(http: httpx.Client, deep: str) -> None:
    for path, more in (
        ("/v1/completions", {"prompt": "x", "guided_json": deep}),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": deep}}}),
    ):
        answer = http.post(path, json={"model": "fable", "max_tokens": 4, **more})
        assert answer.status_code == 400, answer.text
        assert "levels deep" in answer.json()["error"]["message"]


@given(st.text(alphabet='{}[]"\\a', max_size=14))
def test_depth_is_counted_outside_of_strings(text: str) -> None:
    """Compare with a reader that goes through the text character by character."""
    depth = deepest = at = 0
    inside = False
    while at < len(text):
        letter = text[at]
        if inside:
            at += letter == "\\"
            inside = letter != '"'
        elif letter == '"':
            inside = True
        elif letter in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif letter in "]}":
            depth -= 1
        at += 1
    if deepest > 2:
        with pytest.raises(ServeError, match="more than 2 levels"):
            check_depth(text, 2)
    else:
        check_depth(text, 2)


@given(data=st.recursive(st.integers(0, 9), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.sampled_from("ab"), inner, max_size=2), max_leaves=12))  # fmt: skip
def test_depth_of_a_body_is_that_of_its_text(data: Any) -> None:
    """Brackets in strings do not count."""
    text = json.dumps({"x": data, "[[": "{{{{["})
    limits = Limits(max_depth=3)
    try:
        check_depth(text, 3)
    except ServeError:
        with pytest.raises(ServeError, match="more than 3 levels"):
            read_json(text.encode(), limits)
    else:
        assert read_json(text.encode(), limits) == json.loads(text)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/lora/list", "/v1/requests"])
def test_a_list_goes_on_without_a_model_whose_engine_ends(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    assert server.state is not None
    before = httpx.get(server.url + path).json()["data"]

    async def ended() -> Any:
        raise ServeError.unavailable("engine_restarting", "the engine has ended")

    monkeypatch.setattr(server.state.models.list()[0], "engine", ended)
    answer = httpx.get(server.url + path)
    assert answer.status_code == 200, answer.text
    assert [one["id"] for one in answer.json()["data"]] == [one["id"] for one in before]
    assert httpx.delete(f"{server.url}/v1/requests/nobody").status_code == 404
