"""Steps that chat and text completions share: from clean fields to an `EngineRequest`."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from exl_serve.api.http import Call
from exl_serve.api.state import ModelHandle, TextCodec
from exl_serve.engine.client import EngineClient
from exl_serve.errors import ServeError
from exl_serve.request.fields import IGNORED, Field, read_fields
from exl_serve.request.internal import Constraint, EngineRequest, id_bytes
from exl_serve.request.nested import unknown_members
from exl_serve.request.rules import check_kinds
from exl_serve.request.sampling import draw_seed, sampling_of, seeds_of, stop_ids_of

__all__ = [
    "Target",
    "admit",
    "checked_ids",
    "engine_request",
    "most_prompt_tokens",
    "prompt_logprobs_of",
    "read_request",
    "resolve",
    "seed_of",
    "settings_of",
    "stream_options",
]

ANSWER_SHARE = 4
"""An answer without a limit keeps one part of so many of the context when the prompt is cut."""
MANY_IDS = 4096
"""The ids of longer lists are checked in another thread."""


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a request names, with its loaded engine."""

    handle: ModelHandle
    engine: EngineClient
    adapter: str | None
    name: str

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints mean equal tokens for equal seeds."""
        return f"fp_{self.engine.card.digest[:12]}"


async def resolve(call: Call, fields: Mapping[str, Any]) -> Target:
    """Return the model that the request names, loaded. Raises ServeError 404 or 503."""
    if call.state.refusing:
        raise ServeError.unavailable("draining", "the server is about to stop: try again elsewhere", 5.0)
    name = fields.get("model", "")
    handle, adapter = call.state.models.resolve(name, call.caller)
    call.model = handle.config.id if adapter is None else f"{handle.config.id}:{adapter}"
    engine = await handle.engine()
    call.phase("admit", call.began)
    return Target(handle, engine, adapter, call.model)


def admit(call: Call, target: Target, choices: int) -> None:
    """Count a request against its key's limits until it ends, before its prompt is rendered and tokenized.

    Raises ServeError 429, also where the engine's queue is known to be full, and 400.
    """
    call.ticket = call.state.admit(call.caller, choices)
    if call.ticket is not None:
        call.headers |= call.ticket.headers
    target.engine.check_room(call.state.config.server.limits.max_queued_requests)


def read_request(
    call: Call, body: Mapping[str, Any], fields: Mapping[str, Field], own: frozenset[str]
) -> dict[str, Any]:
    """Return the clean fields.

    Unknown fields, and unknown members of known ones, are named in a header, or rejected. Raises ServeError 400.
    """
    found, unknown = read_fields(body, fields, own)
    unknown += unknown_members({name: value for name, value in body.items() if name in fields or name in own})
    if name := found.get("safety_identifier") or found.get("user"):
        call.user = hashlib.blake2b(name.encode(), key=call.caller.salt[:64], digest_size=8).hexdigest()
    if unknown:
        if call.state.config.server.strict_fields:
            raise ServeError.invalid(
                f"unknown fields: {', '.join(unknown)[:200]}", unknown[0][:64], "unknown_parameter"
            )
        names = ",".join(
            name[:64] for name in unknown[:16] if name.isascii() and name.isprintable() and "," not in name
        )
        call.headers["x-exl-ignored"] = names
        for name in unknown[:16]:
            call.state.meter.count("exl_ignored_fields_total", field=name if name in IGNORED else "other")
    return found


def stream_options(fields: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return (include_usage, continuous_usage_stats). Raises ServeError 400."""
    value = fields.get("stream_options")
    if value is None:
        return False, False
    if not fields.get("stream"):
        raise ServeError.invalid("stream_options is for streams: set stream to true", "stream_options")
    if not isinstance(value, dict):
        raise ServeError.invalid("stream_options must be an object", "stream_options")
    if value.get("include_obfuscation") is True:
        raise ServeError.unsupported("stream_options.include_obfuscation", "include_obfuscation is not offered")
    names = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    check_kinds(value, "stream_options", **dict.fromkeys(names, bool))
    return bool(value.get(names[0])), bool(value.get(names[1]))


