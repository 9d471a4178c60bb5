"""`exl generate`: continue a text."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl_generate.cli.interrupt import interruptible
from exl_generate.cli.models import Loaded, load
from exl_generate.dynamic import PAGED_PAGE_SIZE, ExLlamaV2DynamicJob
from exl_generate.errors import CapacityError, RequestError
from exl_generate.sampling import Settings

if TYPE_CHECKING:
    from exl_filters.grammar import ExLlamaV2GrammarFilter

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


def run(prompt: str, options: Options, *, echo: bool, as_json: bool) -> None:
    """Stream the continuation to standard output, or print one JSON object at the end. Statistics go to stderr.

    Raises RequestError, with the output written, where it ended before the schema or pattern was complete.
    """
    _check(options)
    schema = None if options.json_schema is None else _schema(options.json_schema)
    text = _piped() if prompt == "-" else prompt
    loaded = load(options.model)
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
    generator = loaded.generator(options.cache, tokens, draft=options.draft, use_ngram_draft=options.ngram)
    filters = _filters(loaded, schema, options.regex)
    job = ExLlamaV2DynamicJob(
        rows,
        new,
        min_new_tokens=options.min_tokens,
        gen_settings=settings,
        seed=options.seed,
        stop_conditions=[*loaded.stop_ids(), *options.stop],
        banned_strings=options.ban,
        filters=filters,
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
        print(_statistics(last), file=sys.stderr)
    if interrupted.is_set():
        sys.exit(130)
    if last["eos_reason"] == "max_new_tokens" and not all(_is_complete(f, written) for f in filters):
        what = "the JSON of --json-schema" if schema is not None else "the text that --regex asks for"
        raise RequestError(
            f"the output was cut after {new} tokens, before {what} was complete: raise --max-tokens (-n)"
        )


def _new_tokens(options: Options, longest: int, limit: int) -> int:
    """Tokens to generate behind a prompt of `longest` tokens. Raises where the limit of the model leaves too few."""
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


def _is_complete(constraint: ExLlamaV2GrammarFilter, ids: list[int]) -> bool:
    """Whether an output of these tokens may end there. (The job works on a clone of the filter.)"""
    constraint.begin()
    for token in ids:
        constraint.feed(token)
    return constraint.is_complete()


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


def _filters(loaded: Loaded, schema: str | None, regex: str | None) -> list[ExLlamaV2GrammarFilter]:
    """Build the filters that the output must satisfy."""
    if schema is None and regex is None:
        return []
    from exl_filters.grammar import ExLlamaV2GrammarFilter

    found = []
    if schema is not None:
        found.append(ExLlamaV2GrammarFilter(loaded.model, loaded.tokenizer, json_schema=schema))
    if regex is not None:
        found.append(ExLlamaV2GrammarFilter(loaded.model, loaded.tokenizer, regex=regex))
    return found


def _schema(source: str) -> str:
    """The text of a schema that was given as a file, or as itself."""
    if source.lstrip().startswith(("{", "[", '"')) or source.strip() in ("true", "false"):
        return source
    file = Path(source)
    shown = source if len(source) <= 200 else f"{source[:200]}..."
    try:
        if file.is_dir():
            raise RequestError(f"--json-schema {shown} is a folder: name a file, or write the schema itself")
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RequestError(
            f"--json-schema {shown}: there is no such file, and a schema itself begins with {{: check the name"
        ) from None
    except OSError as error:
        raise RequestError(f"--json-schema {shown}: cannot read the file ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"--json-schema {shown}: cannot read the file ({error})") from None


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


def _statistics(last: dict[str, Any]) -> str:
    seconds = max(last["time_generate"], 1e-9)
    speed = (last["new_tokens"] - 1) / seconds if last["new_tokens"] > 1 else 0.0
    return (
        f"[{last['prompt_tokens']} prompt tokens in {last['time_prefill']:.2f} s, {last['new_tokens']} new tokens in "
        f"{seconds:.2f} s, {speed:.0f} tokens/s; ended by {last['eos_reason']}; seed {last['job'].effective_seed}]"
    )
