"""The WebSocket service: every action, streams side by side, stop, and messages that cannot be obeyed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicGeneratorAsync
from exl_generate.bundled import default_model_dir
from exl_generate.dynamic.results import Result
from exllamav2.server import ExLlamaV2WebSocketServer

pytestmark = pytest.mark.covers("generators: websocket")


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    config = ExLlamaV2Config(str(default_model_dir()))
    model = ExLlamaV2(config)
    model.load()
    return model, ExLlamaV2Tokenizer(config)


def with_client(parts: tuple[Any, Any], talk: Callable[[ClientConnection], Awaitable[None]], cache: int = 1024) -> None:
    """A server on a free port, one connection, and the messages over it."""

    async def main() -> None:
        model, tokenizer = parts
        store = ExLlamaV2Cache(model, max_seq_len=cache)
        server = ExLlamaV2WebSocketServer("127.0.0.1", 0, model, tokenizer, store)
        ready = asyncio.Event()
        task = asyncio.create_task(server.serve_async(ready))
        await asyncio.wait_for(ready.wait(), 250)
        async with connect(f"ws://127.0.0.1:{server.port}") as client:
            await asyncio.wait_for(talk(client), 250)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


async def ask(client: ClientConnection, **message: Any) -> dict[str, Any]:
    await client.send(json.dumps(message))
    return json.loads(await client.recv())


async def until_full(client: ClientConnection, count: int = 1) -> list[dict[str, Any]]:
    got: list[dict[str, Any]] = []
    while sum(m.get("response_type") == "full" or "error" in m for m in got) < count:
        got.append(json.loads(await client.recv()))
    return got


def test_small_actions_echo_their_ids(parts: tuple[Any, Any]) -> None:
    async def talk(client: ClientConnection) -> None:
        assert await ask(client, action="echo", request_id=7) == {"action": "echo", "request_id": 7}
        found = await ask(client, action="estimate_token", text="Once upon a time", response_id="x")
        assert (found["num_tokens"], found["response_id"]) == (parts[1].encode("Once upon a time").shape[-1], "x")
        trimmed = await ask(client, action="lefttrim_token", text="One day, a cat", trimmed_length=2)
        assert "One day, a cat".endswith(trimmed["trimmed_text"])
        assert 0 < len(trimmed["trimmed_text"]) < 14
        await client.send(json.dumps({"action": "dance"}))
        assert (await ask(client, action="echo"))["action"] == "echo", "an unknown action gets no answer"

    with_client(parts, talk)


def test_infer_streams_and_reports(parts: tuple[Any, Any]) -> None:
    async def talk(client: ClientConnection) -> None:
        common = {"action": "infer", "text": "Once upon a time,", "max_new_tokens": 24, "top_k": 1}
        whole = await ask(client, **common, stream=False, tag="t")
        assert (whole["response_type"], whole["tag"], whole["util_text"]) == ("full", "t", "Once upon a time,")
        assert whole["stop_reason"] == "num_tokens"
        await client.send(json.dumps(common | {"stream": True, "stream_full": True, "request_id": 1}))
        got = await until_full(client)
        chunks = [m["chunk"] for m in got[:-1]]
        assert "".join(chunks) == whole["response"] == got[-1]["response"]
        assert [m["response"] for m in got[:-1]] == ["".join(chunks[: i + 1]) for i in range(len(chunks))]
        stop = whole["response"][5:9]
        stopped = await ask(client, **common, stream=False, stop_conditions=[stop])
        assert (stopped["response"], stopped["stop_reason"]) == (whole["response"].split(stop)[0], "eos")
        prompt = parts[1].encode("Once upon a time,").shape[-1]
        first = int(parts[1].encode("Once upon a time," + whole["response"])[0, prompt])
        banned = await ask(client, **common, stream=False, bann_bann=[first])
        assert banned["response"] != whole["response"]

    with_client(parts, talk)


def send_together(client: ClientConnection, *messages: dict[str, Any]) -> None:
    """Send messages in one piece, so that the last is there before anything of the first has begun."""
    for message in messages:
        client.protocol.send_text(json.dumps(message).encode())
    client.transport.write(b"".join(client.protocol.data_to_send()))


class Slow(ExLlamaV2DynamicGenerator):
    """A generator that takes 20 s for 1,000 tokens, so that a stop arrives before their end on a busy machine too."""

    def iterate(self) -> list[Result]:
        time.sleep(0.02)
        return super().iterate()


def test_requests_run_side_by_side_and_stop_ends_the_one_meant(
    parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExLlamaV2DynamicGeneratorAsync, "generator_class", Slow)

    async def talk(client: ClientConnection) -> None:
        infer = {"action": "infer", "text": "One day,", "stream": True, "bann_bann": [2]}
        long = infer | {"max_new_tokens": 900, "request_id": "long"}
        send_together(client, long, infer | {"max_new_tokens": 5, "request_id": "short"})
        got = await until_full(client)
        assert got[-1]["request_id"] == "short", "a short request does not wait for a long one"
        await client.send(json.dumps({"action": "stop", "target": "long", "request_id": "s"}))
        got = await until_full(client)
        assert (got[-1]["request_id"], got[-1]["stop_reason"]) == ("long", "interrupted")

    with_client(parts, talk)


def test_a_stop_right_after_a_request_ends_it(parts: tuple[Any, Any]) -> None:
    async def talk(client: ClientConnection) -> None:
        infer = {"action": "infer", "text": "One day,", "max_new_tokens": 900, "bann_bann": [2], "request_id": "long"}
        send_together(client, infer, {"action": "stop", "request_id": "s"})
        (full,) = [m for m in await until_full(client) if m.get("response_type") == "full"]
        assert (full["request_id"], full["stop_reason"]) == ("long", "interrupted")

    with_client(parts, talk)


def test_a_long_prompt_is_cut_and_keeps_its_beginning(parts: tuple[Any, Any]) -> None:
    async def talk(client: ClientConnection) -> None:
        text = "One day, a cat sat in the sun. " * 60
        full = await ask(client, action="infer", text=text, max_new_tokens=8, stream=False, customBos="<s>")
        assert len(parts[1].encode(full["util_text"], encode_special_tokens=True)[0]) <= 256 - 8
        assert full["util_text"].rstrip().endswith("sat in the sun.")
        assert full["util_text"].startswith("<s>") == ("<s>" in parts[1].extended_piece_to_id)

    with_client(parts, talk, cache=256)


def test_a_request_that_cannot_be_obeyed_is_rejected(parts: tuple[Any, Any]) -> None:
    async def talk(client: ClientConnection) -> None:
        for wrong in (
            {"action": "infer", "text": "a", "max_new_tokens": 0, "request_id": 3},
            {"action": "infer", "text": "a", "max_new_tokens": 5000},
            {"action": "infer", "text": "a", "max_new_tokens": 5, "temperature": -1},
            {"action": "infer", "text": 3, "max_new_tokens": 5},
            {"action": "infer", "max_new_tokens": 5},
            {"action": "estimate_token"},
            {"action": "lefttrim_token", "text": "a", "trimmed_length": "x"},
        ):
            found = await ask(client, **wrong)
            assert "error" in found
            assert found.get("request_id") == wrong.get("request_id")
        await client.send("{no json")
        assert "no JSON object" in json.loads(await client.recv())["error"]
        await client.send("[" * 100_000)
        assert "no JSON object" in json.loads(await client.recv())["error"]
        assert (await ask(client, action="echo")) == {"action": "echo"}

    with_client(parts, talk)
