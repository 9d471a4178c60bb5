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
from .matrix import OutputCut, WholeElsewhere
from .sums import FeatureCut, MlpQuarters

__all__ = ["shard_modules", "unshard_modules"]


def shard_modules(modules: Sequence[Module], context: TensorParallel) -> None:
    """Shard q, k and v at key/value heads, and every other matrix by blocks of output features.

    With `Shares.sums` the last matrix of an MLP is cut at quarters of its K, and those before it by the same features.
    Each expert is whole on one device; routers, norms and the embedding are on the home device.
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
        if isinstance(module, MoE):
            module.sharding = None
        for linear in module.submodules():
            linear.cut = linear.place = None


def _inner(modules: Sequence[Module]) -> Iterator[Module]:
    for module in modules:
        while isinstance(module, Intervention):
            module = module.inner
        yield module


def _shard_attention(attention: Attention, context: TensorParallel) -> None:
    dim, groups = attention.head_dim, attention.num_attention_heads // attention.num_key_value_heads
    for linear, width in ((attention.q_proj, groups * dim), (attention.k_proj, dim), (attention.v_proj, dim)):
        bounds = tuple((shard, begin * width, end * width) for shard, begin, end in context.heads)
        linear.cut = OutputCut(context, bounds)
    _shard_linear(attention.o_proj, context)


def _shard_feed_forward(module: FeedForward, context: TensorParallel) -> None:
    if isinstance(module, MoE):
        shards = context.shares.experts(len(module.experts))
        module.sharding = (context, shards)
        for expert, shard in zip(module.experts, shards, strict=True):
            for linear in expert:
                linear.place = context.device(shard)
                linear.cut = None if context.is_local(shard) else WholeElsewhere(context)
        if module.shared is not None:
            _shard_feed_forward(module.shared, context)
    elif isinstance(module, (GatedMLP, PlainMLP)) and context.shares.sums:
        last = module.down_proj
        quarters = MlpQuarters(context, last.spec, last.options)
        for linear in module.submodules():
            linear.cut = quarters if linear is last else FeatureCut(quarters)
    elif isinstance(module, (GatedMLP, PlainMLP)):
        for linear in module.submodules():
            _shard_linear(linear, context)


def _shard_linear(linear: Linear, context: TensorParallel) -> None:
    linear.cut = OutputCut(context, context.shares.features(linear.out_features))
