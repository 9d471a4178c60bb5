"""Hostile bodies: too many of everything, keys by the million, grammars that never end, patterns that take for ever."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from effort import trials
from hypothesis import given
from hypothesis import strategies as st

from exl_generate import bundled
from exl_serve.api.text import FolderText
from exl_serve.config.model import Limits
from exl_serve.errors import ServeError
from exl_serve.request.body import PIECE, LongUrl, read_json
from exl_serve.request.formats import schema_of
from exl_serve.request.messages import ImagePart, messages_of
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS

LIMITS = Limits()
SAY: list[dict[str, Any]] = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=HANG_SECONDS) as client:
        yield client


def tool(at: int, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{at}", "parameters": parameters or {"type": "object"}}}


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"properties": {"a": found}}
    return found


WIDE = {"enum": ["x" * 1000] * (LIMITS.max_schema_bytes // 1000 + 1)}
TOO_MUCH: dict[str, tuple[dict[str, Any], str]] = {
    "messages": ({"messages": SAY * (LIMITS.max_messages + 1)}, "messages"),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * (LIMITS.max_parts + 1)}]},
        "messages[0].content",
    ),
    "tools": ({"messages": SAY, "tools": [tool(at) for at in range(LIMITS.max_tools + 1)]}, "tools"),
    "choices": ({"messages": SAY, "n": LIMITS.max_n + 1}, "n"),
    "endless choices": ({"messages": SAY, "n": 10**9}, "n"),
    "stop texts": ({"messages": SAY, "stop": ["x"] * 65}, "stop"),
    "stop text": ({"messages": SAY, "stop": "x" * 257}, "stop[0]"),
    "biases": ({"messages": SAY, "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    "candidates": ({"messages": SAY, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "schema": ({"messages": SAY, "guided_json": WIDE}, "guided_json"),
    "schema in a format": (
        {"messages": SAY, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": WIDE}}},
        "response_format.json_schema.schema",
    ),
    "schema of a tool": ({"messages": SAY, "tools": [tool(0, WIDE)]}, "tools[0].function.parameters"),
    "deep schema": ({"messages": SAY, "guided_json": nested(LIMITS.max_depth)}, ""),
    "deep schema as a text": ({"messages": SAY, "guided_json": json.dumps(nested(LIMITS.max_depth))}, ""),
    "pattern": ({"messages": SAY, "guided_regex": "a" * (LIMITS.max_regex_bytes + 1)}, "guided_regex"),
    "grammar": ({"messages": SAY, "guided_grammar": "#" * (LIMITS.max_schema_bytes + 1)}, "guided_grammar"),
    "texts to choose from": ({"messages": SAY, "guided_choice": ["x"] * 1025}, "guided_choice"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_too_much_of_anything_is_refused_with_its_field(http: httpx.Client, name: str) -> None:
    body, param = TOO_MUCH[name]
    answer = http.post("/v1/chat/completions", json={"model": "fable", "max_tokens": 1, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert not param or error["param"] == param
    assert len(error["message"]) < 1000


def test_prompts_and_choices_are_limited_together(http: httpx.Client) -> None:
    body = {"model": "fable", "prompt": ["x"] * 9, "n": 8, "max_tokens": 1}
    answer = http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


def test_very_many_keys_are_read_and_a_few_of_them_named(http: httpx.Client) -> None:
    number = trials(1_000_000, 50_000)
    keys = ",".join(f'"k{i}":0' for i in range(number))
    text = f'{{"model":"fable","messages":{json.dumps(SAY)},"max_tokens":1,{keys}}}'
    headers = {"content-type": "application/json"}
    answer = http.post("/v1/chat/completions", content=text, headers=headers)
    assert answer.status_code == 200, answer.text
    assert len(answer.headers["x-exl-ignored"].split(",")) == 16
    twice = text.replace(f'"k{number - 1}"', '"k0"')
    answer = http.post("/v1/chat/completions", content=twice, headers=headers)
    assert "'k0' comes twice" in answer.json()["error"]["message"]


ODD_TEXTS = {
    "surrogate in a message": '{"model": "fable", "messages": [{"role": "user", "content": "\\udc00"}]}',
    "surrogate in a name": '{"model": "fable", "messages": [{"role": "user", "content": "x"}], "user": "\\ud800x"}',
    "surrogate in a key": '{"model": "fable", "messages": [{"role": "user", "content": "x"}], "\\ud800": 1}',
    "surrogate in a schema": '{"model": "fable", "messages": [{"role": "user", "content": "x"}], "guided_json": '
    '{"const": "\\ud800"}}',
    "no text": '{"model": "fable", "messages": [{"role": "user", "content": 5}]}',
    "null": "null",
    "infinity": '{"model": "fable", "messages": [], "temperature": 1e999}',
    "big number": '{"model": "fable", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1'
    + "0" * 400
    + "}",
    "open": '{"model": "fable", "messages": [',
    "open string": '{"messages": "' + "\\" * 9999,
    "two values": "{} {}",
    "utf-16": '{"model": "fable", "messages": []}'.encode("utf-16").decode("latin-1"),
}


@pytest.mark.parametrize("name", ODD_TEXTS)
def test_odd_texts_are_refused(http: httpx.Client, name: str) -> None:
    text = ODD_TEXTS[name]
    data = text.encode("latin-1" if name == "utf-16" else "utf-8")
    answer = http.post("/v1/chat/completions", content=data, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), answer.text


def test_a_byte_order_mark_is_no_part_of_the_body(http: httpx.Client) -> None:
    text = json.dumps({"model": "fable", "prompt": "x", "max_tokens": 1})
    answer = http.post(
        "/v1/completions", content=text.encode("utf-8-sig"), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200, answer.text


SLOW_ELSEWHERE = ["(a+)+$", "(a|a)*b", "(a|aa)+c", "(.*)*x", "(x+x+)+y", "((a{0,99}){0,99}){0,99}b", "a{1,9}{1,9}{1,9}"]
"""Patterns on which matchers that backtrack take exponential time, or memory for every repeat."""


@pytest.mark.parametrize("pattern", SLOW_ELSEWHERE)
def test_no_pattern_takes_for_ever(http: httpx.Client, pattern: str) -> None:
    body = {"model": "fable", "prompt": "a" * 30, "max_tokens": 20, "temperature": 0}
    answer = http.post("/v1/completions", json=body | {"guided_regex": pattern})
    assert answer.status_code == 200, answer.text
    assert http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("grammar", ['start: "a" start', 'root ::= "a" root'])
def test_a_grammar_without_an_end_is_refused(http: httpx.Client, grammar: str) -> None:
    body = {"model": "fable", "prompt": "a", "max_tokens": 30, "guided_grammar": grammar}
    answer = http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_grammar")
    assert "no finite text" in answer.json()["error"]["message"]


def test_a_grammar_that_does_not_end_meets_the_limit_of_tokens(http: httpx.Client) -> None:
    body = {"model": "fable", "prompt": "a", "max_tokens": 30, "temperature": 0, "guided_regex": "a{1000}b"}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert set(choice["text"]) == {"a"}


def test_a_dead_end_is_an_error_and_ends_nothing_else(http: httpx.Client) -> None:
    """The settings allow one token without digits, the pattern asks for digits: at once, or after three letters."""
    (token,) = http.post("/tokenize", json={"model": "fable", "prompt": "a", "add_special_tokens": False}).json()[
        "tokens"
    ]
    body: dict[str, Any] = {"model": "fable", "prompt": "x", "max_tokens": 9, "allowed_token_ids": [token]}
    for stream in (False, True):
        answer = http.post("/v1/completions", json=body | {"guided_regex": "[0-9]{5}", "stream": stream})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_candidates")
    late = body | {"guided_regex": "a{3}[0-9]"}
    answer = http.post("/v1/completions", json=late)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_candidates")
    lines = [line for line in http.post("/v1/completions", json=late | {"stream": True}).text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["error"]["code"] == "no_candidates"
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2]) == "aaa"
    del body["allowed_token_ids"]
    answer = http.post("/v1/completions", json=body | {"guided_regex": "[0-9]{5}"})
    assert answer.json()["choices"][0]["text"].isdecimal()


CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}
MAKERS: list[Callable[[str], list[dict[str, Any]]]] = [
    lambda text: [{"role": "user", "content": text}],
    lambda text: [{"role": "user", "content": [{"type": "text", "text": text}]}],
    lambda text: [{"role": "user", "content": "x"}, CALL, {"role": "tool", "tool_call_id": "c", "content": text}],
]


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "[" * 70 + "]" * 70, '{"a": "\\ud800"}', "1" * 5000]
)
def test_arguments_of_calls_may_be_what_a_model_wrote(http: httpx.Client, text: str) -> None:
    """A client sends them back as it got them, however deep they are nested."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    sent = {"model": "fable", "messages": [*SAY, {"role": "assistant", "tool_calls": [call]}, *SAY], "max_tokens": 1}
    items = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": text}, *SAY]
    answers = [
        http.post("/v1/chat/completions", json=sent),
        http.post("/v1/responses", json={"model": "fable", "input": items, "max_output_tokens": 1}),
    ]
    # Not all of them fit into the context, and a lone surrogate has no tokens.
    codes = [answer.json()["error"]["code"] if answer.status_code == 400 else answer.status_code for answer in answers]
    assert set(codes) <= {200, "context_length_exceeded", "invalid_value"}, codes


