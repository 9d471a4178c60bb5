"""Sampler settings from command-line options."""

from __future__ import annotations

import ast
import dataclasses
import math
from typing import Any

import typer

from exl_generate.cli.options import FIELDS, RANGES
from exl_generate.errors import RequestError
from exl_generate.sampling import Settings

__all__ = ["NOT_SETTABLE", "change_setting", "idle_reason", "make_settings", "setting_names"]

#: Fields that are objects or state, not something to type; cfg_scale comes with a second prompt.
NOT_SETTABLE = frozenset(
    {"token_bias", "post_sampling_hooks", "ngram_trie", "ngram_index", "ngram_history", "mirostat_mu", "cfg_scale"}
)
_SETS = ("dry_sequence_breakers", "xtc_ignore_tokens")
#: What only shapes a draw, which a greedy choice does not make.
_DRAW = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "top_a", "tfs", "typical", "smoothing_factor", "min_temp", "max_temp"}
    | {"temp_exponent", "temperature_last", "skew", "mirostat", "mirostat_tau", "mirostat_eta"}
    | {"xtc_probability", "xtc_threshold", "xtc_ignore_tokens"}
)
_PENALTIES = ("token_repetition_penalty", "token_frequency_penalty", "token_presence_penalty")
#: Setting -> the settings of which one must be on, or it would do nothing.
_NEEDS: dict[str, tuple[str, ...]] = {
    "min_temp": ("max_temp",),
    "temp_exponent": ("max_temp",),
    "mirostat_tau": ("mirostat",),
    "mirostat_eta": ("mirostat",),
    "dry_base": ("dry_multiplier",),
    "dry_allowed_length": ("dry_multiplier",),
    "dry_range": ("dry_multiplier",),
    "dry_max_ngram": ("dry_multiplier",),
    "dry_sequence_breakers": ("dry_multiplier",),
    "xtc_threshold": ("xtc_probability",),
    "xtc_ignore_tokens": ("xtc_probability",),
    "token_repetition_range": _PENALTIES,
    "token_repetition_decay": _PENALTIES,
}


def make_settings(assignments: list[str] | None, greedy: bool, **options: Any) -> Settings:
    """Defaults, then the options that were given, then NAME=VALUE assignments.

    Raises click's usage error for a number out of its option's range, RequestError for settings that do not go
    together.
    """
    values = {name: value for name, value in options.items() if value is not None and value != []}
    for name, value in values.items():
        _check_range(" / ".join(FIELDS[name][0]), name, value)
    for name in _SETS:
        if name in values:
            values[name] = frozenset(values[name])
    names = {f.name for f in dataclasses.fields(Settings)} - NOT_SETTABLE
    for assignment in assignments or []:
        name, equals, text = assignment.partition("=")
        if not equals or name not in names:
            raise RequestError(f"--set {assignment!r}: use NAME=VALUE with one of {', '.join(sorted(names))}")
        if name in values:
            raise RequestError(f"--set {assignment!r}: {name} is given twice, also as {values[name]!r}; leave one out")
        values[name] = _value(f"--set {_short(assignment)}", text)
        _check_range(f"--set {assignment}", name, values[name])
    if greedy and (idle := sorted(_DRAW & set(values))):
        raise RequestError(f"--greedy always takes the most probable token, so that {', '.join(idle)} would do nothing")
    settings = Settings.greedy(**values) if greedy else Settings(**values)
    settings.validate()
    _check_use(settings, values)
    return settings


def setting_names() -> list[str]:
    """Names of the settings that can be typed, in the order of `Settings`."""
    return [f.name for f in dataclasses.fields(Settings) if f.name not in NOT_SETTABLE]


def change_setting(settings: Settings, name: str, text: str) -> Settings:
    """A copy with one setting changed; the text "default" restores the default.

    Raises RequestError for a name or value that there is none of, click's usage error for a number out of range.
    """
    if name not in setting_names():
        raise RequestError(f"there is no setting {name!r}; the settings are {', '.join(setting_names())}")
    value = getattr(Settings(), name) if text == "default" else _value(name, text)
    if name in _SETS and text != "default":
        value = _id_set(name, text, value)
    _check_range(name, name, value)
    changed = dataclasses.replace(settings, **{name: value})
    changed.validate()
    return changed


def idle_reason(settings: Settings, name: str) -> str | None:
    """Why a setting does nothing given the others; None: it does something."""
    if name in _DRAW - {"top_k"} and (settings.top_k == 1 or (name != "temperature" and settings.temperature == 0)):
        return f"{name} does nothing while {'top_k is 1' if settings.top_k == 1 else 'temperature is 0'}"
    try:
        _check_use(settings, {name: getattr(settings, name)})
    except RequestError as error:
        return str(error)
    return None


def _check_use(settings: Settings, given: dict[str, Any]) -> None:
    """Refuse a setting that was given and would do nothing."""
    for name in given:
        needed = _NEEDS.get(name, ())
        if needed and not any(_on(settings, other) for other in needed):
            raise RequestError(f"{name} does nothing without {' or '.join(needed)}: switch that on, or leave this out")
    if "token_repetition_decay" in given and settings.token_repetition_range < 0:
        raise RequestError("token_repetition_decay does nothing while token_repetition_range is -1 (all tokens)")


def _on(settings: Settings, name: str) -> bool:
    return bool(getattr(settings, name) != (1.0 if name == "token_repetition_penalty" else 0))


def _check_range(hint: str, name: str, value: Any) -> None:
    """Raises the command line's usage error unless `value` is in the range of the setting. `hint`: where it is from."""
    low, high = RANGES.get(name, (None, None))
    if low is None or not isinstance(value, (int, float)) or low <= value <= (math.inf if high is None else high):
        return
    limits = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
    too_small = isinstance(value, int) and value < -1e308  # no float
    shown = "a number below -1e308" if too_small else f"{value:g}"
    raise typer.BadParameter(f"{shown} is out of range; it must be {limits}", param_hint=hint)


def _value(place: str, text: str) -> Any:
    """Return the Python literal in `text`. Raises RequestError, which names `place`, for anything else."""
    try:
        value = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
        for number in value if isinstance(value, (set, list, tuple)) else [value]:
            if isinstance(number, int):
                float(number)  # the sampler computes with floats
    except OverflowError:
        raise RequestError(f"{place}: {_short(text)} holds a number beyond the limit of 1e308") from None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        # TypeError: a set that holds a list. MemoryError and RecursionError: too deeply nested for Python's parser.
        raise RequestError(f"{place}: {_short(text)} is not a number, True, False or a set of ids") from None
    return value


def _id_set(name: str, text: str, value: Any) -> frozenset[Any]:
    try:
        return frozenset(value if isinstance(value, (set, frozenset, list, tuple)) else [value])
    except TypeError:
        raise RequestError(f"{name}: {_short(text)} is not a set of token ids or texts") from None


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:200]}...")
