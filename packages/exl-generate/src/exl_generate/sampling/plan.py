"""Turn validated settings into the numbers of an `exl_kernels.sampling.Plan`; sets of tokens are resolved here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from exl_generate.errors import RequestError
from exl_kernels.sampling import Dry, LateTemperature, Penalties, Plan, SparseBias, Xtc

if TYPE_CHECKING:
    import torch

    from exl_generate.sampling.settings import Settings
    from exl_generate.sampling.vocabulary import Mask, Vocabulary

__all__ = ["plan_of"]

#: Longer lengths in tokens have the same meaning.
_LONGEST = 1 << 40


def plan_of(s: Settings, vocabulary: Vocabulary) -> Plan:
    """Return the transforms of a request. Raises `RequestError` for sets and biases that do not fit the vocabulary."""
    return Plan(
        size=vocabulary.size,
        temperature=1.0 if s.temperature_last else float(s.temperature),
        smoothing=float(s.smoothing_factor),
        top_k=min(int(s.top_k), _LONGEST),
        top_p=_share(s.top_p),
        top_a=float(s.top_a),
        min_p=_share(s.min_p),
        tfs=_share(s.tfs),
        typical=_share(s.typical),
        late=_late(s),
        xtc=Xtc(float(s.xtc_probability), float(s.xtc_threshold)),
        xtc_ignored=_ignored(s, vocabulary),
        descending=s.skew != 0,
        greedy=s.is_greedy,
        penalties=Penalties(
            repetition=float(s.token_repetition_penalty),
            presence=float(s.token_presence_penalty),
            frequency=float(s.token_frequency_penalty),
            range=min(int(s.token_repetition_range), _LONGEST),
            decay=min(int(s.token_repetition_decay), _LONGEST),
        ),
        dry=_dry(s, vocabulary),
        bias=_bias(s, vocabulary),
        cfg_scale=None if s.cfg_scale is None else float(s.cfg_scale),
    )


def _bias(s: Settings, vocabulary: Vocabulary) -> torch.Tensor | SparseBias | None:
    bias = s.token_bias
    if isinstance(bias, Mapping):
        bias = SparseBias.of(bias)
    if isinstance(bias, SparseBias):
        highest = max(bias.ids.tolist(), default=0)
        if highest >= vocabulary.width:
            raise RequestError(f"Settings.token_bias names id {highest}; the vocabulary has {vocabulary.width} ids")
    elif bias is not None and len(bias) < vocabulary.least_bias:
        raise RequestError(
            f"Settings.token_bias has {len(bias)} values, the vocabulary {vocabulary.least_bias} ids; pass one value "
            "per id (Settings.disallow_tokens and allow_tokens make such a tensor), or a dict of ids and values"
        )
    return bias


def _share(value: float) -> float:
    """A cut that is active inside (0, 1)."""
    return float(value) if 0 < value < 1 else 0.0


def _late(s: Settings) -> LateTemperature | None:
    """Step 18: dynamic temperature replaces the late one."""
    if s.max_temp > s.min_temp:
        return LateTemperature(float(s.min_temp), float(s.max_temp), float(s.temp_exponent))
    if s.temperature_last and s.temperature != 1.0:
        return LateTemperature(float(s.temperature), float(s.temperature))
    return None


def _ignored(s: Settings, vocabulary: Vocabulary) -> Mask | None:
    if s.xtc_probability == 0:
        return None
    return vocabulary.xtc_ignored if s.xtc_ignore_tokens is None else _packed(s.xtc_ignore_tokens, vocabulary)


def _dry(s: Settings, vocabulary: Vocabulary) -> Dry | None:
    if s.dry_multiplier == 0:
        return None
    given = s.dry_sequence_breakers
    breakers = vocabulary.dry_breakers if given is None else _packed(given, vocabulary)
    return Dry(
        multiplier=float(s.dry_multiplier),
        base=float(s.dry_base),
        allowed_length=min(int(s.dry_allowed_length), _LONGEST),
        max_ngram=min(int(s.dry_max_ngram), _LONGEST),
        range=min(int(s.dry_range), _LONGEST),
        breakers=breakers,
    )


def _packed(tokens: Collection[int | str], vocabulary: Vocabulary) -> Mask:
    ids: set[int] = set()
    for token in tokens:
        if isinstance(token, str):
            ids |= vocabulary.breaking(token)
        elif token < vocabulary.width:
            ids.add(int(token))
        else:
            raise RequestError(f"token id {token} is outside the vocabulary of {vocabulary.width}")
    return vocabulary.pack(ids)