def test_special_tokens_spelled_by_clients_stay_text(http: httpx.Client) -> None:
    """In every role and part that a client fills."""
    special = {
        text: token for text, token in FolderText(str(bundled.default_model_dir())).special.items() if text.strip()
    }
    assert special

    def ids(messages: list[dict[str, Any]]) -> list[int]:
        answer = http.post("/tokenize", json={"model": "fable", "messages": messages})
        assert answer.status_code == 200, answer.text
        return list(answer.json()["tokens"])

    for spelling, token in special.items():
        for said in (spelling, f"a{spelling}b", spelling * 3):
            for make in MAKERS:
                assert ids(make(said)).count(token) == ids(make("harmless")).count(token), said


def test_nothing_is_pickled() -> None:
    """Ray pickles its own arguments; every message of this package is msgpack or JSON. YAML is only written."""
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "torch.load"}
    for path in Path(str(files("exl_serve"))).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                names = [ast.unparse(node.func)]
            assert not forbidden & {name for one in names for name in (one, one.partition(".")[0])}, (path, names)
            assert all(one in ("yaml", "yaml.dump") for one in names if one.startswith("yaml")), (path, names)
            assert not any(name.endswith((".recv_pyobj", ".send_pyobj")) for name in names), path


URL = "data:image/png;base64," + "A" * (1 << 16)


