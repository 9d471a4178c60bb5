"""Convert a request's fields to `Sampling`."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from exl_serve.api.state import TextCodec
from exl_serve.errors import ServeError
from exl_serve.request.internal import Sampling

__all__ = ["draw_seed", "sampling_of", "seeds_of", "stop_ids_of"]

_NAMES = {
    "presence_penalty": "token_presence_penalty",
    "frequency_penalty": "token_frequency_penalty",
    "repetition_penalty": "token_repetition_penalty",
    "repetition_range": "token_repetition_range",
    "repetition_decay": "token_repetition_decay",
}
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "top_a", "typical", "tfs", "skew", "temperature_last"),
    *("smoothing_factor", "min_temp", "max_temp", "temp_exponent", "mirostat_tau", "mirostat_eta", "dry_multiplier"),
    *("dry_base", "dry_allowed_length", "dry_range", "xtc_probability", "xtc_threshold", "cfg_scale"),
    "allowed_token_ids",
)


def sampling_of(fields: Mapping[str, Any], defaults: Mapping[str, Any], text: TextCodec) -> Sampling:
    """Return the sampling of a request.

    `defaults` are those of the model and the server, by the names of `Sampling`. Raises ServeError 400.
    """
    values: dict[str, Any] = {k: v for k, v in defaults.items() if k in Sampling.__struct_fields__}
    values |= {name: fields[name] for name in _SAME if name in fields}
    values |= {ours: fields[theirs] for theirs, ours in _NAMES.items() if theirs in fields}
    for name in ("top_k", "dry_range"):  # -1 is off, or all
        values[name] = max(0, values.get(name, 0))
    if "mirostat_mode" in fields:
        values["mirostat"] = fields["mirostat_mode"] > 0
    if "dry_sequence_breakers" in fields:
        values["dry_sequence_breakers"] = _breakers(fields["dry_sequence_breakers"], text)
    bias = dict(fields.get("logit_bias", {}))
    bias |= dict.fromkeys(fields.get("banned_tokens", ()), -math.inf)
    for name in ("logit_bias", "banned_tokens", "allowed_token_ids"):
        _check_ids(name, fields.get(name, ()), text)
    allowed = fields.get("allowed_token_ids")
    if allowed == ():
        raise ServeError.invalid("allowed_token_ids allows no token: name at least one", "allowed_token_ids")
    banned = {id for id, amount in bias.items() if amount == -math.inf}
    if len(banned) >= text.vocab_size or (allowed is not None and banned.issuperset(allowed)):
        name = "banned_tokens" if "banned_tokens" in fields else "logit_bias"
        raise ServeError.invalid(f"{name} bans every token that could be generated: leave some", name)
    if bias:
        values["logit_bias"] = bias
    return Sampling(**values)


def stop_ids_of(fields: Mapping[str, Any], text: TextCodec) -> tuple[int, ...]:
    """Return the token ids that end an answer. Raises ServeError 400."""
    found: tuple[int, ...] = fields.get("stop_token_ids", ())
    _check_ids("stop_token_ids", found, text)
    return found


def _check_ids(name: str, ids: Iterable[int], text: TextCodec) -> None:
    """Raise ServeError 400 for an id that is not in the vocabulary."""
    bad = next((i for i in ids if i >= text.vocab_size), None)
    if bad is not None:
        raise ServeError.invalid(
            f"{name} names token {bad}; the vocabulary has ids 0 to {text.vocab_size - 1}", name, "token_id"
        )


def _breakers(texts: tuple[str, ...], text: TextCodec) -> tuple[int, ...]:
    """Return the last id of each text: a sequence ends where the text ends."""
    found = [text.encode(one) for one in texts]
    return tuple(sorted({ids[-1] for ids in found if ids}))


def draw_seed() -> int:
    """Return a random seed for a request without one. The answer reports it, so that it can be repeated."""
    return secrets.randbits(63)


def seeds_of(seed: int, n: int) -> tuple[int, ...]:
    """Return one seed for each choice: the seed itself, then numbers of splitmix64 started with it."""
    begin = _splitmix64(seed % (1 << 64))
    return (seed, *(_splitmix64((begin + i) % (1 << 64)) for i in range(1, n)))


def _splitmix64(x: int) -> int:
    """SplitMix64, cut to 63 bits: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
    2014.
    """
    mask = (1 << 64) - 1
    z = (x + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
