"""Build the generator's jobs from an `EngineRequest`, and events from the columns of its steps."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from exl_filters import FilterError, TriggeredFilter, create
from exl_generate import COLUMN_FLAGS, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.dynamic.columns import Extra, JobEnd
from exl_generate.dynamic.prompt_scores import TokenScore, scores_of
from exl_generate.sampling import SparseBias
from exl_serve.engine.budget import ThinkingBudget
from exl_serve.engine.events import EngineEvent, Failed, Finished, Progress, Started, TokenLogprob, Tokens, Usage
from exl_serve.engine.failures import serve_error
from exl_serve.engine.leading import LeadingFilter
from exl_serve.engine.reasoning import AwaitedFilter, OutsideFilter
from exl_serve.engine.vision import with_images
from exl_serve.errors import ServeError
from exl_serve.request.internal import Constraint, EngineRequest, Sampling

__all__ = [
    "END",
    "FIRST",
    "HELD",
    "PAGES_AT_ONCE",
    "STARTED",
    "Reader",
    "compile_constraints",
    "make_job",
    "settings_of",
]

STARTED, FIRST, END, HELD = (COLUMN_FLAGS[name] for name in ("started", "first", "end", "held"))
PAGES_AT_ONCE = 512
"""New tokens that a job reserves pages for at a time, so that a large limit does not block the cache for others."""

_PART = re.compile(r"(?:call|json|value|TEXT)_(\d+)(?:_\d+)?: (?:%json (?=\{)|(?=/))")
"""The begin of a grammar's rule with the schema of a part, or with the pattern of one of its texts."""


def settings_of(sampling: Sampling, vocab_size: int) -> Any:
    """Return the sampler's settings. Every field is set, so that no default of the library is used."""
    return ExLlamaV2Sampler.Settings(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        top_a=sampling.top_a,
        min_p=sampling.min_p,
        tfs=sampling.tfs,
        typical=sampling.typical,
        skew=sampling.skew,
        temperature_last=sampling.temperature_last,
        smoothing_factor=sampling.smoothing_factor,
        min_temp=sampling.min_temp,
        max_temp=sampling.max_temp,
        temp_exponent=sampling.temp_exponent,
        mirostat=sampling.mirostat,
        mirostat_tau=sampling.mirostat_tau,
        mirostat_eta=sampling.mirostat_eta,
        token_repetition_penalty=sampling.token_repetition_penalty,
        token_repetition_range=sampling.token_repetition_range,
        token_repetition_decay=sampling.token_repetition_decay,
        token_frequency_penalty=sampling.token_frequency_penalty,
        token_presence_penalty=sampling.token_presence_penalty,
        dry_multiplier=sampling.dry_multiplier,
        dry_base=sampling.dry_base,
        dry_allowed_length=sampling.dry_allowed_length,
        dry_range=sampling.dry_range,
        dry_sequence_breakers=sampling.dry_sequence_breakers,
        xtc_probability=sampling.xtc_probability,
        xtc_threshold=sampling.xtc_threshold,
        cfg_scale=sampling.cfg_scale,
        token_bias=_bias(sampling, vocab_size),
    )


def _bias(sampling: Sampling, vocab_size: int) -> SparseBias | None:
    """Return the biases; None where no token has one. Raises ServeError for ids outside the vocabulary."""
    if not sampling.logit_bias and sampling.allowed_token_ids is None:
        return None
    for param, ids in (("logit_bias", sampling.logit_bias), ("allowed_token_ids", sampling.allowed_token_ids or ())):
        bad = next((i for i in ids if not 0 <= i < vocab_size), None)
        if bad is not None:
            raise ServeError.invalid(
                f"{param} names token id {bad}; the vocabulary has ids 0 to {vocab_size - 1}", param, "token_id"
            )
    allowed = sampling.allowed_token_ids
    if allowed is None:
        return SparseBias.of(sampling.logit_bias)
    return SparseBias.of({token: sampling.logit_bias.get(token, 0.0) for token in allowed}, rest=-math.inf)


def compile_constraints(constraints: Sequence[Constraint], model: Any, tokenizer: Any) -> list[Any]:
    """Compile the filters of a request. May take seconds: do not call it on the engine's thread. Raises
    ServeError 400.
    """
    return [_compiled(constraint, model, tokenizer) for constraint in constraints]


def _compiled(constraint: Constraint, model: Any, tokenizer: Any) -> Any:
    try:
        made = _filter(constraint, model, tokenizer)
        if constraint.after is None:
            return made
        if constraint.reasoning is not None:
            return OutsideFilter(made, constraint.after, constraint.then, tokenizer, *constraint.reasoning)
        kind = AwaitedFilter if constraint.awaited else TriggeredFilter
        marked = kind(made, constraint.after, constraint.then, tokenizer=tokenizer)
        return LeadingFilter(made, marked, constraint.leading, tokenizer) if constraint.leading else marked
    except FilterError as error:
        if not constraint.around:
            _check_parts(constraint, model, tokenizer)
        param = constraint.param
        if constraint.around:
            # The content's format alone shows whether the fault is in it, or in the schemas of the tools.
            _compiled(msgspec.structs.replace(constraint, around="", after=None, parts=()), model, tokenizer)
            _check_parts(constraint, model, tokenizer)
            param = "tools"
        found = serve_error(error, param)
        if found.code == "invalid_grammar" and constraint.kind in ("json_schema", "json_object"):
            found.code = "invalid_schema"
        raise found from error


