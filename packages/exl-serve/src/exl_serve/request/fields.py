"""The fields of requests as a table: names, limits, and fields that are not offered.

docs/serving/fields.md is written from this table. A field that is neither here nor read by a route is unknown. It is
named in the header x-exl-ignored, or rejected with `strict_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exl_serve.errors import ServeError
from exl_serve.request.rules import (
    Rule,
    anything,
    biases,
    boolean,
    ids,
    integer,
    listed,
    number,
    one_of,
    string,
    strings,
)

__all__ = [
    "COMMON",
    "CONVERSATION",
    "PROMPT_LOGPROBS",
    "SAMPLING",
    "UNSUPPORTED",
    "Field",
    "by_name",
    "read_fields",
]


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a body: its name, the rule for its values, that rule in words, other names, and its meaning."""

    name: str
    check: Rule
    limits: str
    aliases: tuple[str, ...] = ()
    meaning: str = ""


SAMPLING: tuple[Field, ...] = (
    Field("temperature", number(0, 5), "0 to 5; 0 is greedy", meaning="divides the logits: higher is more varied"),
    Field("top_p", number(0, 1), "0 to 1; 1 is off", meaning="keep the most probable tokens whose sum reaches it"),
    Field("top_k", integer(-1, 1 << 20), "-1 and 0 are off", meaning="keep so many of the most probable tokens"),
    Field(
        "min_p",
        number(0, 1),
        "0 to 1; 0 is off",
        meaning="drop tokens less probable than this share of the most probable one",
    ),
    Field(
        "top_a",
        number(0, 1),
        "0 to 1; 0 is off",
        meaning="drop tokens less probable than this times the square of the largest probability",
    ),
    Field(
        "typical",
        number(0, 1),
        "0 to 1; 1 is off",
        ("typical_p",),
        meaning="keep the tokens of most typical surprise whose sum reaches it",
    ),
    Field(
        "tfs",
        number(0, 1),
        "0 to 1; 1 is off",
        ("tfs_z",),
        meaning="tail-free sampling: the share of the curve's bend to keep",
    ),
    Field("skew", number(-5, 5), "-5 to 5; 0 is off", meaning="warps the draw: above 0 towards less probable tokens"),
    Field(
        "presence_penalty",
        number(-2, 2),
        "-2 to 2",
        meaning="subtracted once from the logit of a token that has occurred",
    ),
    Field("frequency_penalty", number(-2, 2), "-2 to 2", meaning="subtracted for each occurrence"),
    Field(
        "repetition_penalty",
        number(0.01, 10),
        "0.01 to 10; 1 is off",
        ("repeat_penalty", "rep_pen"),
        meaning="divides positive logits of tokens that have occurred, multiplies negative ones",
    ),
    Field(
        "repetition_range",
        integer(-1, 1 << 24),
        "tokens; -1 is the whole context",
        ("repeat_last_n", "rep_pen_range", "penalty_range", "repetition_penalty_range"),
        meaning="newest tokens that the three penalties look at, those of the prompt included",
    ),
    Field(
        "repetition_decay",
        integer(0, 1 << 24),
        "tokens",
        meaning="how many tokens before that range the penalties take to fade",
    ),
    Field("temperature_last", boolean, "true or false", ("temp_last",), meaning="apply the temperature after the cuts"),
    Field(
        "smoothing_factor",
        number(0, 100),
        "0 to 100; 0 is off",
        meaning="quadratic sampling: flattens the top and cuts the tail",
    ),
    Field("min_temp", number(0, 5), "0 to 5", ("dynatemp_low",), meaning="lowest temperature of dynamic temperature"),
    Field(
        "max_temp",
        number(0, 5),
        "0 to 5; 0 is off",
        ("dynatemp_high",),
        meaning="highest temperature: the more uncertain the model, the nearer",
    ),
    Field(
        "temp_exponent", number(0.01, 10), "0.01 to 10", ("dynatemp_exponent",), meaning="shape of dynamic temperature"
    ),
    Field(
        "mirostat_mode",
        integer(0, 2),
        "0 is off; 1 and 2 are one",
        ("mirostat",),
        meaning="keep the text's surprise near `mirostat_tau`",
    ),
    Field("mirostat_tau", number(0, 20), "0 to 20", meaning="target surprise, bits a token"),
    Field("mirostat_eta", number(0, 1), "0 to 1", meaning="how fast mirostat follows"),
    Field(
        "dry_multiplier",
        number(0, 100),
        "0 to 100; 0 is off",
        meaning="strength of DRY, which penalises tokens that would continue a repeat",
    ),
    Field(
        "dry_base",
        number(1, 10),
        "1 to 10",
        meaning="a repeat of L tokens costs multiplier * base ** (L - allowed length)",
    ),
    Field("dry_allowed_length", integer(1, 1 << 20), "tokens", meaning="shortest repeat that DRY penalises"),
    Field(
        "dry_range",
        integer(-1, 1 << 24),
        "tokens; 0 and -1 are the whole context",
        ("dry_penalty_last_n",),
        meaning="newest tokens in which DRY looks for repeats",
    ),
    Field("dry_sequence_breakers", listed(strings(64, 64)), "at most 64 texts", meaning="texts that end a repeat"),
    Field(
        "xtc_probability", number(0, 1), "0 to 1; 0 is off", meaning="chance that XTC excludes the most probable tokens"
    ),
    Field(
        "xtc_threshold",
        number(0, 1),
        "0 to 1",
        meaning="XTC excludes all tokens at least so probable but the last of them",
    ),
    Field(
        "logit_bias",
        biases(1024),
        "ids to -100 (bans) to 100, at most 1,024",
        meaning="added to the logits of these ids",
    ),
    Field("allowed_token_ids", ids(1 << 16), "ids", ("allowed_tokens",), meaning="only these are generated"),
    Field("banned_tokens", ids(1 << 16), "ids", ("custom_token_bans",), meaning="these are never generated"),
)
"""Fields of sampling."""

