"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from exl_serve.api.generation import Generation, answer_id, serve
from exl_serve.api.http import Call, now
from exl_serve.api.prepare import (
    Target,
    admit,
    checked_ids,
    engine_request,
    most_prompt_tokens,
    negative_ids_of,
    prompt_logprobs_of,
    read_request,
    resolve,
    seed_of,
    settings_of,
    stream_options,
)
from exl_serve.config.model import Limits
from exl_serve.errors import ServeError
from exl_serve.request.fields import COMMON, PROMPT_LOGPROBS, SAMPLING, Field, by_name
from exl_serve.request.formats import format_of
from exl_serve.request.rules import boolean, integer
from exl_serve.request.sampling import seeds_of
from exl_serve.stream.channels import OutputFamily
from exl_serve.stream.chunks import Completion
from exl_serve.stream.families.table import Format
from exl_serve.stream.family import ChannelSettings

__all__ = ["COMPLETION", "FIELDS", "completions"]

COMPLETION: tuple[Field, ...] = (
    Field(
        "max_tokens",
        integer(0, 1 << 24),
        "0 to what the context leaves",
        ("n_predict", "max_length", "max_completion_tokens"),
        meaning="most new tokens; absent: 16. 0 needs `echo`",
    ),
    Field(
        "logprobs",
        integer(0, 20),
        "0 to 20",
        ("n_probs",),
        meaning="candidates for each token, with log-probabilities; with `echo` also for the prompt",
    ),
    PROMPT_LOGPROBS,
    Field(
        "best_of", integer(1, 1 << 24), "1, or `n`", meaning="no other completions are made than those of the answer"
    ),
    Field("echo", boolean, "true or false", meaning="the prompt in front of its completion"),
    Field(
        "include_reasoning",
        boolean,
        "true or false",
        meaning="not used: reasoning is a part of the text like any other",
    ),
    Field(
        "add_special_tokens", boolean, "true or false", ("add_bos_token",), meaning="false: no BOS in front of a prompt"
    ),
)
"""Fields of text completions alone."""
FIELDS = by_name(COMMON, SAMPLING, COMPLETION)
DEFAULT_MAX_TOKENS = 16
PLAIN = Format("text", think=None)


