"""One call a step: every job's next token from its row of logits. The only door between the engine and the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from exl_generate.interrupts import contained
from exl_generate.sampling.sampler import UNCONSTRAINED, Constraint, RequestSampler, Sample, sample_rows
from exl_kernels.sampling import Failure, Following, Row, Sampled

__all__ = ["Draw", "sample_batch"]


@dataclass(slots=True)
class Draw:
    """What one job asks of the sampler: `logits` and `negative` float32 [Vp] on any device, the rest as in
    `RequestSampler.sample`."""

    sampler: RequestSampler
    logits: torch.Tensor
    context: NDArray[np.int64]
    position: int
    constraint: Constraint = UNCONSTRAINED
    negative: torch.Tensor | None = None
    attempt: int = 0
    top_n: int = 0

    def row(self) -> Row:
        """As the kernels take it."""
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
        """The sample that the kernels made of `row`, or what went wrong with it."""
        if isinstance(row, Exception):
            return row
        if isinstance(outcome, Exception):
            return outcome
        try:
            return self.sampler.take(row, outcome, self.position)
        except BaseException as error:
            return contained(error)


def sample_batch(draws: Sequence[Draw], following: Following | None = None) -> list[Sample | Exception]:
    """A sample for each draw, or what went wrong with it, by one native call. A sample depends on its own draw
    alone; if the call fails, rows are tried one by one, so that only those that fail by themselves do.

    `following` is queued behind them on their GPU, before anybody waits for them, if all draws are sampled there."""
    if not draws:
        return []
    rows = [_prepared(draw) for draw in draws]
    good = [row for row in rows if not isinstance(row, Exception)]
    outcomes: Sequence[Sampled | Failure | Exception]
    try:
        outcomes = sample_rows(good, following if len(good) == len(rows) else None) if good else []
    except Exception:
        outcomes = [_alone(row) for row in good]
        if following is not None:
            following.withdraw()
    left = iter(outcomes)
    samples = [
        draw.take(row, row if isinstance(row, Exception) else next(left)) for draw, row in zip(draws, rows, strict=True)
    ]
    drawn = [sample for sample in samples if isinstance(sample, Sample)]
    # One tensor for all is cheaper than one for each: these are what most results show.
    ids = torch.tensor([sample.token for sample in drawn], dtype=torch.int64).view(-1, 1, 1)
    for sample, own in zip(drawn, ids.unbind(0), strict=True):
        sample.ids = own
    return samples


def _prepared(draw: Draw) -> Row | Exception:
    try:
        return draw.row()
    except BaseException as error:
        return contained(error)


def _alone(row: Row) -> Sampled | Failure | Exception:
    try:
        return sample_rows([row])[0]
    except Exception as error:
        return error
