"""Attention whose heads are on several devices."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ...layers.heads import Heads
from ...layers.norm import LayerNorm
from ...transfer import send
from .matrix import SplitMatrix, gathered

if TYPE_CHECKING:
    from ...layers.attention import Attention
    from ...layers.norm import Norm
    from ..batch import Step
    from .context import TensorParallel

__all__ = ["ShardedHeads", "norm_on"]

N = TypeVar("N", bound="Norm")

Norms = list[tuple["Norm | None", "Norm | None"]]
"""Norms of q and k of a layer, of each device with heads."""


class ShardedHeads:
    """The heads of one layer (`AttentionSharding`).

    Each device projects, rotates, stores and reads its own heads; o_proj sees all of them.

    Attributes:
        heads: device and first and last key/value head of each device of this process that has any.
    """

    def __init__(self, context: TensorParallel) -> None:
        self.context = context
        self.heads = context.local_heads
        self._norms: tuple[list[Tensor | None], Norms] | None = None
        """The weights of the layer's norms, and the norms made of them."""

    def attend(self, attention: Attention, h: Tensor, step: Step) -> Tensor:
        """Compute `Attention.attend`; h [T, hidden] and the result of o_proj are on the first device."""
        a, context, heads = attention, self.context, attention.heads(step)
        width = heads.about.first[0].out_features // a.num_key_value_heads  # of the queries of a key/value head
        projected = self._projected(a, heads, h)
        made = [
            Heads(heads.about, there).attend(*parts).view(h.shape[0], -1)
            for there, parts in zip(step.shards, projected, strict=True)
        ]
        whole = torch.empty((h.shape[0], a.num_key_value_heads * width), dtype=h.dtype, device=h.device)
        columns = [(shard, slice(begin * width, end * width)) for shard, begin, end in context.heads]
        mixed = gathered(context.exchange, columns, made, whole)
        return a.o_proj.forward(mixed, step.loras, invariant=step.invariant)

    def _projected(self, a: Attention, heads: Heads, h: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return q, k and v [T, heads, head_dim] of every device, on it."""
        about, step = heads.about, heads.step
        if any(linear.adapted(step.loras) for linear in about.first) or self._whole_rows(a):
            return self._from_home(a, heads, h)
        inputs = self.context.spread(h)
        cut = [linear.matrix.local for linear in about.first if isinstance(linear.matrix, SplitMatrix)]
        found = []
        for parts, there, (q_norm, k_norm) in zip(zip(*cut, strict=True), step.shards, self._norms_of(a), strict=True):
            own = Heads(replace(about, q_norm=q_norm, k_norm=k_norm), there)
            found.append(own.shaped([part.matmul(inputs(part.shard), invariant=step.invariant) for part in parts]))
        return found

    def _norms_of(self, a: Attention) -> Norms:
        """Return the norms of q and k of every device, on it; kept until the module has other weights."""
        weights = [None if norm is None else norm.weight for norm in (a.q_norm, a.k_norm)]
        kept = self._norms
        if kept is None or any(old is not new for old, new in zip(kept[0], weights, strict=True)):
            norms = [
                (self._norm(a.q_norm, shard, begin, end, a), self._norm(a.k_norm, shard, begin, end, None))
                for shard, begin, end in self.heads
            ]
            kept = self._norms = (weights, norms)
        return kept[1]

    def _from_home(self, a: Attention, heads: Heads, h: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return `_projected` by way of the first device, where adapters and norms over all heads are applied."""
        step = heads.step
        projected = [linear.forward(h, step.loras, invariant=step.invariant) for linear in heads.about.first]
        q, k, v = heads.shaped(projected)
        groups = a.num_attention_heads // a.num_key_value_heads
        return [
            (
                send(q[:, begin * groups : end * groups].contiguous(), self.context.device(shard)),
                send(k[:, begin:end].contiguous(), self.context.device(shard)),
                send(v[:, begin:end].contiguous(), self.context.device(shard)),
            )
            for shard, begin, end in self.heads
        ]

    @staticmethod
    def _whole_rows(a: Attention) -> bool:
        """Return whether a norm runs over the whole row of heads, which no device has."""
        norms = ((a.q_norm, a.q_proj), (a.k_norm, a.k_proj))
        return any(norm is not None and norm.shapes[0] == (linear.out_features,) for norm, linear in norms)

    def _norm(self, norm: Norm | None, shard: int, begin: int, end: int, q: Attention | None) -> Norm | None:
        """Return the norm's weights of those heads, on their device."""
        if norm is None or norm.weight is None:
            return None
        groups = 1 if q is None else q.num_attention_heads // q.num_key_value_heads
        weight = norm.weight if norm.weight.dim() == 1 else norm.weight[begin * groups : end * groups]
        return norm_on(norm, self.context.device(shard), weight)


def norm_on(norm: N, device: torch.device, weight: Tensor) -> N:
    """Return a norm of other weights, on a device, for passes of every mode."""
    mine = copy.copy(norm)
    with torch.inference_mode(False):
        mine.weight = send(weight, device).contiguous()
        if isinstance(mine, LayerNorm) and mine.bias is not None:
            mine.bias = send(mine.bias, device).contiguous()
    return mine