async def completions(call: Call) -> None:
    """Answer with the continuation of a text.

    Raises ServeError for every fault that is known before the first token.
    """
    body = await call.json()
    call.asks("text_completion", body)
    fields = read_request(call, body, FIELDS, frozenset({"prompt", "suffix"}))
    scored = _checked(call, body, fields)
    limits = call.state.config.server.limits
    usage, continuous = stream_options(fields)
    n = fields.get("n", 1)
    wanted = format_of(fields, limits)
    target = await resolve(call, fields)
    given = _several(body.get("prompt"))
    _check_number(n, len(given), limits)
    admit(call, target, n * len(given))
    began = time.monotonic()
    prompts, truncated = _cut(await _prompts(given, fields, target), fields, target)
    call.phase("tokenise", began)
    call.state.meter.observe("exl_tokenize_seconds", time.monotonic() - began, model_name=call.model)
    if truncated is not None:
        call.headers["x-exl-truncated-tokens"] = str(truncated)
    text = target.handle.text
    total = n * len(prompts)
    seeds, negative_ids = seeds_of(seed_of(call, fields), total), await negative_ids_of(target, fields)
    requests = [
        engine_request(
            call,
            target,
            fields,
            ids,
            number=number,
            max_tokens=fields.get("max_tokens", DEFAULT_MAX_TOKENS),
            n=n,
            logprobs=fields.get("logprobs"),
            prompt_logprobs=scored,
            constraints=() if wanted is None else (wanted,),
            special_text=True,
            seeds=seeds[number * n : (number + 1) * n],
            negative_ids=negative_ids,
            source="prompt",
        )
        for number, ids in enumerate(prompts)
    ]
    family = OutputFamily(PLAIN, text.special, text.piece)
    shown = fields.get("skip_special_tokens", True) is False
    settings = ChannelSettings(shows_stop=fields.get("include_stop_str_in_output", False))
    machines = [family.machine(i, settings, call.id, show_special=shown) for i in range(total)]
    head = {"id": answer_id("cmpl-"), "created": now(), "model": target.name, "system_fingerprint": target.fingerprint}
    answer = Completion(
        head,
        total,
        text,
        include_usage=usage,
        continuous_usage=continuous,
        logprobs="logprobs" in fields,
        return_ids=fields.get("return_token_ids", False),
        prompts=len(prompts),
        prompt_logprobs="prompt_logprobs" in fields,
        settings=settings_of(call, requests[0]),
        tokens_as_ids=fields.get("return_tokens_as_token_ids", False),
        truncated=truncated,
    )
    answer.prompt_ids = prompts
    ends = [text.piece(prompt[-1]) for prompt in prompts]
    answer.healed = [end if one.token_healing else b"" for end, one in zip(ends, requests, strict=True)]
    if not shown:
        answer.hidden = frozenset(text.special.values())
    if fields.get("echo", False):
        echoed = [await text.decode_long(prompt, special=shown) for prompt in prompts]
        answer.echo = [echoed[i // n] for i in range(total)]
    await serve(
        call,
        Generation(target.engine, requests, machines),
        answer,
        stream=fields.get("stream", False),
        interval=fields.get("stream_interval", 1),
    )


def _check_number(n: int, prompts: int, limits: Limits) -> None:
    """Raise ServeError 400 for too many choices."""
    if n > limits.max_n or n * prompts > limits.max_choices:
        raise ServeError.invalid(
            f"{prompts} prompts and n = {n}; n is at most {limits.max_n}, and all choices together at most "
            f"{limits.max_choices}",
            "n",
        )


def _checked(call: Call, body: Mapping[str, Any], fields: Mapping[str, Any]) -> int | None:
    """Check fields that depend on one another; return the candidates wanted for each token of the prompt, or None.

    Raises ServeError 400.
    """
    if body.get("suffix"):
        raise ServeError.unsupported("suffix", "suffix is not offered for this model: it has no format for infilling")
    best_of, n = fields.get("best_of", 1), fields.get("n", 1)
    if best_of not in (1, n):
        raise ServeError.unsupported("best_of", f"best_of is {best_of} and n is {n}: leave out best_of, or make it n")
    echo = fields.get("echo", False)
    scored = fields.get("logprobs") if echo else None
    if fields.get("max_tokens") == 0 and not echo:
        raise ServeError.invalid(
            "max_tokens is 0, which leaves nothing to answer: set echo for the prompt", "max_tokens"
        )
    if scored is not None and fields.get("token_healing"):
        raise ServeError.invalid(
            "echo with logprobs and token_healing exclude each other: leave one out", "token_healing"
        )
    asked = prompt_logprobs_of(call, fields)
    if asked is not None and scored not in (None, asked):
        raise ServeError.invalid(
            f"prompt_logprobs is {asked} and logprobs with echo is {scored}: give one number", "prompt_logprobs"
        )
    return scored if asked is None else asked


def _cut(prompts: list[list[int]], fields: Mapping[str, Any], target: Target) -> tuple[list[list[int]], int | None]:
    """Return the prompts without the first tokens of those that are too long, and the number of tokens left out.

    The latter is None where the request does not allow it. A BOS in front stays. Raises ServeError 400.
    """
    most = most_prompt_tokens(fields, target, fields.get("max_tokens", DEFAULT_MAX_TOKENS))
    if most is None:
        return prompts, None
    front = target.handle.text.encode("", bos=True)
    found = []
    for ids in prompts:
        kept = front if len(ids) > most > len(front) and ids[: len(front)] == front else []
        found.append(ids if len(ids) <= most else kept + ids[len(ids) - most + len(kept) :])
    return found, sum(map(len, prompts)) - sum(map(len, found))


def _several(value: Any) -> list[Any]:
    """Return the prompts of a field that holds a text, texts, ids, or lists of ids. Raises ServeError 400."""
    if value is None:
        raise ServeError.invalid("prompt is missing", "prompt", "missing_field")
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ServeError.invalid("prompt must be a text, a list of texts, ids, or a list of lists of ids", "prompt")
    return [value] if type(value[0]) is int else value


async def _prompts(prompts: list[Any], fields: Mapping[str, Any], target: Target) -> list[list[int]]:
    """Return the token ids of each prompt, a text or a list of ids. Raises ServeError 400."""
    bos = fields.get("add_special_tokens", True)
    found: list[list[int]] = []
    for at, one in enumerate(prompts):
        if isinstance(one, str):
            try:
                one.encode()
            except UnicodeEncodeError:
                raise ServeError.invalid(f"prompt[{at}] holds a lone surrogate", "prompt") from None
            found.append(await target.handle.text.encode_long(one, special=True, bos=bos))
        else:
            size = target.engine.card.vocab_size
            found.append(await checked_ids(one, size, f"prompt[{at}]", "a text or a list of token ids"))
    return found
