"""`ExLlamaV2Sampler` for scripts that run their own loop: sampling without a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from exl_filters import ExLlamaV2Filter
from exl_generate.errors import RequestError
from exl_generate.sampling.plan import plan_of
from exl_generate.sampling.rng import RequestRandom
from exl_generate.sampling.sampler import none_left, report, skewed
from exl_generate.sampling.settings import Settings as SamplerSettings
from exl_generate.sampling.transforms import mirostat_update
from exl_generate.sampling.vocabulary import Mask, Vocabulary
from exl_kernels import sampling as kernels

if TYPE_CHECKING:
    from exl_generate.contracts import Tokenizer

__all__ = ["ExLlamaV2Sampler"]

_NONE = torch.empty((1, 1), device="meta")


class ExLlamaV2Sampler:
    """Sampling for scripts that run a loop of their own. Generators use one sampler for each request instead."""

    Settings = SamplerSettings

    @staticmethod
    def sample(
        logits: torch.Tensor,
        settings: SamplerSettings,
        sequence_ids: torch.Tensor,
        random: float,
        tokenizer: Tokenizer | None,
        prefix_token: torch.Tensor | None = None,
        return_top_tokens: int = 0,
        blocked_tokens: Sequence[int] | None = None,
        filters: Sequence[Any] | None = None,
        filter_prefer_eos: bool = False,
        sync: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool]:
        """Sample one token for each row of `logits` [B, 1, Vp].

        Returns tokens int64 [B, 1], top tokens and their probabilities [B, 1, K] (tensors on "meta" if K is 0),
        probabilities of the tokens [B, 1], and whether a filter names the token as its end.

        Args:
            logits: float [B, 1, Vp]; not changed.
            settings: Sampler settings. With `cfg_scale` the rows are a positive and a negative prompt and give one
                token.
                `mirostat_mu` holds mirostat's state, one number a row.
            sequence_ids: int64 [B, n], all ids so far.
            random: Row 0's number in [0, 1), from which further rows derive theirs.
            tokenizer: None: every id of the logits may be chosen, and options that need the text of tokens raise.
            prefix_token: int64 [B, 1]; the token must begin with this token's text.
            return_top_tokens: K, the number of reported candidates.
            blocked_tokens: Ids that are never chosen.
            filters: Filters that were begun; the caller feeds them.
            filter_prefer_eos: Choose EOS as soon as the filters allow it.
            sync: Accepted without effect: the logits are read in the order of their stream.

        Raises:
            RequestError: operands do not fit.
            NoCandidatesError: no token is left.
        """
        given = settings
        vocabulary = Vocabulary(None, logits.shape[-1]) if tokenizer is None else Vocabulary.of(tokenizer)
        settings = given.resolve(vocabulary.width)
        _check(logits, settings, random, filters)
        plan = plan_of(settings, vocabulary)
        batch = 1 if settings.cfg_scale is not None else logits.shape[0]
        mask, ends = (None, frozenset[int]()) if not filters else _filtered(filters, vocabulary, logits.shape[2])
        if mask is not None and filter_prefer_eos and not all(map(_masks_logits, filters or ())):
            mask = _only_eos(mask, None if tokenizer is None else tokenizer.eos_token_id)
        logits = logits.float()
        context = sequence_ids.to("cpu", torch.int64).contiguous().numpy()
        mu = _mirostat_state(settings, batch)
        rows = [
            kernels.Row(
                plan,
                logits[b, 0].contiguous(),
                uniform=skewed(random if b == 0 else RequestRandom(int(random * 2**53)).uniform(b), settings.skew),
                negative=None if settings.cfg_scale is None else logits[1, 0].contiguous(),
                context=context[b],
                mirostat=float(2.0 ** min(-mu[b], 60.0)) if settings.mirostat else 0.0,
                mask=mask,
                discouraged=tuple(blocked_tokens or ()),
                only=None if prefix_token is None else _continuing(int(prefix_token[b, 0]), tokenizer),
                top_n=min(return_top_tokens, logits.shape[2]),
            )
            for b in range(batch)
        ]
        samples = [_taken(row, outcome) for row, outcome in zip(rows, kernels.sample(rows), strict=True)]
        if settings.mirostat:
            tau, eta = settings.mirostat_tau, settings.mirostat_eta
            given.mirostat_mu = [mirostat_update(m, s.probability, tau, eta) for m, s in zip(mu, samples, strict=True)]
        tops = [report(s.top_tokens, s.top_probabilities, return_top_tokens, logits.shape[2]) for s in samples]
        return (
            torch.tensor([[s.token] for s in samples], dtype=torch.int64),
            torch.from_numpy(np.stack([ids for ids, _ in tops]))[:, None] if return_top_tokens else _NONE,
            torch.from_numpy(np.stack([p for _, p in tops]))[:, None] if return_top_tokens else _NONE,
            torch.tensor([[s.probability] for s in samples], dtype=torch.float32),
            samples[0].token in ends,
        )

    @staticmethod
    def apply_dry(
        settings: SamplerSettings, tokenizer: Tokenizer, sequence_ids: torch.Tensor, logits: torch.Tensor
    ) -> None:
        """Subtract DRY's penalties from float32 `logits` [1, .., Vp] in place.

        `settings` has the `dry_` fields, `tokenizer` resolves its sequence breakers, and `sequence_ids`, int64 [1, n],
        are the tokens so far.
        """
        vocabulary = Vocabulary.of(tokenizer)
        settings = settings.resolve(vocabulary.width)
        only = SamplerSettings(
            token_repetition_penalty=1.0,
            dry_multiplier=settings.dry_multiplier,
            dry_base=settings.dry_base,
            dry_allowed_length=settings.dry_allowed_length,
            dry_max_ngram=settings.dry_max_ngram,
            dry_range=settings.dry_range,
            dry_sequence_breakers=settings.dry_sequence_breakers,
        )
        context = sequence_ids.to("cpu", torch.int64).reshape(-1).numpy()
        row = kernels.Row(plan_of(only, vocabulary), logits.reshape(-1).contiguous(), context=context)
        shaped = torch.from_numpy(kernels.shaped(row))
        logits.view(-1)[: len(shaped)] = shaped.to(logits.device)

    @staticmethod
    def get_dry_default_sequence_breaker_tokens(tokenizer: Tokenizer) -> set[int]:
        """Return the ids of `tokenizer` that end a repeat unless `Settings.dry_sequence_breakers` names others."""
        return Vocabulary.of(tokenizer).dry_breaker_ids

    @staticmethod
    def get_default_xtc_mask_tokens(tokenizer: Tokenizer) -> frozenset[int]:
        """Return the ids of `tokenizer` that XTC never excludes unless `Settings.xtc_ignore_tokens` names others."""
        return frozenset(Vocabulary.of(tokenizer).xtc_ignored_ids)

    @staticmethod
    def get_xtc_mask_tensor(tokenizer: Tokenizer, vocab_size: int, xtc_mask_tokens: frozenset[int]) -> torch.Tensor:
        """Return bool [vocab_size]: True for the ids in `xtc_mask_tokens`, which XTC never excludes.

        `tokenizer` is accepted as by exllamav2, without effect.
        """
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[[i for i in xtc_mask_tokens if 0 <= i < vocab_size]] = True
        return mask


def _check(logits: torch.Tensor, settings: SamplerSettings, random: float, filters: Sequence[Any] | None) -> None:
    if logits.dim() != 3 or logits.shape[1] != 1:
        raise RequestError(f"logits are {tuple(logits.shape)}; pass one position a row, [batch, 1, vocabulary]")
    if not 0 <= random < 1:
        raise RequestError(f"random is {random}; it must be a number in [0, 1)")
    if settings.cfg_scale is not None and logits.shape[0] != 2:
        raise RequestError(
            f"cfg_scale is set and logits have {logits.shape[0]} rows; pass a positive and a negative one"
        )
    if filters and settings.cfg_scale is None and logits.shape[0] != 1:
        raise RequestError(
            f"filters are given and logits have {logits.shape[0]} rows; sample rows with filters one by one"
        )


def _taken(row: kernels.Row, outcome: kernels.Sampled | kernels.Failure) -> kernels.Sampled:
    if isinstance(outcome, kernels.Failure):
        raise none_left(row, outcome)
    return outcome


def _mirostat_state(settings: SamplerSettings, batch: int) -> list[float]:
    """Return mu of each row, 2 tau where no state is kept."""
    kept = settings.mirostat_mu or []
    return [kept[b] if b < len(kept) and kept[b] else 2.0 * settings.mirostat_tau for b in range(batch)]


def _filtered(filters: Sequence[Any], vocabulary: Vocabulary, width: int) -> tuple[Mask | None, frozenset[int]]:
    """Return the tokens that all filters allow as packed words (None: no constraint), and the tokens that any of them
    names as its end."""
    allowed: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    ends: set[int] = set()
    for filter_ in filters:
        this, last = _opinion(filter_, width)
        ends |= last
        if this is not None:
            allowed = this if allowed is None else allowed & this
    if allowed is None:
        return None, frozenset(ends)
    return kernels.pack_ids(np.flatnonzero(allowed).tolist(), max(width, vocabulary.size)), frozenset(ends)


def _opinion(filter_: Any, width: int) -> tuple[np.ndarray[Any, np.dtype[np.bool_]] | None, set[int]]:
    get = getattr(filter_, "get_next", None)
    masks = _masks_logits(filter_)
    if masks and getattr(type(filter_), "next", ExLlamaV2Filter.next) is ExLlamaV2Filter.next:
        prepared = get(mask=True) if get is not None else filter_.prepare_logit_mask()
        if prepared is False:
            return None, set()
        return np.asarray(filter_.mask_logits(torch.zeros(width)).numpy() == 0), set()
    # A filter that can mask is asked for its ids, too: formatron's mask needs an NVIDIA driver. Its end tokens are
    # ignored.
    ids, ends = filter_.next() if get is None else get()
    ends = () if masks else ends
    if ids is None:
        return None, set(ends or ())
    allowed = np.zeros(width, dtype=np.bool_)
    allowed[[int(i) for i in ids if int(i) < width]] = True
    return allowed, set(map(int, ends or ()))


def _masks_logits(filter_: Any) -> bool:
    """Whether a filter masks logits itself; lm-format-enforcer's class lacks the method."""
    own = getattr(filter_, "can_mask_logits", None)
    return callable(own) and bool(own())


def _only_eos(mask: Mask, eos: int | None) -> Mask:
    """Return a mask of EOS alone, if it is allowed."""
    if eos is None or not mask[eos // 32] >> (eos % 32) & 1:
        return mask
    return kernels.pack_ids([eos], 32 * len(mask))


def _continuing(token: int, tokenizer: Tokenizer | None) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the ids whose bytes begin with this token's. A token without text is its only candidate."""
    if tokenizer is None:
        raise RequestError("tokenizer is None, and prefix_token needs the text of tokens: pass the tokenizer")
    pieces = tokenizer.get_id_to_bytes_list()
    prefix = pieces[token]
    ids = [i for i, piece in enumerate(pieces) if piece.startswith(prefix)] if prefix else [token]
    return np.array(ids, dtype=np.int64)
