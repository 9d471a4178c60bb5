"""Self-attention with its norms and residual: the only module that uses the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..architectures.windows import LayerRope
from ..execution.batch import Step
from ..loading.checkpoint import TensorSource
from .description import AttentionDescription
from .heads import Heads
from .linear import Linear, store_alike
from .mlp import FeedForward
from .norm import Norm
from .sublayer import SubLayer

__all__ = ["WHOLE_HEADS", "Attention", "AttentionSharding", "ParallelDecoder"]


class AttentionSharding(Protocol):
    """Runs attention between its norms: all heads here, or those of several devices."""

    def attend(self, attention: Attention, h: Tensor, step: Step) -> Tensor:
        """Compute `attention.attend(h, step)`."""
        ...


class WholeHeads:
    """All heads on the device of the hidden state."""

    def attend(self, attention: Attention, h: Tensor, step: Step) -> Tensor:
        """See `AttentionSharding`."""
        heads = attention.heads(step)
        first = [linear.forward(h, step.loras, invariant=step.invariant) for linear in heads.about.first]
        mixed = heads.attend(*heads.shaped(first)).view(h.shape[0], -1)
        return attention.o_proj.forward(mixed, step.loras, invariant=step.invariant)


WHOLE_HEADS = WholeHeads()


class Attention(SubLayer):
    """x + post(o_proj(attention(rope(q), rope(k), v))) with q, k, v from norm(x).

    Args:
        key: name of the module in the files.
        layer_idx: number of the layer.
        norm: norm of the input, or None.
        projections: q, k, v and o.
        head_dim: elements of a head.
        scale: factor of q.k before the softmax.
        window: sliding window in tokens; 0 is off.
        softcap: limit of the logits; 0 is off.
        interleaved: rotate GPT-J pairs.
        rope: the RoPE table.
        clip: if > 0, q, k and v are clamped to +- clip.
        post: norm of the output, before the residual sum.
        q_norm: norm before RoPE, over each head, or over the whole row of heads if the weight is as wide as the row.
        k_norm: like q_norm.

    Attributes:
        sharding: runs `attend`. `execution/sharded/cutting.py` gives another one to a model that is sharded.
    """

    name = "Attention"
    sharding: AttentionSharding = WHOLE_HEADS

    layer_idx: int

    def __init__(
        self,
        key: str,
        layer_idx: int,
        norm: Norm | None,
        projections: tuple[Linear, Linear, Linear, Linear],
        *,
        head_dim: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        interleaved: bool = False,
        rope: LayerRope = "main",
        clip: float = 0.0,
        post: Norm | None = None,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> None:
        self.key = key
        self.layer_idx = layer_idx
        self.norm = norm
        self.post, self.q_norm, self.k_norm = post, q_norm, k_norm
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = projections
        store_alike(projections[:3])
        self.head_dim = head_dim
        self.num_attention_heads = self.q_proj.out_features // head_dim
        self.num_key_value_heads = self.k_proj.out_features // head_dim
        self.scale = scale
        self.window = window
        self.softcap = softcap
        self.interleaved = interleaved
        self.rope: LayerRope = rope
        self.clip = clip

    def describe(self) -> AttentionDescription:
        """Return the description of the half."""
        return AttentionDescription(
            module=self,
            of=Attention,
            norm=self.norm,
            post=self.post,
            float_residual=self.float_residual,
            first=(self.q_proj, self.k_proj, self.v_proj),
            last=self.o_proj,
            layer_idx=self.layer_idx,
            head_dim=self.head_dim,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            rope=self.rope,
            interleaved=self.interleaved,
            clip=self.clip,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
        )

    def submodules(self) -> Iterator[Linear]:
        """Yield q, k, v and o."""
        yield from (self.q_proj, self.k_proj, self.v_proj, self.o_proj)

    def _parts(self) -> Iterator[Norm | Linear]:
        yield from (norm for norm in (self.norm, self.post, self.q_norm, self.k_norm) if norm is not None)
        yield from (self.q_proj, self.k_proj, self.v_proj, self.o_proj)

    @property
    def loaded(self) -> bool:
        """Whether the weights are loaded."""
        return self.o_proj.matrix is not None

    def forward_by_operator(self, x: Tensor, step: Step) -> Tensor:
        """See `SubLayer.forward_by_operator`."""
        return self.added(x, self.attend(self.normed(x), step))

    def attend(self, h: Tensor, step: Step) -> Tensor:
        """Return o_proj of the attention over a normalised hidden state h [T, hidden], without norms and residual."""
        return self.sharding.attend(self, h, step)

    def heads(self, step: Step) -> Heads:
        """Return the operators between the projections."""
        return Heads(Attention.describe(self), step)


class ParallelDecoder(Attention):
    """x + attention(h) + mlp(h) with h = norm(x): one module for the whole layer."""

    name = "ParallelDecoder"

    def __init__(self, attention: Attention, mlp: FeedForward) -> None:
        """Take over the parts of `attention`; `mlp` has no norms."""
        self.__dict__.update(attention.__dict__)
        self.mlp = mlp

    def describe(self) -> AttentionDescription:
        """Return the description of the layer."""
        return replace(super().describe(), of=ParallelDecoder, mlp=self.mlp.describe())

    def submodules(self) -> Iterator[Linear]:
        """Yield the linears of attention and MLP."""
        yield from super().submodules()
        yield from self.mlp.submodules()

    def load(self, source: TensorSource, device: torch.device) -> None:
        """Load attention and MLP; an error leaves both unloaded."""
        super().load(source, device)
        try:
            self.mlp.load(source, device)
        except BaseException:
            self.unload()
            raise

    def unload(self) -> None:
        """Drop the weights."""
        super().unload()
        self.mlp.unload()

    def weight_bytes(self) -> int:
        """Return the bytes of loaded weights."""
        return super().weight_bytes() + self.mlp.weight_bytes()

    def forward_by_operator(self, x: Tensor, step: Step) -> Tensor:
        """Run the layer operator by operator."""
        h = self.normed(x)
        return x.add_(self.attend(h, step)).add_(self.mlp.inner(h, step.loras, invariant=step.invariant))
