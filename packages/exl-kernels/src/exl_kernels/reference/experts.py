"""Twins of `exl_kernels.moe.cuda`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .activation import gated_activation

__all__ = ["choose", "choose_sparse", "expert_sum"]


def choose(logits: Tensor, chosen: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Choose the likeliest experts of router logits [T, experts] by softmax; ties go to the lower number.

    Returns weights and expert numbers, both [T, chosen].
    """
    probabilities = logits.softmax(-1)
    weights, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :chosen], ids[:, :chosen]
    return weights / weights.sum(-1, keepdim=True) if normalize else weights, ids


def choose_sparse(logits: Tensor, chosen: int, jitter: float) -> tuple[Tensor, Tensor]:
    """Choose as `choose`, with sparse weights.

    Each next expert is weighted by a softmax over those within a relative distance of 2 * jitter.
    """
    left, weights, ids = logits.clone(), [], []
    for _ in range(chosen):
        highest, index = left.max(-1, keepdim=True)
        far = (highest - logits) / logits.abs().maximum(highest) > 2 * jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, index))
        ids.append(index)
        left = left.scatter(-1, index, float("-inf"))
    return torch.cat(weights, -1), torch.cat(ids, -1)


def expert_sum(
    h: Tensor, weights: Tensor, ids: Tensor, experts: Sequence[tuple[Tensor, Tensor, Tensor]], activation: str
) -> Tensor:
    """Return the sum over c of weights[:, c] * expert ids[:, c] of h [T, hidden].

    `experts` are (gate, up, down), each [in, out].
    """
    out = torch.zeros_like(h)
    for row in range(h.shape[0]):
        for weight, number in zip(weights[row], ids[row].tolist(), strict=True):
            gate, up, down = experts[number]
            out[row] += weight * (gated_activation(h[row] @ gate, h[row] @ up, activation) @ down)
    return out