COMMON: tuple[Field, ...] = (
    Field("model", string(256), "as /v1/models lists it", meaning="the model, or `MODEL:NAME` for an adapter"),
    Field("stream", boolean, "true or false", meaning="answer as server-sent events while tokens come"),
    Field(
        "stream_options",
        anything,
        "`include_usage`, `continuous_usage_stats`",
        meaning="a last event with counts of tokens; counts in every event",
    ),
    Field("n", integer(1, 1 << 20), "1 to the server's `max_n`", meaning="number of choices for one prompt"),
    Field(
        "seed",
        integer(-(1 << 63), (1 << 64) - 1),
        "64 bits; -1 is none",
        meaning="of the random numbers; drawn where absent. The header x-exl-seed tells it",
    ),
    Field(
        "stop",
        strings(64, 256),
        "at most 64 texts of 256 characters",
        ("stop_sequence",),
        meaning="the answer ends before the first of them",
    ),
    Field(
        "include_stop_str_in_output",
        boolean,
        "true or false",
        meaning="the text of `stop` that ended the answer is its last part",
    ),
    Field("stop_token_ids", ids(256), "at most 256", meaning="the answer ends at the first of these ids"),
    Field(
        "min_tokens",
        integer(0, 1 << 24),
        "tokens",
        ("min_new_tokens", "min_length"),
        meaning="no end of text before so many",
    ),
    Field("ignore_eos", boolean, "true or false", ("ban_eos_token",), meaning="continue after the model's end of text"),
    Field("skip_special_tokens", boolean, "true or false", meaning="false: special tokens are part of the text"),
    Field(
        "token_healing",
        boolean,
        "true or false",
        meaning="sample the prompt's last token again, unless it is special: a word that it cuts can be completed",
    ),
    Field(
        "banned_strings",
        strings(256, 256),
        "at most 256 texts of 256 characters",
        ("bad_words",),
        meaning="texts that are never written; letter case does not count",
    ),
    Field(
        "cfg_scale",
        number(0, 100),
        "0 to 100",
        ("guidance_scale",),
        meaning="classifier-free guidance: weight of the prompt against `negative_prompt`, 1 is off; both or none",
    ),
    Field("negative_prompt", string(1 << 20), "a text", meaning="what the answer is led away from"),
    Field(
        "response_format",
        anything,
        "`text`, `json_object`, `json_schema`, `structural_tag`",
        meaning="the form of the answer",
    ),
    Field(
        "structured_outputs",
        anything,
        "one of `json`, `regex`, `choice`, `grammar`, `structural_tag`",
        meaning="the form of the answer, as vLLM names it",
    ),
    Field("guided_json", anything, "a JSON schema", ("json_schema",), meaning="the answer is JSON of this schema"),
    Field("guided_regex", string(8 << 10), "a pattern", ("regex_pattern",), meaning="the whole answer matches it"),
    Field("guided_choice", strings(1024, 4096), "a list of texts", meaning="the answer is one of them"),
    Field(
        "guided_grammar",
        string(256 << 10),
        "Lark, or llama.cpp's EBNF",
        ("grammar_string", "grammar"),
        meaning="the answer is in this language",
    ),
    Field(
        "timeout",
        number(0.001, 86400),
        "seconds, 0.001 to 86,400",
        meaning="after which the request ends with an error",
    ),
    Field(
        "priority",
        integer(0, 2),
        "0 urgent, 1 interactive, 2 batch",
        meaning="class in the queue; a key says which it may use",
    ),
    Field(
        "cache_salt",
        string(256),
        "a text of at most 256 characters",
        meaning="prompts with different salts share no cached pages",
    ),
    Field("user", string(512), "a text", meaning="your name for the end user; the log has a digest of it"),
    Field("safety_identifier", string(512), "a text", meaning="your name for the end user; the log has a digest of it"),
    Field("prompt_cache_key", string(512), "a text", meaning="not used: all prompts share the cache, see `cache_salt`"),
    Field(
        "prompt_cache_retention",
        one_of("in_memory", "in-memory", "24h"),
        "`in_memory`, `24h`",
        meaning="not used: cached pages stay until others need their place",
    ),
    Field("metadata", anything, "anything", meaning="not used"),
    Field(
        "return_token_ids",
        boolean,
        "true or false",
        meaning="`token_ids` of the answer, also of its reasoning and calls, and `prompt_token_ids`, in a stream once; "
        "an image in the prompt is one negative number",
    ),
    Field(
        "return_tokens_as_token_ids",
        boolean,
        "true or false",
        meaning="log-probabilities name a token `token_id:ID` instead of by its text",
    ),
    Field(
        "stream_interval",
        integer(1, 1024),
        "1 to 1,024",
        meaning="tokens of an event of the stream, at least; the first and the last event may have fewer",
    ),
    Field(
        "truncate_prompt_tokens",
        integer(-1, 1 << 24),
        "tokens; -1: what the context leaves",
        meaning="leaves out the oldest messages (chat) or the first tokens of a longer prompt; the header "
        "x-exl-truncated-tokens counts them",
    ),
)
"""Fields of chat and text completions alike."""