def prompt_logprobs_of(call: Call, fields: Mapping[str, Any]) -> int | None:
    """Return the candidates wanted for each token of the prompt, or None. Raises ServeError 400."""
    top: int | None = fields.get("prompt_logprobs")
    if top is None:
        return None
    name = "prompt_logprobs"
    if not call.state.config.server.allow_prompt_logprobs:
        raise ServeError.unsupported(name, f"{name} is off on this server: set server.allow_prompt_logprobs")
    if fields.get("stream"):
        raise ServeError.invalid(f"{name} is not streamed: leave out stream, or {name}", name)
    if fields.get("token_healing"):
        raise ServeError.invalid(f"{name} and token_healing exclude each other: leave one out", name)
    return top


def settings_of(call: Call, request: EngineRequest) -> dict[str, Any] | None:
    """Return the settings that a request runs with, for clients that send `x-exl-debug: 1`; None for others."""
    if call.header("x-exl-debug") != "1":
        return None
    found = msgspec.structs.asdict(request.sampling)
    # JSON has no infinity: -100 bans, as in the request.
    found["logit_bias"] = {str(id): max(bias, -100.0) for id, bias in request.sampling.logit_bias.items()}
    names = ("seeds", "max_tokens", "min_tokens", "stop_ids", "stop_strings", "ignore_eos", "banned_strings")
    found |= {name: getattr(request, name) for name in (*names, "token_healing", "priority")}
    return found


async def checked_ids(value: Any, size: int, name: str, wanted: str) -> list[int]:
    """Return the token ids of a request, checked without blocking the event loop.

    `wanted`: what the field `name` takes. Raises ServeError 400 unless they are ids of a vocabulary of that size.
    """
    param = name.partition("[")[0]

    def check() -> None:
        if not isinstance(value, list) or any(type(i) is not int for i in value):
            raise ServeError.invalid(f"{name} must be {wanted}", param)
        bad = next((i for i in value if not 0 <= i < size), None)
        if bad is not None:
            raise ServeError.invalid(f"{name} has token {bad}; ids are 0 to {size - 1}", param, "token_id")

    if isinstance(value, list) and len(value) > MANY_IDS:
        await asyncio.to_thread(check)
    else:
        check()
    return list(value)


