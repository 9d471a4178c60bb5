"""From one row of logits to one token, in the normative order of spec/generators.md 4.3.

1 CFG mix - 2 penalties - 3 blocked tokens - 4 bias - 5 DRY - 6 filter mask - 7 healing prefix - 8 ids beyond the
vocabulary - 9 greedy switch - 10 softmax with temperature - 11 top-k - 12 top-p - 13 top-a - 14 min-p - 15 TFS - 16
typical - 17 mirostat - 18 late or dynamic temperature - 19 XTC - 20 order - 21 report - 22 skewed draw - 23 mirostat
update.

A draw walks the candidates in descending order of probability, ties by lower id, whatever was asked to be reported.
Everything here is float64 after the logits and runs in one thread, so that a token depends on (logits, settings,
seed, position) only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exl_generate.errors import NoCandidatesError
from exl_generate.sampling import transforms
from exl_generate.sampling.rng import RequestRandom
from exl_generate.sampling.settings import Settings
from exl_generate.sampling.transforms import Ids, Logits, Probabilities
from exl_generate.sampling.vocabulary import Vocabulary, members

__all__ = ["Constraint", "RequestSampler", "Sample"]

#: Logit of a token that is to be avoided while anything else is possible. A filter that leaves nothing else still
#: gets it.
DISCOURAGED = np.float32(-1e30)


@dataclass(frozen=True, slots=True)
class Constraint:
    """What one step may choose from, beside the settings. All fields are optional."""

    #: packed int32 words, 1 = allowed, bit i & 31 of word i >> 5; ids beyond the words are not allowed
    mask: NDArray[np.int32] | None = None
    #: never chosen (alternatives that led into a banned string)
    blocked: tuple[int, ...] = ()
    #: chosen only if nothing else is left (stop tokens while `min_new_tokens` are missing)
    discouraged: tuple[int, ...] = ()
    #: only these (token healing)
    prefix: Ids | None = None


UNCONSTRAINED = Constraint()


@dataclass(frozen=True, slots=True)
class Sample:
    """A chosen token, its final probability, and the `top_n` most probable candidates padded with probability 0."""

    token: int
    probability: float
    top_tokens: Ids
    top_probabilities: NDArray[np.float32]


class RequestSampler:
    """The sampler of one request: its settings as they were at the start, its random numbers, its mirostat state."""

    def __init__(self, settings: Settings, vocabulary: Vocabulary, seed: int | None = None) -> None:
        settings.validate()
        self.settings = settings.clone()
        self.random = RequestRandom(seed)
        self._vocabulary = vocabulary
        self._bias = None if settings.token_bias is None else settings.token_bias.detach().cpu().float().numpy()
        #: mu before position i; a rewind simply samples an earlier position again
        self._mu = [2.0 * settings.mirostat_tau]

    def sample(
        self,
        logits: Logits,
        context: Ids,
        position: int,
        constraint: Constraint = UNCONSTRAINED,
        *,
        negative: Logits | None = None,
        attempt: int = 0,
        top_n: int = 0,
    ) -> Sample:
        """Choose token `position` (0 = first of the request) from float32 `logits` [Vp], which stay as they are.

        `context` holds all ids so far, prompt included; `negative` the logits of the negative prompt (CFG). Raises
        `NoCandidatesError` if nothing may be chosen.
        """
        row = self._shaped(self._mixed(logits, negative), context, constraint)
        best = int(row.argmax())
        if not np.isfinite(row[best]):
            raise NoCandidatesError(_why_empty(logits, constraint))
        if self.settings.is_greedy:
            return self._only(best, position, top_n, len(row))
        ids, p = self._candidates(row, position)
        r = self.random.uniform(position, attempt)
        chosen = transforms.draw(p, transforms.skew(r, self.settings.skew))
        if self.settings.mirostat:
            self._learn(position, float(p[chosen]))
        top_tokens, top_p = _report(ids, p, top_n, len(row))
        return Sample(int(ids[chosen]), float(p[chosen]), top_tokens, top_p)

    def _only(self, token: int, position: int, top_n: int, width: int) -> Sample:
        """The one candidate: there is nothing to draw."""
        if self.settings.mirostat:
            self._learn(position, 1.0)
        ids, p = np.array([token], dtype=np.int64), np.ones(1)
        top_tokens, top_p = _report(ids, p, top_n, width) if top_n else (ids[:0], p[:0].astype(np.float32))
        return Sample(token, 1.0, top_tokens, top_p)

    def distribution(
        self, logits: Logits, context: Ids, position: int = 0, constraint: Constraint = UNCONSTRAINED
    ) -> tuple[Ids, Probabilities]:
        """Candidates and final probabilities in the order of the draw, without drawing."""
        row = self._shaped(logits, context, constraint)
        if not np.isfinite(row.max()):
            raise NoCandidatesError(_why_empty(logits, constraint))
        if self.settings.is_greedy:
            return np.array([row.argmax()], dtype=np.int64), np.ones(1)
        return self._candidates(row, position)

    def _mixed(self, logits: Logits, negative: Logits | None) -> Logits:
        """Step 1, for a request with a negative prompt."""
        if negative is None or self.settings.cfg_scale is None:
            return logits
        return transforms.cfg_mix(logits, negative, self.settings.cfg_scale)

    def _shaped(self, logits: Logits, context: Ids, constraint: Constraint) -> Logits:
        """Steps 2-8 on a copy of the logits."""
        s = self.settings
        row = np.array(logits, dtype=np.float32)
        if s.token_repetition_penalty != 1.0 or s.token_presence_penalty != 0.0 or s.token_frequency_penalty != 0.0:
            transforms.penalties(
                row,
                context,
                repetition=s.token_repetition_penalty,
                presence=s.token_presence_penalty,
                frequency=s.token_frequency_penalty,
                sustain=s.token_repetition_range,
                decay=s.token_repetition_decay,
            )
        row[[token for token in constraint.discouraged if token < len(row)]] = DISCOURAGED
        if self._bias is not None:
            width = min(len(row), len(self._bias))
            row[:width] += self._bias[:width]
        if s.dry_multiplier > 0:
            breakers = s.dry_sequence_breakers
            transforms.dry(
                row,
                context,
                multiplier=s.dry_multiplier,
                base=s.dry_base,
                allowed_length=s.dry_allowed_length,
                max_ngram=s.dry_max_ngram,
                window=s.dry_range,
                breakers=self._vocabulary.dry_breakers if breakers is None else breakers,
            )
        _mask(row, constraint)
        row[self._vocabulary.size :] = -np.inf
        return row

    def _candidates(self, row: Logits, position: int) -> tuple[Ids, Probabilities]:
        """Steps 9-20: ids and probabilities in descending order."""
        s = self.settings
        ids = transforms.top_k(row, s.top_k)
        p = transforms.softmax(row[ids], 1.0 if s.temperature_last else s.temperature, s.smoothing_factor)
        cuts = (
            (0 < s.top_p < 1, transforms.top_p, s.top_p),
            (s.top_a > 0, transforms.top_a, s.top_a),
            (0 < s.min_p < 1, transforms.min_p, s.min_p),
            (0 < s.tfs < 1, transforms.tail_free, s.tfs),
            (0 < s.typical < 1, transforms.typical, s.typical),
            (s.mirostat, transforms.mirostat_cut, self._mu[min(position, len(self._mu) - 1)]),
        )
        for active, cut, value in cuts:
            if active and len(p) > 1:
                ids, p = _keep(ids, p, cut(p, value))
        if len(p) > 1:
            p = self._late(p)
        if s.xtc_probability > 0:
            group = self._vocabulary.xtc_ignored if s.xtc_ignore_tokens is None else s.xtc_ignore_tokens
            ignored = np.zeros(len(p), dtype=np.bool_)
            likely = np.flatnonzero(p >= s.xtc_threshold)
            ignored[likely] = members(ids[likely], group)
            p = transforms.xtc(p, s.xtc_probability, s.xtc_threshold, ignored)
            order = np.lexsort((ids, -p))
            ids, p = ids[order], p[order]
        return ids, p

    def _late(self, p: Probabilities) -> Probabilities:
        """Step 18: dynamic temperature replaces the late one."""
        s = self.settings
        if s.max_temp > s.min_temp:
            return transforms.dynamic_temperature(p, s.min_temp, s.max_temp, s.temp_exponent)
        if s.temperature_last and s.temperature != 1.0:
            return transforms.late_temperature(p, s.temperature)
        return p

    def _learn(self, position: int, chosen: float) -> None:
        """Step 23. Keyed by position, so that sampling a position again forgets what came after it."""
        del self._mu[position + 1 :]
        mu = transforms.mirostat_update(self._mu[-1], chosen, self.settings.mirostat_tau, self.settings.mirostat_eta)
        self._mu.append(mu)


def _mask(row: Logits, constraint: Constraint) -> None:
    """Steps 3 (hard part), 6 and 7: exclude what bans, filters and healing exclude."""
    if constraint.blocked:
        row[[token for token in constraint.blocked if token < len(row)]] = -np.inf
    if constraint.mask is not None:
        bits = np.unpackbits(constraint.mask.view(np.uint8), bitorder="little")[: len(row)]
        row[: len(bits)][bits == 0] = -np.inf
        row[len(bits) :] = -np.inf
    if constraint.prefix is not None:
        kept = row[constraint.prefix]
        row[:] = -np.inf
        row[constraint.prefix] = kept


def _keep(ids: Ids, p: Probabilities, keep: int | NDArray[np.bool_]) -> tuple[Ids, Probabilities]:
    if isinstance(keep, int):
        ids, p = ids[:keep], p[:keep]
    else:
        ids, p = ids[keep], p[keep]
    return ids, p / p.sum()


def _report(ids: Ids, p: Probabilities, top_n: int, width: int) -> tuple[Ids, NDArray[np.float32]]:
    """The `top_n` first candidates; missing ones become the lowest unused ids with probability 0 (P-22)."""
    tokens, probabilities = ids[:top_n], p[:top_n].astype(np.float32)
    missing = min(top_n, width) - len(tokens)
    if missing > 0:
        spare = np.setdiff1d(np.arange(min(width, top_n + len(tokens)), dtype=np.int64), tokens)[:missing]
        tokens = np.concatenate([tokens, spare])
        probabilities = np.concatenate([probabilities, np.zeros(len(spare), dtype=np.float32)])
    return tokens, probabilities


def _why_empty(logits: Logits, constraint: Constraint) -> str:
    if np.isnan(logits).any():
        return "the logits hold NaN: the model's weights or its input are broken"
    parts = [
        f"{len(constraint.blocked)} blocked tokens",
        "no filter" if constraint.mask is None else "a filter mask",
        "no healing prefix"
        if constraint.prefix is None
        else f"{len(constraint.prefix)} tokens that fit the healing prefix",
    ]
    return f"no token is left to sample: token_bias, {', '.join(parts)} together exclude the whole vocabulary"
