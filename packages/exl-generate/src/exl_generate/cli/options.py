"""The sampler's settings as command-line options, written down once for all commands that generate.

No torch is imported here: `exl --help` answers at once. A test holds this table to the fields of `Settings`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

__all__ = ["FIELDS", "RANGES", "sampling_options"]

#: Field of Settings -> (flags, type, help).
FIELDS: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "temperature": (("-t", "--temperature"), float, "Above 1 livelier, below 1 surer, 0 always the most probable."),
    "top_k": (("--top-k",), int, "Only the K most probable tokens; 0 = all."),
    "top_p": (("--top-p",), float, "Only the most probable tokens that make up this share; 0 or 1 = all."),
    "min_p": (("--min-p",), float, "Only tokens with this share of the most probable one's probability."),
    "top_a": (("--top-a",), float, "Only tokens with this share of the square of the highest probability."),
    "tfs": (("--tfs",), float, "Tail-free cut."),
    "typical": (("--typical",), float, "Only the most typical tokens that make up this share."),
    "token_repetition_penalty": (("--repetition-penalty",), float, "Divides the logits of tokens in the context."),
    "token_repetition_range": (("--repetition-range",), int, "Last tokens that count for penalties; -1 = all."),
    "token_repetition_decay": (("--repetition-decay",), int, "Tokens over which penalties fade before that."),
    "token_frequency_penalty": (("--frequency-penalty",), float, "Subtracted for every occurrence."),
    "token_presence_penalty": (("--presence-penalty",), float, "Subtracted once."),
    "smoothing_factor": (("--smoothing-factor",), float, "Quadratic sampling."),
    "min_temp": (("--min-temp",), float, "Dynamic temperature: lowest."),
    "max_temp": (("--max-temp",), float, "Dynamic temperature: highest; active above --min-temp."),
    "temp_exponent": (("--temp-exponent",), float, "Dynamic temperature: exponent of the entropy's share."),
    "temperature_last": (("--temperature-last/--temperature-first",), bool, "Temperature after the cuts."),
    "skew": (("--skew",), float, "Leans the draw to less probable tokens."),
    "mirostat": (("--mirostat/--no-mirostat",), bool, "Mirostat 2."),
    "mirostat_tau": (("--mirostat-tau",), float, "Surprise to aim at, in bits."),
    "mirostat_eta": (("--mirostat-eta",), float, "How fast to follow."),
    "dry_multiplier": (("--dry-multiplier",), float, "DRY: strength; 0 = off."),
    "dry_base": (("--dry-base",), float, "DRY: growth with the length of the repeat."),
    "dry_allowed_length": (("--dry-allowed-length",), int, "DRY: repeats up to this length are free."),
    "dry_range": (("--dry-range",), int, "DRY: tokens looked at; 0 = all."),
    "dry_max_ngram": (("--dry-max-ngram",), int, "DRY: longest repeat told apart."),
    "dry_sequence_breakers": (("--dry-breaker",), list[str], "DRY: token at which repeats end, as text; repeatable."),
    "xtc_probability": (("--xtc-probability",), float, "XTC: how likely the top choices are left out."),
    "xtc_threshold": (("--xtc-threshold",), float, "XTC: probability from which a token is a top choice."),
    "xtc_ignore_tokens": (("--xtc-ignore",), list[int], "XTC: token id never left out; repeatable."),
}

_SHARE = (0, 1)
_POSITIVE = (0, None)
_ANY_COUNT = (1, None)

#: Field of Settings -> lowest and highest value of its option, both included. The limits are those of `Settings`, but
#: for shares and probabilities: a value above 1 switches a cut off there, and on a command line is a typing error.
RANGES: dict[str, tuple[float | None, float | None]] = {
    "temperature": _POSITIVE,
    "top_k": _POSITIVE,
    "top_p": _SHARE,
    "min_p": _SHARE,
    "top_a": _SHARE,
    "tfs": _SHARE,
    "typical": _SHARE,
    "token_repetition_penalty": (1e-6, 1e6),
    "token_repetition_range": (-1, None),
    "token_repetition_decay": _POSITIVE,
    "smoothing_factor": _POSITIVE,
    "min_temp": _POSITIVE,
    "max_temp": _POSITIVE,
    "temp_exponent": _POSITIVE,
    "mirostat_tau": _POSITIVE,
    "mirostat_eta": _POSITIVE,
    "dry_multiplier": _POSITIVE,
    "dry_base": _POSITIVE,
    "dry_allowed_length": _ANY_COUNT,
    "dry_range": _POSITIVE,
    "dry_max_ngram": _ANY_COUNT,
    "xtc_probability": _SHARE,
    "xtc_threshold": _SHARE,
}

_GREEDY = Annotated[bool, typer.Option("--greedy", help="Always the most probable token.", rich_help_panel="Sampling")]
_SET = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any setting by its Python name.", rich_help_panel="Sampling"),
]


def _option(name: str, flags: tuple[str, ...], text: str) -> Any:
    low, high = RANGES.get(name, (None, None))
    limits = "" if low is None else f" At least {low:g}." if high is None else f" From {low:g} to {high:g}."
    return typer.Option(*flags, help=text + limits, show_default=False, rich_help_panel="Sampling")


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command one option per sampler setting; it gets the settings made of them as `settings`."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "settings"]
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter(
            name,
            keyword,
            default=None,
            annotation=Annotated[kind | None, _option(name, flags, text)],
        )
        for name, (flags, kind, text) in FIELDS.items()
    ]
    added += [
        inspect.Parameter("greedy", keyword, default=False, annotation=_GREEDY),
        inspect.Parameter("set_", keyword, default=None, annotation=_SET),
    ]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        from exl_generate.cli.sampling import make_settings

        chosen = {name: values.pop(name) for name in FIELDS}
        settings = make_settings(values.pop("set_"), values.pop("greedy"), **chosen)
        command(settings=settings, **values)

    parameters = [p.replace(kind=keyword) for p in own] + added
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper
