"""Post-sampling hooks: callables that see each sampled token and may replace it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["ExLlamaV2PostSamplingHook", "ExLlamaV2PostSamplingResult"]


@dataclass
class ExLlamaV2PostSamplingResult:
    """The argument of a post-sampling hook.

    The sampler reads back `sampled_token` and `feed_filters` (False = filters do not receive the token); other changes
    have no effect. `sampled_token` int64 [1, 1], `sampled_prob` float32 [1, 1], `logits` float32 [1, 1, Vp] as the
    model made them; `candidate_tokens` and `candidate_probs` [1, 1, K] only if top tokens were requested.
    """

    sampled_token: torch.Tensor | None = None
    sampled_prob: torch.Tensor | None = None
    candidate_tokens: torch.Tensor | None = None
    candidate_probs: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    feed_filters: bool = True


ExLlamaV2PostSamplingHook = Callable[[ExLlamaV2PostSamplingResult], None]
