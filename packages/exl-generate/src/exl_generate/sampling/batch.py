"""Sample one step: the next token of every job from its row of logits, in one native call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from exl_generate.interrupts import as_job_error
from exl_generate.sampling.sampler import UNCONSTRAINED, Constraint, RequestSampler, Sample
from exl_kernels import sampling as kernels
from exl_kernels.sampling import Failure, Row, Sampled, TokenTarget

__all__ = ["Draw", "LaunchedDraws", "launch_draws", "sample_draws"]


@dataclass(slots=True, kw_only=True)
class Draw:
    """The sampler's input for one job.

    `logits` and `negative` are float32 [Vp] on any device; the other fields are those of `RequestSampler.sample`.
    """

    sampler: RequestSampler
    logits: torch.Tensor
    context: NDArray[np.int64]
    position: int
    constraint: Constraint = UNCONSTRAINED
    negative: torch.Tensor | None = None
    attempt: int = 0
    top_n: int = 0

    def row(self) -> Row:
        """Return the kernels' input."""
        return self.sampler.row(
            self.logits,
            self.context,
            self.position,
            self.constraint,
            negative=self.negative,
            attempt=self.attempt,
            top_n=self.top_n,
        )

    def take(self, row: Row | Exception, outcome: Sampled | Failure | Exception) -> Sample | Exception:
        """Return the sample that the kernels made of `row`, or its error."""
        if isinstance(row, Exception):
            return row
        if isinstance(outcome, Exception):
            return outcome
        try:
            return self.sampler.take(row, outcome, self.position)
        except BaseException as error:
            return as_job_error(error)


class LaunchedDraws:
    """The launched sampling of the draws of one call (`launch_draws`), failed ones included; `collect` waits for it."""

    __slots__ = ("_draws", "_good", "_launched", "_outcomes", "_rows")

    def __init__(self, draws: Sequence[Draw], into: TokenTarget | None) -> None:
        self._draws = draws
        self._rows = [_prepared(draw) for draw in draws]
        self._launched: kernels.LaunchedRows | None = None
        self._outcomes: list[Sampled | Failure | Exception] | None = None
        self._good = [row for row in self._rows if not isinstance(row, Exception)]
        if self._good:
            try:
                self._launched = kernels.launch(self._good, into if len(self._good) == len(draws) else None)
            except Exception:
                self._launched = None  # `collect` finds out which rows fail by themselves

    @property
    def written(self) -> bool:
        """Whether the tokens of all draws are written into the next step's inputs; final after `collect`."""
        return self._launched is not None and self._launched.written

    def collect(self) -> None:
        """Wait for the outcomes."""
        if self._outcomes is not None:
            return
        found: Sequence[Sampled | Failure | Exception] | None = None
        if self._launched is not None:
            try:
                found = self._launched.collect()
            except Exception:
                self._launched = None  # its output is not used
        if found is None:
            found = [_alone(row) for row in self._good]
        if len(found) < len(self._rows):
            left = iter(found)
            found = [row if isinstance(row, Exception) else next(left) for row in self._rows]
        self._outcomes = list(found)

    def token(self, place: int) -> int | None:
        """Return the token of the draw at this place, after `collect`; None if the draw failed."""
        assert self._outcomes is not None, "collect first"
        found = self._outcomes[place]
        return found.token if isinstance(found, Sampled) else None

    def samples(self, places: Sequence[int], with_ids: bool = True) -> list[Sample | Exception]:
        """Return the samples, or the errors, of the draws at these places, after `collect`. Call it once for a place.

        `with_ids`: fill in `Sample.ids` of all, which takes time.
        """
        assert self._outcomes is not None, "collect first"
        samples = [self._draws[at].take(self._rows[at], self._outcomes[at]) for at in places]
        if not with_ids:
            return samples
        drawn = [sample for sample in samples if isinstance(sample, Sample)]
        # One tensor for all is cheaper than one for each; most results return it.
        ids = np.array([sample.token for sample in drawn], dtype=np.int64).reshape(-1, 1, 1)
        for sample, own in zip(drawn, torch.from_numpy(ids).unbind(0), strict=True):
            sample.ids = own
        return samples


def launch_draws(draws: Sequence[Draw], into: TokenTarget | None = None) -> LaunchedDraws:
    """Queue a sample for each draw, by one native call.

    A sample depends on its own draw alone. If the call fails, rows are tried one by one, so that only failing rows
    fail. `into` gets the tokens, in the order of their GPU's stream, if all draws are sampled there
    (`LaunchedDraws.written`).
    """
    return LaunchedDraws(draws, into)


def sample_draws(draws: Sequence[Draw]) -> list[Sample | Exception]:
    """Return a sample for each draw, or its error: `launch_draws`, `collect` and `samples` in one call."""
    launched = launch_draws(draws)
    launched.collect()
    return launched.samples(range(len(draws)))


def _prepared(draw: Draw) -> Row | Exception:
    try:
        return draw.row()
    except BaseException as error:
        return as_job_error(error)


def _alone(row: Row) -> Sampled | Failure | Exception:
    try:
        return kernels.sample([row])[0]
    except Exception as error:
        return error