@pytest.mark.parametrize("bad", [*map(chr, range(0x20)), "\\x", "\\u00zz"])
def test_a_long_data_url_may_hold_only_what_json_allows(bad: str) -> None:
    body = f'{{"a": "{URL}{bad}A"}}'.encode()
    with pytest.raises(ServeError) as caught:
        read_json(body, LIMITS)
    with pytest.raises(json.JSONDecodeError) as expected:
        json.loads(body)
    assert str(expected.value) in caught.value.message


def test_long_data_urls_that_come_twice_are_repeated_keys() -> None:
    with pytest.raises(ServeError, match=r"the key 'data:image/png;base64,A+' comes twice"):
        read_json(f'{{"{URL}": 1, "{URL}": 2}}'.encode(), LIMITS)
    assert read_json(f'{{"{URL}" : 1, "a": "{URL}"}}'.encode(), LIMITS) == {URL: 1, "a": URL}
    pair = {"a": URL, "b": URL, "c": URL + "B"}
    assert read_json(json.dumps(pair).encode(), LIMITS) == pair


@pytest.mark.parametrize("image", [{"url": URL}, {"url": URL, "detail": "low"}, URL])
def test_long_data_urls_of_images_stay_in_their_body(image: Any) -> None:
    """To copy 27 MB into a string stops the streams of all other clients meanwhile."""
    part = {"type": "image_url", "image_url": image}
    body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": URL}]}], "metadata": part}
    read = read_json(json.dumps(body).encode(), LIMITS)
    images: list[ImagePart] = []
    parts = messages_of(read["messages"], LIMITS, images)[0]["content"]
    assert parts == [{"type": "image"}, {"type": "text", "text": URL}]
    assert read["metadata"] == part
    (url,) = [one.url for one in images]
    assert isinstance(url, LongUrl)
    assert (url[:], url[5:9], url[-3:], url.find(","), url.find("!"), len(url)) == (
        URL, URL[5:9], URL[-3:], URL.find(","), -1, len(URL),
    )  # fmt: skip
    assert [one.detail for one in images] == [image.get("detail", "auto") if isinstance(image, dict) else "auto"]


def test_the_position_of_an_error_counts_long_data_urls() -> None:
    body = f'{{"a": "{URL}",\n "b": x}}'
    with pytest.raises(json.JSONDecodeError) as expected:
        json.loads(body)
    with pytest.raises(ServeError) as caught:
        read_json(body.encode(), LIMITS)
    assert str(expected.value) in caught.value.message


@pytest.mark.parametrize("at", [PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])
def test_long_data_urls_may_end_anywhere(at: int) -> None:
    """The end of a URL is searched for piece by piece."""
    head = '{"messages": [{"content": [{"type": "image_url", "image_url": "'
    url = "data:image/png;base64,".ljust(at - len(head) + len('"data:') - 1, "A")
    found = read_json(f'{head}{url}"}}]}}], "n": 1}}'.encode(), LIMITS)
    assert found["n"] == 1
    assert found["messages"][0]["content"][0]["image_url"].text() == url


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(st.characters())
        | st.just("null"),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters()), inner, max_size=4),
        max_leaves=12,
    )
)
def test_a_schema_is_passed_on_unchanged(value: Any) -> None:
    """Integers of any size, infinity and lone surrogates too, which not every writer of JSON knows."""
    schema = {"const": value, "more": [1 << 70, float("inf"), "\ud800", None][len(repr(value)) % 4]}
    passed = json.loads(schema_of(schema, "x", LIMITS).source)
    assert repr(passed) == repr(schema)  # 1 equals True and 1.0, and an object one in another order


def test_a_schema_is_limited_in_bytes() -> None:
    """However it is written: a null takes another writer."""
    text = "\U0001f600" * (LIMITS.max_schema_bytes // 4 + 1)
    for schema in ({"const": text}, {"const": text, "default": None}):
        with pytest.raises(ServeError, match="bytes; a schema has at most"):
            schema_of(schema, "x", LIMITS)