CONVERSATION: tuple[Field, ...] = (
    Field(
        "service_tier",
        one_of("auto", "default", "flex", "priority", "scale"),
        "`auto`, `default`, `flex`, `priority`, `scale`",
        meaning="there is one tier: the answer says `default`. See `priority`",
    ),
    Field("tools", anything, "functions with a JSON schema each", meaning="functions that the model may call"),
    Field(
        "tool_choice",
        anything,
        "`none`, `auto`, `required`, a function, or `allowed_tools`",
        meaning="whether it has to call one, and which it may call",
    ),
    Field("parallel_tool_calls", boolean, "true or false", meaning="false: at most one call"),
    Field("chat_template_kwargs", anything, "an object", ("template_vars",), meaning="variables of the chat template"),
    Field("enable_thinking", boolean, "true or false", meaning="a variable of the chat template"),
    Field(
        "reasoning_budget",
        integer(0, 1 << 24),
        "tokens",
        ("thinking_token_budget", "thinking_budget"),
        meaning="of reasoning, after which it is closed",
    ),
)
"""Fields of conversations: chat and responses."""

PROMPT_LOGPROBS = Field(
    "prompt_logprobs",
    integer(0, 20),
    "0 to 20; not with `stream`",
    meaning="candidates for each token of the prompt, if the server has `allow_prompt_logprobs`; costs a whole prompt",
)
"""The field of chat and text completions for the candidates of prompt tokens."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "prediction": (None,),
    "web_search_options": (None,),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prompt_logprobs": (None,),
    "verbosity": (None, "medium"),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "early_stopping": (None, False),
    "truncate_prompt_tokens": (None,),
    "return_tokens_as_token_ids": (None, False),
    "speculative_ngram": (None, False),
    "logits_processors": (None, []),
    "chat_template": (None,),
    "documents": (None, []),
    "mm_processor_kwargs": (None, {}),
    "media_io_kwargs": (None, {}),
    "echo": (None, False),
    "add_special_tokens": (None, False),
    "add_bos_token": (None, True),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "include_reasoning": (None, True),
    "response_prefix": (None, ""),
    "prompt_template": (None, ""),
    "spaces_between_special_tokens": (None, True),
    "logprob_token_ids": (None,),
    "return_prompt_text": (None, False),
    "reasoning_field": (None,),
    "guided_decoding_backend": (None,),
    "guided_whitespace_pattern": (None,),
    "structural_tag": (None,),
    "vllm_xargs": (None, {}),
    "kv_transfer_params": (None,),
    "n_predict": (None, -1),
    "samplers": (None,),
    "nsigma": (None, 0, 0.0),
    "top_n_sigma": (None, -1, -1.0, 0, 0.0),
    "n_probs": (None, 0),
    "min_keep": (None, 0),
    "n_keep": (None, 0),
    "t_max_predict_ms": (None, 0, -1),
    "dynatemp_range": (None, 0, 0.0),
    "post_sampling_probs": (None, False),
    "timings_per_token": (None, False),
    "return_progress": (None, False),
    "reasoning_format": (None, "auto", "deepseek"),
    "lora": (None, []),
    "id_slot": (None, -1),
    "cache_prompt": (None, True),
    "n_discard": (None, 0),
    "n_cache_reuse": (None, 0),
    "n_indent": (None, 0),
    "n_cmpl": (None, 1),
    "response_fields": (None, []),
    "return_tokens": (None, False),
    "prompt_embeds": (None,),
    "repetition_detection": (None,),
    "generate_window": (None,),
    "thinking": (None,),
    # With a curve of 1 there is none, and below 0 no target.
    "smoothing_curve": (None, 1, 1.0),
    "adaptive_target": (None, -1, -1.0),
}
"""Fields of other APIs that are not offered, with the values that change nothing and are therefore accepted."""

IGNORED = frozenset(
    {
        # Fields of some routes here, which others do not know.
        *("messages", "prompt", "input", "instructions", "include", "text", "reasoning", "max_output_tokens"),
        *("functions", "function_call", "suffix", "n", "logprobs", "top_logprobs"),
        # Of clients that are configured for other servers.
        *("options", "keep_alive", "format", "think", "raw", "system", "template", "context", "images"),
        *("model_kwargs", "provider", "transforms", "models", "route", "plugins", "usage", "chat_id"),
        *("session_id", "features", "variables", "params", "background_tasks", "safe_prompt", "random_seed"),
        *("prefix", "cache_control", "system_prompt", "extra_body", "extra_headers", "api_base"),
        *("api_key", "drop_params", "num_retries", "custom_llm_provider", "mode", "character", "preset"),
        *("sampler_order", "sampler_priority", "request_id", "truncation_length", "rep_pen_slope"),
    }
)
"""Names by which the metrics count ignored fields. Other names count as one: clients choose them."""


def read_fields(
    body: Mapping[str, Any], fields: Mapping[str, Field], own: frozenset[str] = frozenset()
) -> tuple[dict[str, Any], list[str]]:
    """Return (clean values by name, unknown names).

    `fields` is by name and alias; the route itself reads the fields in `own`. null counts as absent. Raises ServeError
    400.
    """
    found: dict[str, Any] = {}
    under: dict[str, str] = {}
    unknown: list[str] = []
    for key, value in body.items():
        field = fields.get(key)
        if field is not None:
            if value is None or _is_off(key, value):
                continue
            clean = field.check(key, value)
            if field.name in under and found[field.name] != clean:
                raise ServeError.invalid(f"{key} and {under[field.name]} are one field with two values: give one", key)
            found[field.name], under[field.name] = clean, key
        elif key in own:
            continue
        elif key in UNSUPPORTED:
            neutral = any(value == one and type(value) is type(one) for one in UNSUPPORTED[key])
            if not neutral and not _has_no_effect(key, value, body):
                raise ServeError.unsupported(key, f"{key} is not offered by this server: leave it out")
        else:
            unknown.append(key)
    _drop_neutral(found)
    return found, unknown


def _has_no_effect(key: str, value: Any, body: Mapping[str, Any]) -> bool:
    """Whether a field that is not offered changes nothing given the others of a body."""
    if key == "adaptive_target":
        return type(value) in (int, float) and value < 0
    return key == "smoothing_curve" and not body.get("smoothing_factor")


def _is_off(key: str, value: Any) -> bool:
    """Whether a name of another server comes with its value for nothing, which is none of the field's."""
    return (key == "n_probs" and type(value) is int and value == 0) or (key == "allowed_tokens" and value == "")


def _drop_neutral(found: dict[str, Any]) -> None:
    """Leave out what clients send for a setting that is off: guidance of weight 1, which would compute every step
    twice, and empty formats.
    """
    if found.get("cfg_scale") == 1 or ("cfg_scale" not in found and found.get("negative_prompt") == ""):
        found.pop("cfg_scale", None)
        found.pop("negative_prompt", None)
    for name in ("guided_json", "guided_regex", "guided_grammar"):
        if found.get(name) == "":
            del found[name]
    if found.get("seed") == -1:  # of llama.cpp and vLLM: draw one
        del found["seed"]


def by_name(*tables: tuple[Field, ...]) -> dict[str, Field]:
    """Return fields by name and alias."""
    return {name: field for table in tables for field in table for name in (field.name, *field.aliases)}
