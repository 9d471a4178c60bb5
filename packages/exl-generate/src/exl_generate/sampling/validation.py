"""Validate the sampler's settings where they come in."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch

from exl_generate.errors import RequestError
from exl_kernels.sampling import SparseBias

if TYPE_CHECKING:
    from exl_generate.sampling.settings import Settings

__all__ = ["unknown_settings", "validate"]

_LARGEST = sys.float_info.max
_ANY = (-math.inf, math.inf)
_POSITIVE = (0.0, math.inf)

#: Field -> (lowest, highest) allowed value, both included; every number must be finite.
_RANGES: dict[str, tuple[float, float]] = {
    "token_repetition_penalty": (1e-6, 1e6),
    "token_repetition_range": (-1, math.inf),
    "token_repetition_decay": _POSITIVE,
    "token_frequency_penalty": _ANY,
    "token_presence_penalty": _ANY,
    "temperature": _POSITIVE,
    "smoothing_factor": _POSITIVE,
    "min_temp": _POSITIVE,
    "max_temp": _POSITIVE,
    "temp_exponent": _POSITIVE,
    "top_k": _POSITIVE,
    "top_p": _POSITIVE,
    "top_a": _POSITIVE,
    "min_p": _POSITIVE,
    "tfs": _POSITIVE,
    "typical": _POSITIVE,
    "skew": _ANY,
    "mirostat_tau": _POSITIVE,
    "mirostat_eta": _POSITIVE,
    "dry_allowed_length": (1, math.inf),
    "dry_base": _POSITIVE,
    "dry_multiplier": _POSITIVE,
    "dry_range": _POSITIVE,
    "dry_max_ngram": (1, math.inf),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
}
_INTEGERS = frozenset(
    {
        "token_repetition_range",
        "token_repetition_decay",
        "top_k",
        "dry_allowed_length",
        "dry_range",
        "dry_max_ngram",
    }
)
_SWITCHES = ("temperature_last", "mirostat")


def validate(s: Settings) -> None:
    """Raise `RequestError` with the field, its value and the limit."""
    _no_others(s)
    for name in _RANGES:
        _number(name, getattr(s, name))
    for name in _SWITCHES:
        if not isinstance(getattr(s, name), bool):
            raise RequestError(f"Settings.{name} is {getattr(s, name)!r}; it must be True or False")
    if not isinstance(s.post_sampling_hooks, list | tuple) or not all(map(callable, s.post_sampling_hooks)):
        raise RequestError(f"Settings.post_sampling_hooks is {s.post_sampling_hooks!r}; it must be a list of functions")
    if s.max_temp > 0 and s.min_temp > s.max_temp:
        raise RequestError(f"Settings.min_temp {s.min_temp} exceeds max_temp {s.max_temp}; swap them")
    if s.dry_multiplier > 0 and 0 < s.dry_range <= s.dry_max_ngram:
        raise RequestError(f"Settings.dry_range {s.dry_range} must be 0 or exceed dry_max_ngram {s.dry_max_ngram}")
    if s.cfg_scale is not None and (not _is_real(s.cfg_scale) or not _is_finite(s.cfg_scale)):
        raise RequestError(f"Settings.cfg_scale is {_shown(s.cfg_scale)}; it must be a finite number or None")
    _bias(s.token_bias)
    _tokens("dry_sequence_breakers", s.dry_sequence_breakers, (set, frozenset, list, tuple), texts=True)
    _tokens("xtc_ignore_tokens", s.xtc_ignore_tokens, (set, frozenset), texts=False)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False


def unknown_settings(s: Settings, known: Collection[str]) -> dict[str, str]:
    """Return the attributes of `s` that are not among the fields in `known`, each with a remedy.

    Such an attribute is a typing error, or a parameter of the job, as `filters`. Attributes with empty values and names
    that begin with an underscore are left out.
    """
    found = {}
    for name in sorted(vars(s).keys() - known):
        value = getattr(s, name)
        sized = isinstance(value, Collection) and getattr(value, "shape", None) != ()  # without dimensions: a number
        if name.startswith("_") or value is None or value is False or (sized and not len(value)):
            continue
        near = difflib.get_close_matches(name, known, 1)
        found[name] = f"did you mean {near[0]}?" if near else "parameters that are not of sampling belong to the job"
    return found


def _no_others(s: Settings) -> None:
    """Reject an attribute that is not a field. Attributes of a class derived from `Settings` are permitted."""
    known: dict[str, Any] = vars(type(s)).get("__dataclass_fields__", {})
    if not known:
        return
    for name, remedy in unknown_settings(s, known.keys()).items():
        raise RequestError(f"Settings.{name} is no setting and would do nothing: {remedy}")


def _number(name: str, value: Any) -> None:
    low, high = _RANGES[name]
    whole = name in _INTEGERS
    plain = type(value) is int or (type(value) is float and not whole)  # nearly always, and far quicker to find
    if plain and low <= value <= high and (whole or -_LARGEST <= value <= _LARGEST):
        return
    kind = "a whole number, as an int," if whole else "a finite number"
    if _is_real(value) and (isinstance(value, Integral) if whole else _is_finite(value)) and low <= value <= high:
        return
    limit = f"{kind} of at least {low:g}" if high == math.inf else f"{kind} from {low:g} to {high:g}"
    raise RequestError(f"Settings.{name} is {_shown(value)}; it must be {kind if low == -math.inf else limit}")


def _shown(value: object) -> str:
    """Return the text of a value in a message. Python does not print ints of any length."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an int of {value.bit_length()} bits"
    return repr(value)


