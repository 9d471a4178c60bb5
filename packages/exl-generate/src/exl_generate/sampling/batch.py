"""One call a step: every job's next token from its row of logits. The only door between the engine and the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from exl_generate.sampling.sampler import UNCONSTRAINED, Constraint, RequestSampler, Sample
from exl_generate.sampling.transforms import Ids

__all__ = ["Draw", "sample_batch"]


@dataclass(slots=True)
class Draw:
    """What one job asks of the sampler: `logits` and `negative` float32 [Vp] on any device, the rest as in
    `RequestSampler.sample`."""

    sampler: RequestSampler
    logits: torch.Tensor
    context: Ids
    position: int
    constraint: Constraint = UNCONSTRAINED
    negative: torch.Tensor | None = None
    attempt: int = 0
    top_n: int = 0


def sample_batch(draws: Sequence[Draw]) -> list[Sample | Exception]:
    """A sample for each draw, or what went wrong with it. A sample depends on its own draw alone."""
    return [_sample(draw) for draw in draws]


def _sample(draw: Draw) -> Sample | Exception:
    try:
        return draw.sampler.sample(
            draw.logits.cpu().numpy(),
            draw.context,
            draw.position,
            draw.constraint,
            negative=None if draw.negative is None else draw.negative.cpu().numpy(),
            attempt=draw.attempt,
            top_n=draw.top_n,
        )
    except Exception as error:
        return error