def _check_parts(constraint: Constraint, model: Any, tokenizer: Any) -> None:
    """Raise ServeError 400 that names the first field whose schema alone cannot be compiled, if there is one."""
    for line in (constraint.around or constraint.source).split("\n") if constraint.parts else ():
        rule = _PART.match(line)
        if rule is None or int(rule[1]) >= len(constraint.parts):
            continue
        param = constraint.parts[int(rule[1])]
        body, schema = line[rule.end() :], None
        source = f"start: VALUE\nVALUE: {body}"
        if body.startswith("{"):
            schema, end = json.JSONDecoder().raw_decode(body)
            source = f"start: %json {body[:end]}"
        error = _error_of(Constraint(kind="lark", source=source, param=param), model, tokenizer)
        if error is None:
            continue
        if schema is not None:  # the error of the schema alone names the place in it
            schema.pop("x-guidance", None)
            alone = Constraint(kind="json_schema", source=json.dumps(schema), param=param)
            error = _error_of(alone, model, tokenizer) or error
        found = serve_error(error, param)
        if found.code in ("invalid_grammar", "invalid_schema"):
            found.code = "invalid_tool_schema" if param.startswith("tools") else "invalid_schema"
        raise found from error


def _error_of(constraint: Constraint, model: Any, tokenizer: Any) -> FilterError | None:
    try:
        _filter(constraint, model, tokenizer)
    except FilterError as error:
        return error
    return None


def _filter(constraint: Constraint, model: Any, tokenizer: Any) -> Any:
    from exl_filters.grammar import ExLlamaV2GrammarFilter
    from exl_filters.grammar_source import rules_of

    kind, source = constraint.kind, constraint.source
    if kind == "budget":
        return ThinkingBudget(tokenizer, **constraint.options)
    if kind == "plugin":
        return create(source, tokenizer, **constraint.options)
    given: dict[str, Any]
    if kind == "json_object":
        given = {"json_schema": {"type": "object"}}
    else:
        given = {kind: _choices(constraint) if kind == "choice" else source}
    if constraint.around:
        given = {"lark": "\n".join(["start: answer", constraint.around, rules_of("content", given)])}
    return ExLlamaV2GrammarFilter(model, tokenizer, on_complete="end", **given, **constraint.options)


def _choices(constraint: Constraint) -> Any:
    try:
        return json.loads(constraint.source)
    except (ValueError, RecursionError) as error:
        raise ServeError.invalid(f"not valid JSON: {error}", constraint.param, "invalid_grammar") from error


def make_job(
    request: EngineRequest,
    choice: int,
    *,
    vocab_size: int,
    eos_ids: Sequence[int],
    filters: Sequence[Any] = (),
    loras: Sequence[Any] = (),
    embeddings: Sequence[Any] = (),
    max_seq_len: int | None = None,
) -> ExLlamaV2DynamicJob:
    """Build the job of one completion.

    `embeddings` are those of the request's images. Raises ServeError, or the library's RequestError.
    """
    prompts = [with_images(_ids(request.prompt), embeddings)]
    max_tokens = request.max_tokens
    if embeddings and max_seq_len is not None:
        max_tokens = _what_fits(request, prompts[0].shape[1], max_seq_len)
    if request.negative_prompt is not None:
        prompts.append(_ids(request.negative_prompt))
    stops: list[int | str] = [*request.stop_ids, *request.stop_strings]
    if not request.ignore_eos:
        stops += eos_ids
    return ExLlamaV2DynamicJob(
        prompts if len(prompts) > 1 else prompts[0],
        max_tokens,
        min_new_tokens=request.min_tokens,
        gen_settings=settings_of(request.sampling, vocab_size),
        seed=request.seeds[choice],
        stop_conditions=stops,
        decode_special_tokens=request.special_text,
        filters=list(filters),
        token_healing=request.token_healing,
        banned_strings=list(request.banned_strings),
        return_logits=request.logprobs is not None,
        prompt_logprobs=request.prompt_logprobs if _scores_prompt(request, choice) else None,
        loras=list(loras),
        embeddings=list(embeddings),
        max_rq_tokens=PAGES_AT_ONCE,
        cache_salt=request.cache_salt,
        resume_from=_produced(request, choice),
    )


