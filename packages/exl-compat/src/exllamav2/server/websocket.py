"""The WebSocket service of exllamav2 on the async generator.

Messages are JSON with an `action`; answers have the same `action`, `request_id` and `response_id`. Requests of one
connection and of many run together. `stop` ends the requests of its own connection (with `target`, the one of that
`request_id`). A connection that closes ends its requests. An invalid message gets an answer with `error`; an unknown
action gets none.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from exl_generate import ExLlamaV2DynamicGeneratorAsync, ExLlamaV2DynamicJobAsync, RequestError
from exl_generate.sampling import Settings
from exl_kernels.errors import ExlError

__all__ = ["ExLlamaV2WebSocketServer"]

log = logging.getLogger(__name__)

Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]

#: Field of a request -> (setting of the sampler, default).
SETTINGS = {
    "temperature": ("temperature", 0.9),
    "top_k": ("top_k", 100),
    "top_p": ("top_p", 0.8),
    "top_a": ("top_a", 0.0),
    "min_p": ("min_p", 0.0),
    "typical": ("typical", 0.0),
    "rep_pen": ("token_repetition_penalty", 1.05),
    "freq_pen": ("token_frequency_penalty", 0.0),
    "pres_pen": ("token_presence_penalty", 0.0),
    "skew": ("skew", 0.0),
}
#: Tokens that a request reserves room for at a time, so that one long answer does not block the others.
SHARE = 256
REASONS = {"max_new_tokens": "num_tokens", "cancelled": "interrupted"}


class ExLlamaV2WebSocketServer:
    """Serve one model at `ip`:`port`.

    Args:
        ip: Address to listen on.
        port: Port; 0 means any free port, and the attribute `port` then holds its number.
        model: A loaded model.
        tokenizer: The model's tokenizer.
        cache: The cache that all requests share.
    """

    def __init__(self, ip: str, port: int, model: Any, tokenizer: Any, cache: Any) -> None:
        self.ip = ip
        self.port = port
        self.model = model
        self.tokenizer = tokenizer
        self.cache = cache

    def serve(self) -> None:
        """Serve until interrupted."""
        asyncio.run(self.serve_async())

    async def serve_async(self, ready: asyncio.Event | None = None) -> None:
        """Serve until the task is cancelled; `ready` is set when the port is open."""
        async with (
            ExLlamaV2DynamicGeneratorAsync(self.model, self.cache, self.tokenizer) as generator,
            serve(lambda connection: _Client(self, generator, connection).run(), self.ip, self.port) as server,
        ):
            self.port = next(iter(server.sockets)).getsockname()[1]
            if ready is not None:
                ready.set()
            await server.serve_forever()

    @property
    def limit(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return int(min(self.model.config.max_seq_len, self.cache.max_seq_len))


class _Client:
    """One connection and its requests."""

    def __init__(
        self, server: ExLlamaV2WebSocketServer, generator: ExLlamaV2DynamicGeneratorAsync, connection: ServerConnection
    ) -> None:
        self._server = server
        self._tokenizer = server.tokenizer
        self._generator = generator
        self._connection = connection
        self._running: dict[asyncio.Task[None], tuple[Any, list[ExLlamaV2DynamicJobAsync]]] = {}

    async def run(self) -> None:
        """Handle messages until the connection closes."""
        try:
            async for raw in self._connection:
                await self._obey(raw)
        except ConnectionClosed:
            pass
        finally:
            for task in self._running:
                task.cancel()

    async def _obey(self, raw: str | bytes) -> None:
        try:
            message = json.loads(raw)
            if not isinstance(message, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            await self._send({"error": f"the message is no JSON object: {error}"})
            return
        echo = {key: message[key] for key in ("action", "request_id", "response_id") if key in message}

        async def answer(fields: Message) -> None:
            await self._send(echo | fields)

        try:
            await self._act(message, answer)
        except (ExlError, KeyError, TypeError, ValueError) as error:
            await answer({"error": f"{type(error).__name__}: {error}"})

    async def _act(self, message: Message, answer: Send) -> None:
        action = message.get("action")
        if action == "echo":
            await answer({})
        elif action == "estimate_token":
            await answer({"num_tokens": int(self._tokenizer.encode(message["text"]).shape[-1])})
        elif action == "lefttrim_token":
            length = _count(message, "trimmed_length")
            ids = self._tokenizer.encode(message["text"])[0]
            await answer({"trimmed_text": self._tokenizer.decode(ids[max(0, len(ids) - length) :])})
        elif action == "stop":
            await self._stop(message.get("target"))
            await answer({})
        elif action == "infer":
            jobs: list[ExLlamaV2DynamicJobAsync] = []
            task = asyncio.create_task(self._infer(message, answer, jobs))
            self._running[task] = (message.get("request_id"), jobs)
            task.add_done_callback(lambda done: self._running.pop(done, None))
            await asyncio.sleep(0)  # until its job is queued: the next message, which may be here, may stop it

    async def _stop(self, target: Any) -> None:
        for request_id, jobs in list(self._running.values()):
            if target is None or target == request_id:
                for job in jobs:
                    await job.cancel()

    async def _infer(self, message: Message, answer: Send, jobs: list[ExLlamaV2DynamicJobAsync]) -> None:
        try:
            ids, text = self._prompt(message)
            job = ExLlamaV2DynamicJobAsync(
                self._generator,
                ids,
                _count(message, "max_new_tokens"),
                gen_settings=self._settings(message),
                stop_conditions=[*self._stop_ids(), *message.get("stop_conditions", [])],
                token_healing=bool(message.get("token_healing", False)),
                max_rq_tokens=SHARE,
            )
            jobs.append(job)
            response, reason = "", ""
            async for result in job:
                if "exception" in result:
                    raise result["exception"]
                chunk = result.get("text", "")
                response += chunk
                if chunk and message.get("stream"):
                    whole = {"response": response} if message.get("stream_full") else {}
                    await answer({"response_type": "chunk", "chunk": chunk} | whole)
                if result["eos"]:
                    reason = REASONS.get(result["eos_reason"], "eos")
            last = {"response_type": "full", "util_text": text, "response": response, "stop_reason": reason}
            await answer(last | ({"tag": message["tag"]} if "tag" in message else {}))
        except ConnectionClosed:
            return
        except Exception as error:
            log.debug("a request failed", exc_info=True)
            await answer({"error": f"{type(error).__name__}: {error}"})

    def _prompt(self, message: Message) -> tuple[torch.Tensor, str]:
        """Return ids and text of the prompt, cut on the left until the answer has room; `customBos` stays in front."""
        room = self._server.limit - _count(message, "max_new_tokens")
        front = self._tokenizer.encode(message.get("customBos", ""), encode_special_tokens=True)
        ids = self._tokenizer.encode(message["text"], encode_special_tokens=True)
        keep = room - front.shape[-1]
        if keep < 1:
            raise RequestError(f"max_new_tokens leaves {room} of {self._server.limit} tokens for the prompt; lower it")
        joined = torch.cat([front, ids[:, max(0, ids.shape[-1] - keep) :]], dim=-1)
        return joined, self._tokenizer.decode(joined[0], decode_special_tokens=True)

    def _settings(self, message: Message) -> Settings:
        chosen = {name: message.get(field, default) for field, (name, default) in SETTINGS.items()}
        settings = Settings(**chosen)
        if message.get("bann_bann"):
            settings.disallow_tokens(self._tokenizer, message["bann_bann"])
        return settings

    def _stop_ids(self) -> list[int]:
        first = self._tokenizer.eos_token_id
        every = [*([] if first is None else [first]), *getattr(self._tokenizer, "eos_token_ids", ())]
        return sorted({int(i) for i in every if i >= 0})

    async def _send(self, message: Message) -> None:
        await self._connection.send(json.dumps(message))


def _count(message: Message, name: str) -> int:
    value = message[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"{name} is {value!r}; it must be an integer of at least 1")
    return value
