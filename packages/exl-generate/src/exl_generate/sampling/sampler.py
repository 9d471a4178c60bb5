"""The sampler of one request: from its settings to the rows of `exl_kernels.sampling`, and from tokens to its state.

The order of steps: 1 CFG mix - 2 penalties - 3 blocked tokens - 4 bias - 5 DRY - 6 filter mask - 7 healing prefix - 8
ids beyond the vocabulary - 9 greedy switch - 10 softmax with temperature - 11 top-k - 12 top-p - 13 top-a - 14 min-p -
15 TFS - 16 typical - 17 mirostat - 18 late or dynamic temperature - 19 XTC - 20 order - 21 report - 22 skewed draw - 23
mirostat update. All but the last run in one native call, which may hold the rows of many requests.
`exl_generate.sampling.transforms` defines them in float64.

A token depends on (logits, settings, seed, position) only: not on the batch, the machine, or the requested reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from exl_generate.errors import NoCandidatesError, NonFiniteLogitsError
from exl_generate.sampling.plan import plan_of
from exl_generate.sampling.rng import RequestRandom
from exl_generate.sampling.settings import Settings
from exl_generate.sampling.transforms import mirostat_update, skew
from exl_generate.sampling.vocabulary import Vocabulary
from exl_kernels import sampling as kernels

__all__ = ["Constraint", "RequestSampler", "Sample", "none_left", "report", "skewed"]

Ids = NDArray[np.int64]
Probabilities = NDArray[np.float64]
Logits = NDArray[np.float32] | torch.Tensor


@dataclass(frozen=True, slots=True)
class Constraint:
    """Constraint on one token besides the settings. All fields are optional."""

    #: packed int32 words, 1 = allowed, bit i & 31 of word i >> 5; ids beyond the words are not allowed
    mask: NDArray[np.int32] | None = None
    #: never chosen (alternatives that led into a banned string)
    blocked: tuple[int, ...] = ()
    #: chosen only if nothing else is left (stop tokens while `min_new_tokens` are missing)
    discouraged: tuple[int, ...] = ()
    #: only these (token healing)
    prefix: Ids | None = None


UNCONSTRAINED = Constraint()


@dataclass(slots=True)
class Sample:
    """A chosen token, its final probability, and the `top_n` most probable candidates padded with probability 0."""

    token: int
    probability: float
    top_tokens: Ids
    top_probabilities: NDArray[np.float32]
    #: the token as int64 [1, 1], if that tensor exists already
    ids: torch.Tensor | None = None


_NO_IDS = np.zeros(0, dtype=np.int64)
_NO_PROBABILITIES = np.zeros(0, dtype=np.float32)


class RequestSampler:
    """The sampler of one request: its settings, its random numbers, its mirostat state.

    `refresh` reads `settings` again where they have changed.
    """

    def __init__(self, settings: Settings, vocabulary: Vocabulary, seed: int | None = None) -> None:
        self._source = settings
        self._vocabulary = vocabulary
        self.random = RequestRandom(seed)
        self._compile()
        #: mu before position i; a rewind simply samples an earlier position again
        self._mu = [2.0 * self.settings.mirostat_tau]

    @property
    def reads_context(self) -> bool:
        """Whether a token depends on the ids before it other than through the logits."""
        return self._reads_context

    def refresh(self) -> None:
        """Apply changes of settings that running jobs follow. Call it between tokens.

        Raises `RequestError` for invalid values; the settings in force then stay.
        """
        if self._source.revision() == self._revision:
            return
        before = self.settings
        self._compile()
        if self.settings.mirostat and not before.mirostat:
            self._mu = [2.0 * self.settings.mirostat_tau]

    def _compile(self) -> None:
        revision = self._source.revision()  # first: a change that comes in meanwhile is found by the next refresh
        settings = self._source.resolve(self._vocabulary.width).frozen()
        self._plan = plan_of(settings, self._vocabulary)
        self._reads_context = settings.dry_multiplier > 0 or settings.has_penalties
        self._revision = revision
        #: the settings in force
        self.settings = settings

    def row(
        self,
        logits: Logits,
        context: Ids,
        position: int,
        constraint: Constraint = UNCONSTRAINED,
        *,
        negative: Logits | None = None,
        attempt: int = 0,
        top_n: int = 0,
    ) -> kernels.Row:
        """Return the kernels' input for token `position` (0 = first of the request).

        Args:
            logits: float32 [Vp]; not changed.
            context: All ids so far, prompt included.
            position: Number of tokens sampled before this one.
            constraint: Constraint besides the settings.
            negative: Logits of the negative prompt (CFG).
            attempt: Number of rewinds to this position.
            top_n: Number of candidates to report.
        """
        s = self.settings
        return kernels.Row(
            self._plan,
            _tensor(logits),
            uniform=0.0 if self._plan.greedy else skewed(self.random.uniform(position, attempt), s.skew),
            negative=None if negative is None or s.cfg_scale is None else _tensor(negative),
            context=np.ascontiguousarray(context) if self._reads_context else None,
            mirostat=self._least_share(position) if s.mirostat else 0.0,
            mask=constraint.mask,
            banned=constraint.blocked,
            discouraged=constraint.discouraged,
            only=constraint.prefix,
            top_n=min(top_n, logits.shape[-1]),
        )

    def take(self, row: kernels.Row, outcome: kernels.Sampled | kernels.Failure, position: int) -> Sample:
        """Return the sample that the kernels made of `row`, and keep the state that later positions depend on.

        Raises `NoCandidatesError` if nothing could be chosen.
        """
        if isinstance(outcome, kernels.Failure):
            raise none_left(row, outcome)
        if self.settings.mirostat:
            self._learn(position, outcome.probability)
        if not row.top_n:
            return Sample(outcome.token, outcome.probability, _NO_IDS, _NO_PROBABILITIES)
        top_tokens, top_p = report(outcome.top_tokens, outcome.top_probabilities, row.top_n, row.logits.shape[0])
        return Sample(outcome.token, outcome.probability, top_tokens, top_p)

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
        """Choose token `position`: calls `row`, the kernels and `take` for one row."""
        row = self.row(logits, context, position, constraint, negative=negative, attempt=attempt, top_n=top_n)
        return self.take(row, kernels.sample([row])[0], position)

    def distribution(
        self, logits: Logits, context: Ids, position: int = 0, constraint: Constraint = UNCONSTRAINED
    ) -> tuple[Ids, Probabilities]:
        """Return the final candidates by ascending id and their probabilities, without drawing."""
        row = self.row(logits, context, position, constraint)
        found = kernels.distribution(row)
        if found is None:
            failure = kernels.sample([row])[0]
            assert isinstance(failure, kernels.Failure)
            raise none_left(row, failure)
        ids, weights = found
        return ids, weights / float(weights.sum())

    def _least_share(self, position: int) -> float:
        """Step 17: tokens whose surprise is at most mu bits have at least this probability."""
        mu = self._mu[min(position, len(self._mu) - 1)]
        return float(2.0 ** min(-mu, 60.0))

    def _learn(self, position: int, chosen: float) -> None:
        """Step 23. Keyed by position, so that sampling a position again forgets what came after it."""
        self._mu += [self._mu[-1]] * (position + 1 - len(self._mu))  # mirostat was off at the positions before
        del self._mu[position + 1 :]
        mu = mirostat_update(self._mu[-1], chosen, self.settings.mirostat_tau, self.settings.mirostat_eta)
        self._mu.append(mu)


def skewed(uniform: float, amount: float) -> float:
    """Return step 22's number, below 1: r^(exp(-skew)) of a number just below 1 rounds to 1."""
    return uniform if amount == 0 else min(skew(uniform, amount), 1.0 - 2.0**-53)