def most_prompt_tokens(fields: Mapping[str, Any], target: Target, new: int | None) -> int | None:
    """Return the most tokens that the prompt may keep; None where a longer one is not to be cut.

    `new`: the tokens of the answer, None for any number. Raises ServeError 400.
    """
    most: int | None = fields.get("truncate_prompt_tokens")
    if most is None:
        return None
    name, context = "truncate_prompt_tokens", target.engine.card.max_seq_len
    if most == 0:
        raise ServeError.invalid(f"{name} is 0; it must be -1, or at least 1", name)
    if most > 0:
        return most
    room = context - (max(1, context // ANSWER_SHARE) if new is None else new)
    if room < 1:
        raise ServeError.invalid(
            f"{new} tokens are asked for, which leave none of the context of {context} tokens for the prompt",
            "max_tokens",
            "context_length_exceeded",
        )
    return room


async def negative_ids_of(target: Target, fields: Mapping[str, Any]) -> list[int] | None:
    """Return the ids of the field `negative_prompt`, encoded without blocking the event loop; None without it."""
    negative = fields.get("negative_prompt")
    return None if negative is None else await target.handle.text.encode_long(negative, bos=True)


def engine_request(
    call: Call,
    target: Target,
    fields: Mapping[str, Any],
    ids: Sequence[int],
    *,
    number: int = 0,
    max_tokens: int | None,
    n: int,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    constraints: tuple[Constraint, ...] = (),
    special_text: bool,
    seeds: tuple[int, ...] | None = None,
    negative_ids: Sequence[int] | None = None,
    source: str = "messages",
) -> EngineRequest:
    """Build the engine request of one prompt with its n completions.

    `seeds`: one for each completion, None: from the field `seed`; `negative_ids`: those of the field `negative_prompt`
    (`negative_ids_of`); `source`: the field with the prompt. Raises ServeError 400 or 403.
    """
    card, text = target.engine.card, target.handle.text
    if not ids:
        raise ServeError.invalid("the prompt is empty: it needs at least one token", source)
    room = card.max_seq_len - len(ids)
    asked = max_tokens if max_tokens is not None else call.state.config.server.default_max_tokens
    new = room if asked is None else asked
    if room < (0 if asked == 0 else 1) or new > room:
        least = 0 if asked == 0 else max(new, 1)
        raise ServeError.invalid(
            f"the prompt has {len(ids)} tokens and {least} are asked for, together more than the context of "
            f"{card.max_seq_len} tokens: shorten the prompt{f', or ask for at most {room}' if room >= 1 else ''}",
            "max_tokens" if room >= 1 else source,
            "context_length_exceeded",
        )
    if fields.get("min_tokens", 0) > new:
        raise ServeError.invalid(
            f"min_tokens is {fields['min_tokens']}, more than the {new} tokens at most", "min_tokens"
        )
    if (negative_ids is None) != ("cfg_scale" not in fields):
        raise ServeError.invalid("negative_prompt and cfg_scale go together: give both or none", "cfg_scale")
    timeout = fields.get("timeout", _timeout_of(call.header("x-exl-timeout-ms")))
    priority = fields.get("priority", max(1, call.caller.best_priority))
    if priority < call.caller.best_priority:
        raise ServeError(
            403,
            "permission_error",
            "insufficient_scope",
            f"priority {priority} is not allowed for this key: {call.caller.best_priority} and higher numbers are",
            param="priority",
        )
    # A digest, so that salts have one length whatever the request's own salt is.
    salt = _salt(fields.get("cache_salt", ""), call.caller.salt)
    return EngineRequest(
        id=f"{call.id}/{number}" if number else call.id,
        prompt=id_bytes(ids),
        negative_prompt=None if negative_ids is None else id_bytes(negative_ids),
        sampling=sampling_of(fields, card.sampling_defaults, text),
        seeds=seeds_of(seed_of(call, fields), n) if seeds is None else seeds,
        max_tokens=new,
        min_tokens=fields.get("min_tokens", 0),
        stop_ids=stop_ids_of(fields, text),
        stop_strings=fields.get("stop", ()),
        ignore_eos=fields.get("ignore_eos", False),
        banned_strings=fields.get("banned_strings", ()),
        constraints=constraints,
        token_healing=fields.get("token_healing", False) and _can_be_healed(ids, negative_ids, text),
        special_text=special_text,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        adapter=target.adapter,
        cache_salt=salt,
        deadline=None if timeout is None else time.time() + timeout,
        key=call.caller.name,
        weight=call.caller.weight,
        priority=priority,
        fill=asked is None,
    )


def _can_be_healed(ids: Sequence[int], negative_ids: Sequence[int] | None, text: TextCodec) -> bool:
    """Whether the last token of a prompt can be the begin of a longer one: a special token cannot."""
    shortest = len(ids) if negative_ids is None else min(len(ids), len(negative_ids))
    return shortest > 1 and ids[-1] not in text.special.values()


def seed_of(call: Call, fields: Mapping[str, Any]) -> int:
    """Return the request's seed, or a random one; a header reports it."""
    seed = int(fields["seed"]) if "seed" in fields else draw_seed()
    call.headers["x-exl-seed"] = str(seed)
    return seed


def _timeout_of(header: str | None) -> float | None:
    """Return the timeout in seconds, or None. Raises ServeError 400."""
    if header is None:
        return None
    if not header.isascii() or not header.isdecimal() or not 1 <= len(header) <= 8 or int(header) == 0:
        raise ServeError.invalid(
            f"the header x-exl-timeout-ms is {header[:32]!r}; it must be a number of milliseconds from 1 to 99999999",
            "x-exl-timeout-ms",
        )
    return int(header) / 1000


def _salt(own: str, of_key: bytes) -> bytes:
    if not own and not of_key:
        return b""
    return hashlib.blake2b(own.encode(), key=of_key, digest_size=16).digest()