def _bias(bias: Any) -> None:
    if isinstance(bias, Mapping):
        for token, value in bias.items():
            if not _is_id(token) or int(token) >= 1 << 31 or not _is_real(value):
                raise RequestError(f"Settings.token_bias maps {token!r} to {value!r}; it must map token ids to numbers")
        bias = torch.tensor(list(bias.values()), dtype=torch.float32)
    if isinstance(bias, SparseBias):
        _sparse_bias(bias)
        bias = torch.cat([bias.values, torch.tensor([float(bias.rest)])])
    if bias is None:
        return
    if not isinstance(bias, torch.Tensor) or bias.dim() != 1 or bias.is_complex() or bias.dtype == torch.bool:
        given = f"{tuple(bias.shape)} {bias.dtype}" if isinstance(bias, torch.Tensor) else type(bias).__name__
        raise RequestError(
            f"Settings.token_bias is {given}; it must be a 1-D tensor, one value per token id, a dict of ids and "
            "values, a SparseBias, or None"
        )
    if bool(bias.isnan().any()) or bool((bias == math.inf).any()):
        raise RequestError("Settings.token_bias holds NaN or +inf; a value must be a number or, to ban its token, -inf")


def _sparse_bias(bias: SparseBias) -> None:
    remedy = "; SparseBias.of makes one from a dict of ids and values"
    for name, dtype in (("ids", torch.int32), ("values", torch.float32)):
        held = getattr(bias, name)
        if (
            not isinstance(held, torch.Tensor)
            or held.dim() != 1
            or held.dtype != dtype
            or held.device.type != "cpu"
            or held.layout != torch.strided
        ):
            given = (
                f"{held.dtype} {list(held.shape)} on {held.device}"
                if isinstance(held, torch.Tensor)
                else type(held).__name__
            )
            raise RequestError(f"Settings.token_bias.{name} is {given}; it must be {dtype} [k] on the CPU{remedy}")
    if len(bias.ids) != len(bias.values):
        raise RequestError(
            f"Settings.token_bias has {len(bias.ids)} ids and {len(bias.values)} values; each id has one value{remedy}"
        )
    if not _is_real(bias.rest):
        raise RequestError(f"Settings.token_bias.rest is {bias.rest!r}; it must be a number, or -inf")
    if len(bias.ids) and (lowest := int(bias.ids.min())) < 0:
        raise RequestError(f"Settings.token_bias names id {lowest}; ids begin at 0, so leave it out")
    ordered = bias.ids.sort().values
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(again):
        raise RequestError(
            f"Settings.token_bias names id {int(again[0])} twice or more; each id may have one value{remedy}"
        )


def _tokens(name: str, tokens: Any, kinds: tuple[type[Collection[Any]], ...], *, texts: bool) -> None:
    if tokens is None:
        return
    what = "token ids or texts" if texts else "token ids"
    if not isinstance(tokens, kinds):
        raise RequestError(f"Settings.{name} is a {type(tokens).__name__}; it must be a set of {what}, or None")
    for token in tokens:
        if not (_is_id(token) or (texts and isinstance(token, str))):
            raise RequestError(f"Settings.{name} holds {token!r}; it must be a set of {what}, or None")


def _is_id(token: object) -> bool:
    return not isinstance(token, bool) and isinstance(token, Integral) and int(token) >= 0
