"""`ExLlamaV2Sampler.Settings` with exllamav2's behaviour: lenient ranges, and running jobs follow changes.

Values out of range switch a transform off or count as the nearest limit. `exl_generate` rejects invalid values and
gives each job a copy. Both differ here, so that host programs run unmodified. Settings in range give the same tokens.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import fields
from operator import index
from typing import Any

import torch

from exl_generate.sampling import FrozenSettings, SparseBias
from exl_generate.sampling import Settings as NativeSettings
from exl_generate.sampling.validation import unknown_settings

__all__ = ["Settings"]

log = logging.getLogger(__name__)

_changes = itertools.count(1)

#: Names of attributes that a warning has been logged of.
_warned: set[str] = set()


class Settings(NativeSettings):
    """Sampling settings of exllamav2: its fields, defaults and positional order.

    A job reads the object that it was given, so a change applies from the next token on, to every job that shares the
    object. Values out of range mean the same as in exllamav2 (off, or the nearest limit). Values that are not numbers,
    infinite penalties and temperatures, and `dry_range` from 1 to `dry_max_ngram` raise `RequestError`. A change to
    such a value ends the jobs that use the object, and no others. An attribute that is not a field has no effect; the
    first use of its name is logged as a warning.
    """

    __slots__ = ("_change",)  # no entry of vars(): host programs log and copy that

    _change: int

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name != "_change":
            object.__setattr__(self, "_change", next(_changes))

    def validate(self) -> None:
        """Raise `RequestError`, with the field, its value and the limit, for an invalid value."""
        self.resolve()

    def for_job(self, kept: FrozenSettings) -> Settings:
        """Return this object: a running job follows its changes. `kept` is the copy in the job's request."""
        return self

    def resolve(self, width: int | None = None) -> NativeSettings:
        """Return the settings that the sampler applies, every value in its range.

        `width` is the number of ids that breakers may name; other ids never occur. Raises `RequestError` as `validate`
        does.
        """
        if type(self) is Settings:  # derived classes may have attributes of their own
            _warn_of_others(self)
        values = {name: getattr(self, name) for name in _FIELDS}
        for name, mean in _MEANINGS.items():
            values[name] = mean(values[name])
        _combined(values)
        if width is not None and values["dry_sequence_breakers"]:
            values["dry_sequence_breakers"] = {
                token for token in values["dry_sequence_breakers"] if not isinstance(token, int) or token < width
            }
        settings = NativeSettings(**values)
        settings.validate()
        return settings

    def revision(self) -> Hashable:
        """Return a value that changes after an assignment, or a change inside a bias, a list of hooks or a set."""
        change = getattr(self, "_change", 0)
        bias, hooks, breakers = self.token_bias, self.post_sampling_hooks, self.dry_sequence_breakers
        if bias is None and not hooks and not breakers:
            return change
        held = frozenset(breakers) if isinstance(breakers, set | list) else breakers
        return change, _content(bias), tuple(hooks or ()), held


def _warn_of_others(settings: Settings) -> None:
    for name, remedy in unknown_settings(settings, _FIELDS).items():
        if name not in _warned:
            _warned.add(name)
            log.warning("Settings.%s is no setting and has no effect: %s", name, remedy)


def _content(bias: Any) -> Hashable:
    """Return a value that changes after an in-place operation on the tensor, or a change inside a dict."""
    if isinstance(bias, Mapping):
        return tuple(bias.items())
    if isinstance(bias, SparseBias):
        return _content(bias.ids), _content(bias.values), bias.rest
    if not isinstance(bias, torch.Tensor):
        return None
    if bias.is_inference():  # has no count of its operations
        return bias.cpu().numpy().tobytes()
    return bias._version


# ---- what one field's value means ------------------------------------------------------------------------------------


def _number(value: Any) -> Any:
    """Convert a bool, a numpy scalar or a 0-d tensor to int or float. Other values are returned, for validation to
    reject.
    """
    if type(value) is int or type(value) is float:
        return value
    if isinstance(value, str | bytes):
        return value
    for convert in (index, float):
        try:
            return convert(value)
        except (TypeError, ValueError, RuntimeError):
            continue
    return value


def _whole(value: Any) -> Any:
    value = _number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _at_least(low: float) -> Callable[[Any], Any]:
    def mean(value: Any) -> Any:
        value = _number(value)
        return low if isinstance(value, int | float) and value < low else value

    return mean


def _between(low: float, high: float) -> Callable[[Any], Any]:
    def mean(value: Any) -> Any:
        value = _number(value)
        return min(max(value, low), high) if isinstance(value, int | float) and math.isfinite(value) else value

    return mean


def _cut(value: Any) -> Any:
    """Return a cut between 0 and 1, both excluded; all other values, infinity and NaN included, mean off."""
    value = _number(value)
    return 0 if isinstance(value, int | float) and not 0 < value < 1 else value


