"""Assign the outputs of a model's modules to devices, before the modules are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...layers import (
    Attention,
    FeedForward,
    GatedMLP,
    Head,
    Intervention,
    Linear,
    Module,
    MoE,
    ParallelDecoder,
    PlainMLP,
)
from .context import TensorParallel

__all__ = ["shard_modules", "unshard_modules"]


def shard_modules(modules: Sequence[Module], context: TensorParallel) -> None:
    """Shard q, k and v at key/value heads, and every other matrix by blocks of output features.

    Each expert is whole on one device; routers, norms and the embedding are on the first device.
    """
    for module in _inner(modules):
        if isinstance(module, Attention):
            _shard_attention(module, context)
        if isinstance(module, ParallelDecoder):
            _shard_feed_forward(module.mlp, context)
        elif isinstance(module, FeedForward):
            _shard_feed_forward(module, context)
        elif isinstance(module, Head):
            _shard_linear(module.linear, context)


def unshard_modules(modules: Sequence[Module]) -> None:
    """Undo `shard_modules` after an unload."""
    for module in _inner(modules):
        for linear in module.submodules():
            linear.shards = linear.place = None


def _inner(modules: Sequence[Module]) -> Iterator[Module]:
    for module in modules:
        while isinstance(module, Intervention):
            module = module.inner
        yield module


def _shard_attention(attention: Attention, context: TensorParallel) -> None:
    dim, groups = attention.head_dim, attention.num_attention_heads // attention.num_key_value_heads
    for linear, width in ((attention.q_proj, groups * dim), (attention.k_proj, dim), (attention.v_proj, dim)):
        linear.shards = (context, tuple((shard, begin * width, end * width) for shard, begin, end in context.heads))
    _shard_linear(attention.o_proj, context)


def _shard_feed_forward(module: FeedForward, context: TensorParallel) -> None:
    if isinstance(module, MoE):
        shards = context.shares.experts(len(module.experts))
        for expert, shard in zip(module.experts, shards, strict=True):
            for linear in expert:
                linear.place = context.device(shard)
        if module.shared is not None:
            _shard_feed_forward(module.shared, context)
    elif isinstance(module, (GatedMLP, PlainMLP)):
        for linear in module.submodules():
            _shard_linear(linear, context)


def _shard_linear(linear: Linear, context: TensorParallel) -> None:
    linear.shards = (context, context.shares.features(linear.out_features))