def _tensor(logits: Logits) -> torch.Tensor:
    return logits if isinstance(logits, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(logits))


def report(ids: Sequence[int], p: Sequence[float], top_n: int, width: int) -> tuple[Ids, NDArray[np.float32]]:
    """Return the `top_n` first candidates; missing ones become the lowest unused ids with probability 0."""
    tokens, probabilities = np.array(ids, dtype=np.int64), np.array(p, dtype=np.float32)
    missing = min(top_n, width) - len(tokens)
    if missing > 0:
        spare = np.setdiff1d(np.arange(min(width, top_n + len(tokens)), dtype=np.int64), tokens)[:missing]
        tokens = np.concatenate([tokens, spare])
        probabilities = np.concatenate([probabilities, np.zeros(len(spare), dtype=np.float32)])
    return tokens, probabilities


def none_left(row: kernels.Row, failure: kernels.Failure) -> NoCandidatesError:
    """Return the error that says why no token could be chosen."""
    if failure.not_finite:
        return NonFiniteLogitsError("the logits hold NaN or infinity: the model's weights or its input are broken")
    parts = [
        f"{len(row.banned)} blocked tokens",
        "no filter" if row.mask is None else "a filter mask",
        "no healing prefix" if row.only is None else f"{len(row.only)} tokens that fit the healing prefix",
    ]
    return NoCandidatesError(
        f"no token is left to sample: token_bias, {', '.join(parts)} together exclude the whole vocabulary"
    )
