"""Assign the outputs of a model's modules to devices, before the modules are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...layers import (
    Attention,
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
from .shares import Bounds, Shares
from .sums import FeatureCut, MlpQuarters

__all__ = ["output_bounds", "shard_modules", "unshard_modules"]


def shard_modules(modules: Sequence[Module], context: TensorParallel) -> None:
    """Shard q, k and v at key/value heads, and every other matrix by blocks of output features.

    With `Shares.sums` the last matrix of an MLP is cut at quarters of its K, and those before it by the same features.
    Each expert is whole on one device; routers, norms and the embedding are on the home device.
    """
    for linear, bounds in output_bounds(modules, context.shares, context.heads).items():
        linear.cut = OutputCut(context, bounds)
    for module in _feed_forwards(modules):
        if isinstance(module, MoE):
            _shard_experts(module, context)
        elif context.shares.sums:
            last = module.down_proj
            quarters = MlpQuarters(context, last.spec, last.options)
            for linear in module.submodules():
                linear.cut = quarters if linear is last else FeatureCut(quarters)


def output_bounds(modules: Sequence[Module], shares: Shares, heads: Bounds) -> dict[Linear, Bounds]:
    """Return the outputs of each device, of every matrix that is cut by outputs.

    Args:
        modules: the modules, loaded or not.
        shares: the share of each device.
        heads: the key/value heads of each device.
    """
    found: dict[Linear, Bounds] = {}
    linears: list[Linear] = []
    for module in _inner(modules):
        if isinstance(module, Attention):
            dim, groups = module.head_dim, module.num_attention_heads // module.num_key_value_heads
            for linear, width in ((module.q_proj, groups * dim), (module.k_proj, dim), (module.v_proj, dim)):
                found[linear] = tuple((shard, begin * width, end * width) for shard, begin, end in heads)
            linears.append(module.o_proj)
        elif isinstance(module, Head):
            linears.append(module.linear)
    if not shares.sums:
        linears += [
            linear for mlp in _feed_forwards(modules) if not isinstance(mlp, MoE) for linear in mlp.submodules()
        ]
    return found | {linear: shares.features(linear.out_features) for linear in linears}


def unshard_modules(modules: Sequence[Module]) -> None:
    """Undo `shard_modules` after an unload."""
    for mlp in _feed_forwards(modules):
        if isinstance(mlp, MoE):
            mlp.sharding = None
    for module in _inner(modules):
        for linear in module.submodules():
            linear.cut = linear.place = None


def _inner(modules: Sequence[Module]) -> Iterator[Module]:
    for module in modules:
        while isinstance(module, Intervention):
            module = module.inner
        yield module


def _feed_forwards(modules: Sequence[Module]) -> Iterator[GatedMLP | PlainMLP | MoE]:
    """Yield all MLPs, shared experts too, and mixtures."""
    for module in _inner(modules):
        found = module.mlp if isinstance(module, ParallelDecoder) else module
        if isinstance(found, (GatedMLP, PlainMLP, MoE)):
            yield found
        if isinstance(found, MoE) and isinstance(found.shared, (GatedMLP, PlainMLP)):
            yield found.shared


def _shard_experts(module: MoE, context: TensorParallel) -> None:
    shards = context.shares.experts(len(module.experts))
    module.sharding = (context, shards)
    for expert, shard in zip(module.experts, shards, strict=True):
        for linear in expert:
            linear.place = context.device(shard)
            linear.cut = None if context.is_local(shard) else WholeElsewhere(context)