def _scores_prompt(request: EngineRequest, choice: int) -> bool:
    """Whether this completion reports the prompt's log-probabilities: the first one does, before any token of it."""
    return request.prompt_logprobs is not None and choice == 0 and not request.resume


def _what_fits(request: EngineRequest, length: int, max_seq_len: int) -> int:
    """Return the most new tokens of a prompt whose images are known. Raises ServeError 400."""
    room = max_seq_len - length
    wanted = 1 if request.fill else request.max_tokens
    if wanted > room:
        raise ServeError.invalid(
            f"the prompt has {length} tokens with its images and {wanted} are asked for, together more than the "
            f"context of {max_seq_len} tokens: send fewer or smaller images"
            + (f", or ask for at most {room}" if room >= 1 else ""),
            "max_tokens" if room >= 1 else "messages",
            "context_length_exceeded",
        )
    return room if request.fill else request.max_tokens


def _produced(request: EngineRequest, choice: int) -> torch.Tensor | None:
    """Return the ids that an earlier run of this completion has handed out, or None."""
    if not request.resume:
        return None
    if len(request.resume) != request.n:
        message = f"resume has {len(request.resume)} entries for {request.n} completions"
        raise ServeError.invalid(message, "resume")
    return _ids(request.resume[choice], "resume")


def _ids(data: bytes, name: str = "prompt") -> torch.Tensor:
    if len(data) % 4:
        raise ServeError.invalid(f"a {name} of {len(data)} bytes, which is not a list of 4-byte token ids", name)
    return torch.from_numpy(np.frombuffer(data, dtype="<i4").astype(np.int64))[None]


_REASONS: dict[str, Any] = {
    "stop_token": "stop_token",
    "stop_string": "stop_string",
    "max_new_tokens": "length",
    "end_filter": "filter",
}
_NOTHING = Extra()


class Reader:
    """Turn one completion's entries in the columns of steps into events."""

    __slots__ = ("_choice", "_scored", "_top", "_vocab_size")

    def __init__(self, request: EngineRequest, choice: int, vocab_size: int) -> None:
        self._choice = choice
        self._top = request.logprobs
        #: tokens of the prompt whose log-probabilities were told
        self._scored = 0
        self._vocab_size = vocab_size

    def read(
        self, job: ExLlamaV2DynamicJob, ids: tuple[int, ...], text: str, flags: int, extra: Extra | None
    ) -> list[EngineEvent]:
        """Return the events of one entry. The end of a cancelled completion gives none."""
        extra = extra or _NOTHING
        events: list[EngineEvent] = []
        if flags & STARTED:
            events.append(Started(self._choice, job.prompt_tokens, job.cached_tokens))
        if extra.progress is not None:
            events.append(Progress(self._choice, *extra.progress))
        scores = job.prompt_scores[self._scored :]
        if scores:  # besides the event that every run begins with
            self._scored += len(scores)
            told = tuple(_told(score) for score in scores)
            events.append(Started(self._choice, job.prompt_tokens, job.cached_tokens, told))
        if ids or text:
            events.append(Tokens(self._choice, ids, text, self._logprobs(ids, extra.logits)))
        if extra.end is not None and extra.end.reason != "cancelled":
            events.append(self._last(extra.end))
        return events

    def _last(self, end: JobEnd) -> EngineEvent:
        usage = _usage(end.statistics)
        reason = _REASONS.get(end.reason)
        if reason is None:
            error = serve_error(RuntimeError(end.reason) if end.error is None else end.error)
            return Failed(self._choice, error.status, error.type, error.code, error.message, usage)
        return Finished(self._choice, reason, end.stop, usage)

    def _logprobs(self, ids: tuple[int, ...], logits: list[torch.Tensor]) -> tuple[TokenLogprob, ...]:
        """Return log-probabilities of the raw logits, before any transform; ties go to the lower id."""
        if self._top is None or not logits:
            return ()
        found = scores_of(torch.stack(logits), ids, self._vocab_size, self._top)
        return tuple(_told(score) for score in found)


def _told(score: TokenScore) -> TokenLogprob:
    value = None if score.logprob is None else _finite(score.logprob)
    return TokenLogprob(score.token, value, tuple((token, _finite(logprob)) for token, logprob in score.top))


def _usage(statistics: dict[str, Any]) -> Usage:
    return Usage(
        prompt_tokens=statistics["prompt_tokens"],
        completion_tokens=statistics["new_tokens"],
        cached_tokens=statistics["cached_tokens"],
        drafts_accepted=statistics.get("accepted_draft_tokens", 0),
        drafts_rejected=statistics.get("rejected_draft_tokens", 0),
        queue_seconds=statistics["time_enqueued"],
        prefill_seconds=statistics["time_prefill"],
        generate_seconds=statistics["time_generate"],
    )


def _finite(value: float) -> float:
    """Replace infinity, which JSON does not have: OpenAI writes -9999 for impossible tokens."""
    return max(value, -9999.0) if value == value else -9999.0
