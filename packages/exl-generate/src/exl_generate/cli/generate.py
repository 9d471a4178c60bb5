"""`exl generate`: continue a text."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl_generate.cli import processes
from exl_generate.cli.constraints import Constraints, read_schema
from exl_generate.cli.interrupt import interruptible
from exl_generate.cli.models import load
from exl_generate.cli.statistics import generation_line
from exl_generate.dynamic import PAGED_PAGE_SIZE, ExLlamaV2DynamicJob
from exl_generate.errors import CapacityError, RequestError
from exl_generate.sampling import Settings

__all__ = ["Options", "run"]

#: Tokens to generate when nobody says how many.
DEFAULT_TOKENS = 200
#: Weight of the prompt against a negative prompt when nobody says how much.
DEFAULT_CFG_SCALE = 1.5


@dataclass(frozen=True)
class Options:
    """The parsed arguments."""

    model: Path | None
    settings: Settings
    max_tokens: int | None
    min_tokens: int
    seed: int | None
    stop: list[str]
    ban: list[str]
    json_schema: str | None
    regex: str | None
    draft: str | None
    ngram: bool
    negative_prompt: str | None
    cfg_scale: float | None
    loras: list[Path]
    special: bool
    cache: str
    cache_tokens: int | None
    tp: bool = False


def run(prompt: str, options: Options, *, echo: bool, as_json: bool) -> None:
    """Stream the continuation to standard output, or print one JSON object at the end. Statistics go to stderr.

    Raises RequestError, with the output written, where it ended before the schema or pattern was complete.
    """
    _check(options)
    schema = None if options.json_schema is None else read_schema(options.json_schema)
    if prompt == "-" and options.tp and processes.started():
        raise RequestError("the processes of torchrun cannot all read standard input: give the prompt as an argument")
    text = _piped() if prompt == "-" else prompt
    loaded = load(options.model, options.tp)
    constraints = Constraints(loaded, schema, options.regex)  # a wrong one is refused before the weights are read
    ids = loaded.tokenizer.encode(text, add_bos=None, encode_special_tokens=options.special)
    if ids.shape[1] == 0:
        raise RequestError("the prompt is empty and this model has no BOS token: write at least one word")
    rows = [ids]
    settings = options.settings
    if options.negative_prompt is not None:
        rows.append(loaded.tokenizer.encode(options.negative_prompt, add_bos=None))
        scale = DEFAULT_CFG_SCALE if options.cfg_scale is None else options.cfg_scale
        settings = dataclasses.replace(settings, cfg_scale=scale)
    new = _new_tokens(options, max(row.shape[1] for row in rows), loaded.config.max_seq_len)
    tokens = options.cache_tokens or sum(_pages(row.shape[1] + new) for row in rows)
    generator = loaded.generator(options.cache, tokens, draft=options.draft, ngram=options.ngram)
    job = ExLlamaV2DynamicJob(
        rows,
        new,
        min_new_tokens=options.min_tokens,
        gen_settings=settings,
        seed=loaded.seed(options.seed),
        stop_conditions=[*loaded.stop_ids(), *options.stop],
        banned_strings=options.ban,
        filters=list(constraints.filters),
        decode_special_tokens=options.special,
        loras=loaded.adapters(options.loras),
    )
    last: dict[str, Any] = {}
    written: list[int] = []
    with interruptible() as interrupted:
        if echo and not as_json:
            _write(text)
        generator.enqueue(job)
        while generator.num_remaining_jobs():
            if interrupted.is_set():
                generator.cancel(job)
            for result in generator.iterate():
                if not as_json:
                    _write(result.get("text", ""))
                if "token_ids" in result:
                    written += result["token_ids"].flatten().tolist()
                last = result
    if "exception" in last:
        raise last["exception"]
    if as_json:
        print(json.dumps(_report(text, last, options)))
    else:
        _write("\n")
        print(generation_line(last), file=sys.stderr)
    if interrupted.is_set():
        sys.exit(130)
    if last["eos_reason"] == "max_new_tokens" and not constraints.complete(written):
        raise RequestError(
            f"the output was cut after {new} tokens, before {constraints.what} was complete: raise --max-tokens (-n)"
        )


def _new_tokens(options: Options, longest: int, limit: int) -> int:
    """Tokens to generate after a prompt of `longest` tokens. Raises where the limit of the model leaves too few."""
    room = limit - longest
    if room < 1:
        raise RequestError(f"the prompt has {longest} tokens, the model's limit is {limit}")
    for name, asked in (("--max-tokens", options.max_tokens), ("--min-tokens", options.min_tokens)):
        if asked is not None and asked > room:
            raise CapacityError(
                f"the prompt has {longest} tokens and {name} is {asked}, together {longest + asked}; the model's limit "
                f"is {limit}: ask for at most {room}"
            )
    return min(max(DEFAULT_TOKENS, options.min_tokens), room) if options.max_tokens is None else options.max_tokens


def _piped() -> str:
    """Standard input without the line break that ends its last line: echo adds it, and nobody means it."""
    text = sys.stdin.read()
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def _check(options: Options) -> None:
    """Refuse options that contradict each other or would do nothing, before anything is loaded."""
    if options.max_tokens is not None and options.min_tokens > options.max_tokens:
        raise RequestError(
            f"--min-tokens is {options.min_tokens}, more than --max-tokens (-n) {options.max_tokens}: lower the one or "
            "raise the other"
        )
    if options.cfg_scale is not None and options.negative_prompt is None:
        raise RequestError(f"--cfg-scale is {options.cfg_scale}, but there is no --negative-prompt to weigh against")


def _pages(tokens: int) -> int:
    """Tokens in whole pages."""
    return -(-tokens // PAGED_PAGE_SIZE) * PAGED_PAGE_SIZE


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def _report(prompt: str, last: dict[str, Any], options: Options) -> dict[str, Any]:
    drafted: dict[str, Any] = {k: last[k] for k in ("accepted_draft_tokens", "rejected_draft_tokens") if k in last}
    keys = ("eos_reason", "new_tokens", "prompt_tokens", "cached_tokens", "time_prefill", "time_generate")
    return {
        "prompt": prompt,
        "completion": last["full_completion"],
        **{key: last[key] for key in keys},
        **drafted,
        "seed": last["job"].effective_seed,
        "settings": {k: repr(v) for k, v in options.settings.effective().items()},
    }