def _whole_at_least(low: int) -> Callable[[Any], Any]:
    def mean(value: Any) -> Any:
        value = _whole(value)
        return low if isinstance(value, int) and value < low else value

    return mean


def _switch(value: Any) -> Any:
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError):
        return value


def _optional_number(value: Any) -> Any:
    return None if value is None else _number(value)


def _hooks(value: Any) -> Any:
    return [] if value is None else list(value) if isinstance(value, tuple) else value


def _bias(value: Any) -> Any:
    """Remove leading dimensions of 1 from a row of biases; the addition to the logits ignores them."""
    return value.reshape(-1) if isinstance(value, torch.Tensor) and value.numel() == value.shape[-1:].numel() else value


def _tokens(value: Any) -> Any:
    """Return ids of any integer type, and texts, as a set; ids below 0 never occur."""
    if value is None or isinstance(value, str | bytes) or not isinstance(value, Iterable):
        return value
    return {token for token in map(_token, value) if not isinstance(token, int) or token >= 0}


def _token(value: Any) -> Any:
    try:
        return value if isinstance(value, str | bool) else index(value)
    except TypeError:
        return value


def _ignored(value: Any) -> Any:
    found = _tokens(value)
    return frozenset(found) if isinstance(found, Collection) and not isinstance(found, str | bytes) else found


#: Converts a field's value to that of the native settings. Fields without an entry are passed on unchanged.
_MEANINGS: dict[str, Callable[[Any], Any]] = {
    "token_repetition_penalty": _between(1e-6, 1e6),
    "token_repetition_range": _whole,
    "token_repetition_decay": _whole,
    "token_frequency_penalty": _number,
    "token_presence_penalty": _number,
    "temperature": _at_least(0.0),  # below 0.01 is greedy
    "smoothing_factor": _at_least(0.0),
    "min_temp": _at_least(0.0),
    "max_temp": _at_least(0.0),
    "temp_exponent": _at_least(0.0),
    "top_k": _whole_at_least(0),
    "top_p": _cut,
    "top_a": _at_least(0.0),
    "min_p": _cut,
    "tfs": _cut,
    "typical": _cut,
    "skew": _number,
    "temperature_last": _switch,
    "mirostat": _switch,
    "mirostat_tau": _at_least(0.0),
    "mirostat_eta": _at_least(0.0),
    "token_bias": _bias,
    "cfg_scale": _optional_number,
    "post_sampling_hooks": _hooks,
    "dry_allowed_length": _whole,
    "dry_base": _at_least(0.0),
    "dry_multiplier": _at_least(0.0),
    "dry_sequence_breakers": _tokens,
    "dry_range": _whole_at_least(0),
    "dry_max_ngram": _whole,
    "xtc_probability": _between(0.0, 1.0),
    "xtc_threshold": _between(0.0, 1.0),
    "xtc_ignore_tokens": _ignored,
}

_FIELDS = tuple(f.name for f in fields(NativeSettings))

#: The largest factor that a DRY penalty may get from a short `dry_allowed_length`.
_LARGEST = 1e30


def _combined(values: dict[str, Any]) -> None:
    """Adjust the fields that act together: the range of penalties, dynamic temperature, DRY."""
    _penalty_range(values)
    low, high = values["min_temp"], values["max_temp"]
    if _are_numbers(low, high) and low >= high:
        values["min_temp"] = values["max_temp"] = 0.0
    _dry(values)


def _penalty_range(values: dict[str, Any]) -> None:
    """Adjust the range of penalties, which reach `range` + `decay` tokens back.

    A negative decay takes tokens from the range, and a range below -1 takes tokens from the decay.
    """
    reach, decay = values["token_repetition_range"], values["token_repetition_decay"]
    if not (isinstance(reach, int) and isinstance(decay, int)):
        return
    if reach < -1:
        reach, decay = 0, decay + reach
    elif reach >= 0 and decay < 0:
        reach = max(0, reach + decay)
    values["token_repetition_range"], values["token_repetition_decay"] = reach, max(0, decay)


def _dry(values: dict[str, Any]) -> None:
    """Limit a DRY penalty, multiplier * base^(length - allowed_length), for repeats of 1 to max_ngram tokens."""
    allowed, most = values["dry_allowed_length"], values["dry_max_ngram"]
    multiplier, base = values["dry_multiplier"], values["dry_base"]
    if not (isinstance(allowed, int) and isinstance(most, int) and _are_numbers(multiplier, base)):
        return
    if most < 1 or most < allowed:  # no repeat is long enough
        values["dry_multiplier"], values["dry_max_ngram"] = 0.0, max(1, most)
    if allowed < 1:
        values["dry_allowed_length"] = 1
        try:
            values["dry_multiplier"] = min(values["dry_multiplier"] * base ** (1 - allowed), _LARGEST)
        except OverflowError:
            values["dry_multiplier"] = _LARGEST if values["dry_multiplier"] > 0 else 0.0


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)
