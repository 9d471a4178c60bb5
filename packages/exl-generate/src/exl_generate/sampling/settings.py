"""`ExLlamaV2Sampler.Settings`: the sampler's settings, with exllamav2's defaults."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Set
from copy import copy, deepcopy
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Never, Self

import torch

from exl_core.config.vocabulary import padded_vocabulary
from exl_generate.errors import RequestError
from exl_generate.sampling.validation import validate
from exl_kernels.sampling import SparseBias

if TYPE_CHECKING:
    from exl_generate.contracts import Tokenizer

__all__ = ["FrozenSettings", "Settings"]


@dataclass
class Settings:
    """Sampling settings. They hold no state of a running request: one object may serve any number of jobs at once.

    Transforms apply in this order: CFG, penalties, bans and bias, DRY, filters, temperature, `top_k`, `top_p`, `top_a`,
    `min_p`, `tfs`, `typical`, mirostat, late or dynamic temperature, XTC, the draw. `p` is a token's probability,
    `pmax` the largest one.

    Args:
        token_repetition_penalty: positive logits of tokens that have occurred are divided by it, others multiplied; 1
            is off.
        token_repetition_range: newest tokens that the three penalties look at; -1 for all.
        token_repetition_decay: tokens before that range over which the penalties fade to nothing.
        token_frequency_penalty: subtracted from a logit for each occurrence of the token.
        token_presence_penalty: subtracted once from the logit of a token that has occurred.
        temperature: logits are divided by it; below 0.01 the most probable token is taken (greedy).
        smoothing_factor: quadratic sampling: a logit at distance d below the largest one becomes -d * d * factor; 0 is
            off.
        min_temp: lowest temperature of dynamic temperature.
        max_temp: highest temperature of dynamic temperature, which is off unless this exceeds `min_temp`.
        temp_exponent: exponent of the relative entropy between those two temperatures.
        top_k: keep so many of the most probable tokens; 0 is off, 1 is greedy.
        top_p: keep the most probable tokens whose sum reaches it; 0 and 1 are off.
        top_a: drop tokens with p < top_a * pmax * pmax; 0 is off.
        min_p: drop tokens with p < min_p * pmax; 0 is off.
        tfs: tail-free sampling: the share of the curvature of the sorted probabilities to keep; 0 and 1 are off.
        typical: keep the tokens of most typical surprise whose sum reaches it; 0 and 1 are off.
        skew: warps the draw: above 0 favours less probable tokens, below 0 more probable ones; 0 is off.
        temperature_last: apply the temperature after the cuts.
        mirostat: keep tokens whose surprise is at most mu bits, where mu follows the text (mirostat 2).
        mirostat_tau: target surprise, bits.
        mirostat_eta: rate at which mu follows.
        mirostat_mu: state of `ExLlamaV2Sampler.sample`, which knows no request. Jobs keep theirs themselves.
        token_bias: added to the logits, -inf bans: a tensor with a value for each id of the vocabulary (values of ids
            beyond it are ignored), a dict of ids and values, or a `SparseBias`. The last two take less memory.
        cfg_scale: weight of the positive prompt in classifier-free guidance; None without a negative prompt.
        post_sampling_hooks: functions called after each draw, see `ExLlamaV2PostSamplingHook`.
        dry_allowed_length: shortest repeat, in tokens, whose continuation DRY penalises.
        dry_base: a repeat of L tokens costs dry_multiplier * dry_base ** (L - dry_allowed_length).
        dry_multiplier: 0 switches DRY off.
        dry_sequence_breakers: ids or texts that end a repeat: a text means every id whose piece contains it, or, if it
            spans pieces, the last id of its encoding. None means ids whose piece has one of
            `.,!?<>[](){}"`, a tab or a line end, and special ids.
        dry_range: newest tokens in which DRY looks for repeats; 0 for all. Otherwise more than `dry_max_ngram`.
        dry_max_ngram: longest repeat that DRY looks for, tokens.
        ngram_trie: exllamav2's state of DRY, not used; kept so that positional construction works.
        ngram_index: not used, as `ngram_trie`.
        ngram_history: not used, as `ngram_trie`.
        xtc_probability: chance that XTC excludes the most probable tokens; 0 is off. Here each of them loses this share
            of its probability, which is the same in expectation.
        xtc_threshold: XTC excludes tokens with p of at least this, but the least probable of them.
        xtc_ignore_tokens: ids that XTC never excludes; None means ids whose piece has a line end, and
            special ids.

    Raises:
        RequestError: from `validate`, which jobs call: a value is out of its range.
    """

    token_repetition_penalty: float = 1.025
    token_repetition_range: int = -1
    token_repetition_decay: int = 0
    token_frequency_penalty: float = 0.0
    token_presence_penalty: float = 0.0
    temperature: float = 0.8
    smoothing_factor: float = 0.0
    min_temp: float = 0
    max_temp: float = 0.0
    temp_exponent: float = 1.0
    top_k: int = 50
    top_p: float = 0.8
    top_a: float = 0.0
    min_p: float = 0
    tfs: float = 0
    typical: float = 0
    skew: float = 0
    temperature_last: bool = False
    mirostat: bool = False
    mirostat_tau: float = 1.5
    mirostat_eta: float = 0.1
    mirostat_mu: list[float] | None = None
    token_bias: torch.Tensor | Mapping[int, float] | SparseBias | None = None
    cfg_scale: float | None = None
    post_sampling_hooks: list[Callable[..., None]] = field(default_factory=list)
    dry_allowed_length: int = 2
    dry_base: float = 1.75
    dry_multiplier: float = 0.0
    dry_sequence_breakers: Collection[int | str] | None = None
    dry_range: int = 0
    dry_max_ngram: int = 20
    ngram_trie: Any = None
    ngram_index: int = 0
    ngram_history: deque[Any] = field(default_factory=deque)
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_ignore_tokens: frozenset[int] | None = None

    @classmethod
    def greedy(cls, **kwargs: Any) -> Self:
        """Return settings that choose the most probable token: temperature 1, no repetition penalty, `top_p` 0, `top_k`
        1.

        `kwargs` replace fields.
        """
        greedy: dict[str, Any] = {"temperature": 1.0, "token_repetition_penalty": 1.0, "top_p": 0.0, "top_k": 1}
        return cls(**{**greedy, **kwargs})

    def clone(self) -> Self:
        """Return a copy with its own bias, hooks and sets: changing one never changes the other."""
        return replace(
            self,
            token_bias=_copied(self.token_bias),
            post_sampling_hooks=copy(self.post_sampling_hooks) or [],
            dry_sequence_breakers=copy(self.dry_sequence_breakers),
            xtc_ignore_tokens=copy(self.xtc_ignore_tokens),
            mirostat_mu=None,
            ngram_trie=None,
            ngram_index=0,
            ngram_history=deque(),
        )

    def greedy_clone(self) -> Self:
        """Return greedy settings with this object's penalties, DRY and XTC fields, for drafts of its output."""
        return type(self)(
            token_repetition_penalty=self.token_repetition_penalty,
            token_repetition_range=self.token_repetition_range,
            token_repetition_decay=self.token_repetition_decay,
            token_frequency_penalty=self.token_frequency_penalty,
            token_presence_penalty=self.token_presence_penalty,
            top_k=1,
            top_p=0,
            dry_allowed_length=self.dry_allowed_length,
            dry_base=self.dry_base,
            dry_multiplier=self.dry_multiplier,
            dry_sequence_breakers=self.dry_sequence_breakers,
            dry_range=self.dry_range,
            dry_max_ngram=self.dry_max_ngram,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            xtc_ignore_tokens=self.xtc_ignore_tokens,
        )

    def disallow_tokens(self, tokenizer: Tokenizer, tokens: Iterable[int]) -> None:
        """Never sample the ids in `tokens`.

        A bias as wide as the padded vocabulary of `tokenizer` is created if none exists.
        """
        ids = [_token_id(tokenizer, token) for token in tokens]
        bias = self._own_bias(tokenizer, 0.0)
        bias[ids] = -math.inf
        self.token_bias = bias

    def allow_tokens(self, tokenizer: Tokenizer, tokens: Iterable[int | str]) -> None:
        """Sample only `tokens`: ids, or texts that are whole pieces of `tokenizer`.

        With a bias already set, lift the ban on these and keep the rest.
        """
        ids = [_token_id(tokenizer, token) for token in tokens]
        bias = self._own_bias(tokenizer, -math.inf)
        bias[ids] = 0.0
        self.token_bias = bias

    def validate(self) -> None:
        """Raise `RequestError`, with the field, its value and the limit, for an invalid value."""
        validate(self)

    def frozen(self) -> FrozenSettings:
        """Return a copy that does not change, of any settings that `validate` accepts."""
        return FrozenSettings(**{name: getattr(self, name) for name in _FIELDS})

    def for_job(self, kept: FrozenSettings) -> Settings:
        """Return the object that a job reads while it runs: `kept`, the copy in its request, which does not change."""
        return kept

    def resolve(self, width: int | None = None) -> Settings:
        """Validate the settings and return those that the sampler applies: this object.

        `width` is the number of ids that settings may name, None if not known yet. Raises as `validate`.
        """
        self.validate()
        return self

    def revision(self) -> Hashable:
        """Return a value that changes when running jobs must refresh. Constant here: they read a copy."""
        return None

    @property
    def is_greedy(self) -> bool:
        """True where the draw cannot matter: temperature below 0.01 or `top_k` 1."""
        return self.temperature < 0.01 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """True where a penalty over the context is on."""
        neutral = (1.0, 0.0, 0.0)
        return neutral != (
            self.token_repetition_penalty,
            self.token_presence_penalty,
            self.token_frequency_penalty,
        )

    def effective(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, for logs and for echoing the applied settings."""
        default = Settings()
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v for k, v in values.items() if v is not getattr(default, k) and not _same(v, getattr(default, k))}

    def _own_bias(self, tokenizer: Tokenizer, fill: float) -> torch.Tensor:
        width = padded_vocabulary(tokenizer.config.vocab_size)
        if isinstance(self.token_bias, Mapping):
            return SparseBias.of(self.token_bias).dense(width)
        if isinstance(self.token_bias, SparseBias):
            return self.token_bias.dense(width)
        if self.token_bias is not None:
            return self.token_bias.clone()
        return torch.full((width,), fill, dtype=torch.float32)


class FrozenSettings(Settings):
    """Settings that do not change, as a request holds them. `clone` returns settings that can be changed.

    They hold tuples and frozensets, and a mapping is read-only. A bias tensor is their own.
    """

    def __init__(self, **values: Any) -> None:
        given = Settings(**values)
        bias, breakers, ignored = given.token_bias, given.dry_sequence_breakers, given.xtc_ignore_tokens
        own: dict[str, Any] = {
            "token_bias": MappingProxyType(dict(bias)) if isinstance(bias, Mapping) else _copied(bias),
            "post_sampling_hooks": tuple(given.post_sampling_hooks),
            "dry_sequence_breakers": _frozen(breakers),
            "xtc_ignore_tokens": None if ignored is None else frozenset(ignored),
            "mirostat_mu": None,
            "ngram_trie": None,
            "ngram_index": 0,
            "ngram_history": deque(),
        }
        vars(self).update(vars(given), **own)

    def __setattr__(self, name: str, value: object) -> Never:
        raise FrozenInstanceError(
            f"Settings.{name} cannot become {value!r:.80}: these settings belong to a request; change a `clone()` of "
            "them and begin a new job with it"
        )

    def __delattr__(self, name: str) -> Never:
        raise FrozenInstanceError(f"Settings.{name} cannot be deleted: these settings belong to a request")

    def __reduce__(self) -> tuple[Callable[[Settings], FrozenSettings], tuple[Settings]]:
        return Settings.frozen, (self.clone(),)  # a read-only mapping can be neither copied nor pickled

    def clone(self) -> Settings:  # type: ignore[override]  # the copy is made to be changed
        """Return a copy that can be changed, with its own bias and hooks."""
        own: dict[str, Any] = {
            "token_bias": _copied(self.token_bias),
            "post_sampling_hooks": list(self.post_sampling_hooks),
        }
        for name in ("dry_sequence_breakers", "xtc_ignore_tokens"):
            held = getattr(self, name)
            own[name] = set(held) if isinstance(held, frozenset) else list(held) if isinstance(held, tuple) else held
        return Settings(**{**vars(self), **own, "ngram_history": deque()})

    def frozen(self) -> FrozenSettings:
        """Return this object."""
        return self

    def effective(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as `Settings.effective` does."""
        return self.clone().effective()


_FIELDS = tuple(f.name for f in fields(Settings))


def _frozen(breakers: Any) -> Any:
    if breakers is None:
        return None
    return frozenset(breakers) if isinstance(breakers, Set) else tuple(breakers)


def _copied(bias: Any) -> Any:
    if isinstance(bias, torch.Tensor):
        return bias.clone()
    return dict(bias) if isinstance(bias, Mapping) else deepcopy(bias)


def _same(a: object, b: object) -> bool:
    return not isinstance(a, torch.Tensor) and a == b


def _token_id(tokenizer: Tokenizer, token: int | str) -> int:
    if isinstance(token, str):
        found = tokenizer.single_id(token)
        if found is None:
            raise RequestError(f"{token!r} is not a piece of this vocabulary; pass token ids or whole pieces")
        return int(found)
    if isinstance(token, bool) or not isinstance(token, int):
        raise RequestError(f"token {token!r} is neither an id nor a piece")
    if not 0 <= token < tokenizer.config.vocab_size:
        raise RequestError(f"token id {token} is outside the vocabulary of {tokenizer.config.vocab_size}")
    return token
