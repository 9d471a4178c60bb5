"""`ExLlamaV2Sampler.Settings`: what may be asked of the sampler, with the exact defaults of spec/generators.md 4.1."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from exl_generate.errors import RequestError

if TYPE_CHECKING:
    from exl_generate.contracts import Tokenizer

__all__ = ["Settings"]

#: Field -> (lowest, highest) allowed value, both included.
_RANGES: dict[str, tuple[float, float]] = {
    "token_repetition_penalty": (1e-6, math.inf),
    "token_repetition_range": (-1, math.inf),
    "token_repetition_decay": (0, math.inf),
    "token_frequency_penalty": (-math.inf, math.inf),
    "token_presence_penalty": (-math.inf, math.inf),
    "temperature": (0, math.inf),
    "smoothing_factor": (0, math.inf),
    "min_temp": (0, math.inf),
    "max_temp": (0, math.inf),
    "temp_exponent": (0, math.inf),
    "top_k": (0, math.inf),
    "top_p": (0, math.inf),
    "top_a": (0, math.inf),
    "min_p": (0, math.inf),
    "tfs": (0, math.inf),
    "typical": (0, math.inf),
    "skew": (-math.inf, math.inf),
    "mirostat_tau": (0, math.inf),
    "mirostat_eta": (0, math.inf),
    "dry_allowed_length": (1, math.inf),
    "dry_base": (0, math.inf),
    "dry_multiplier": (0, math.inf),
    "dry_range": (0, math.inf),
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


@dataclass
class Settings:
    """Sampling settings. They hold no state of a running request: one object may serve any number of jobs at once.

    `top_k` 0, `top_p`, `tfs` and `typical` 0 or >= 1, `min_p`, `top_a`, `smoothing_factor`, `skew`, `dry_multiplier`
    and `xtc_probability` 0 switch a transform off; a temperature below 0.01 means greedy. The order in which transforms
    apply is that of `exl_generate.sampling.sampler`. `mirostat_mu`, `ngram_trie`, `ngram_index` and `ngram_history`
    held state in exllamav2; they stay as names so that positional construction works, and are not used: that state
    belongs to the request.
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
    token_bias: torch.Tensor | None = None
    cfg_scale: float | None = None
    post_sampling_hooks: list[Callable[..., None]] = field(default_factory=list)
    dry_allowed_length: int = 2
    dry_base: float = 1.75
    dry_multiplier: float = 0.0
    dry_sequence_breakers: set[int] | None = None
    dry_range: int = 0
    dry_max_ngram: int = 20
    ngram_trie: Any = None
    ngram_index: int = 0
    ngram_history: deque[Any] = field(default_factory=deque)
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_ignore_tokens: frozenset[int] | None = None

    @staticmethod
    def greedy(**kwargs: Any) -> Settings:
        """The most probable token each time: temperature 1, no repetition penalty, `top_p` 0, `top_k` 1, changed by
        `kwargs`."""
        greedy: dict[str, Any] = {"temperature": 1.0, "token_repetition_penalty": 1.0, "top_p": 0.0, "top_k": 1}
        return Settings(**{**greedy, **kwargs})

    def clone(self) -> Settings:
        """A copy whose bias, hooks and sets are its own: changing one never changes the other."""
        return replace(
            self,
            token_bias=None if self.token_bias is None else self.token_bias.clone(),
            post_sampling_hooks=list(self.post_sampling_hooks or []),
            dry_sequence_breakers=None if self.dry_sequence_breakers is None else set(self.dry_sequence_breakers),
            mirostat_mu=None,
            ngram_trie=None,
            ngram_index=0,
            ngram_history=deque(),
        )

    def greedy_clone(self) -> Settings:
        """Greedy settings that keep this object's penalties, DRY and XTC fields: what a draft of its output is made
        with."""
        return Settings(
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
        """Never sample these ids. A bias of the padded vocabulary's width is created if none exists."""
        ids = [_token_id(tokenizer, token) for token in tokens]
        bias = self._own_bias(tokenizer, 0.0)
        bias[ids] = -math.inf
        self.token_bias = bias

    def allow_tokens(self, tokenizer: Tokenizer, tokens: Iterable[int | str]) -> None:
        """Sample only these ids or whole pieces; with a bias already set, lift the ban on these and keep the rest as
        it is."""
        ids = [_token_id(tokenizer, token) for token in tokens]
        bias = self._own_bias(tokenizer, -math.inf)
        bias[ids] = 0.0
        self.token_bias = bias

    def validate(self) -> None:
        """Refuse what has no meaning: `RequestError` with the limit."""
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise RequestError(f"Settings.{name} is {value!r}; it must be a number from {low} to {high}")
            if name in _INTEGERS and not isinstance(value, int):
                raise RequestError(f"Settings.{name} is {value!r}; it must be a whole number, as an int")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"Settings.{name} is {getattr(self, name)!r}; it must be True or False")
        if not isinstance(self.post_sampling_hooks, list) or not all(map(callable, self.post_sampling_hooks)):
            raise RequestError(
                f"Settings.post_sampling_hooks is {self.post_sampling_hooks!r}; it must be a list of functions"
            )
        if self.max_temp > 0 and self.min_temp > self.max_temp:
            raise RequestError(f"Settings.min_temp {self.min_temp} exceeds max_temp {self.max_temp}; swap them")
        if self.dry_multiplier > 0 and 0 < self.dry_range <= self.dry_max_ngram:
            raise RequestError(
                f"Settings.dry_range {self.dry_range} must be 0 or exceed dry_max_ngram {self.dry_max_ngram}"
            )
        bias = self.token_bias
        if bias is not None and (not isinstance(bias, torch.Tensor) or bias.dim() != 1 or bool(bias.isnan().any())):
            raise RequestError("Settings.token_bias must be a 1-D tensor without NaN, one value per token id, or None")
        if self.cfg_scale is not None and not math.isfinite(self.cfg_scale):
            raise RequestError(f"Settings.cfg_scale is {self.cfg_scale}; it must be a finite number or None")

    @property
    def is_greedy(self) -> bool:
        """True where the draw cannot matter: temperature below 0.01 or `top_k` 1."""
        return self.temperature < 0.01 or self.top_k == 1

    def effective(self) -> dict[str, Any]:
        """The fields that differ from their defaults, for logs and for echoing back what was really applied."""
        default = Settings()
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v for k, v in values.items() if v is not getattr(default, k) and not _same(v, getattr(default, k))}

    def _own_bias(self, tokenizer: Tokenizer, fill: float) -> torch.Tensor:
        if self.token_bias is not None:
            return self.token_bias.clone()
        width = -(-tokenizer.config.vocab_size // 32) * 32
        return torch.full((width,), fill, dtype=torch.float32)


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
