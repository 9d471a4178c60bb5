"""Assign the outputs of a model's modules to devices, before the modules are loaded."""

from __future__ import annotations

from collections.abc import Sequence

from ...layers import Attention, DenseMLP, Linear, Module, MoE
from ...layers.attention import WHOLE_HEADS
from ...layers.mlp import WHOLE_FEATURES
from ...layers.moe import WHOLE_EXPERTS
from .context import TensorParallel
from .feed_forward import ShardedExperts, ShardedFeatures
from .heads import ShardedHeads
from .matrix import OutputCut, WholeElsewhere
from .shares import Bounds, Shares
from .sums import FeatureCut, MlpQuarters

__all__ = ["output_bounds", "shard_modules", "unshard_modules"]


def shard_modules(modules: Sequence[Module], context: TensorParallel) -> None:
    """Divide the matrices as `LinearSpec.division` says.

    Those of attention are cut at key/value heads, others by blocks of output features. With `Shares.sums` the last
    matrix of an MLP is cut at quarters of its K, and those before it by the same features. Each expert is whole on one
    device; routers, norms and the embedding are on the home device. The modules get what runs their parts.
    """
    for linear, bounds in output_bounds(modules, context.shares, context.heads).items():
        linear.cut = OutputCut(context, bounds)
    for module in modules if context.shares.sums else ():
        mlp = [linear for linear in module.submodules() if linear.spec.division == "mlp"]
        for last in (linear for linear in mlp if linear.spec.role == "down"):  # one, if the module has an MLP
            quarters = MlpQuarters(context, last.spec, last.options)
            for linear in mlp:
                linear.cut = quarters if linear is last else FeatureCut(quarters)
    for layer in _layers(modules):
        if isinstance(layer, Attention):
            layer.sharding = ShardedHeads(context)
        elif isinstance(layer, DenseMLP):
            layer.sharding = ShardedFeatures()
        else:
            _shard_experts(layer, context)


def output_bounds(modules: Sequence[Module], shares: Shares, heads: Bounds) -> dict[Linear, Bounds]:
    """Return the outputs of each device, of every matrix that is cut by outputs.

    Args:
        modules: the modules, loaded or not.
        shares: the share of each device.
        heads: the key/value heads of each device.
    """
    found: dict[Linear, Bounds] = {}
    count = max(end for _, _, end in heads)
    for linear in (linear for module in modules for linear in module.submodules()):
        division = linear.spec.division
        if division == "heads":
            width = linear.out_features // count
            found[linear] = tuple((shard, begin * width, end * width) for shard, begin, end in heads)
        elif division == "outputs" or (division == "mlp" and not shares.sums):
            found[linear] = shares.features(linear.out_features)
    return found


def unshard_modules(modules: Sequence[Module]) -> None:
    """Undo `shard_modules` after an unload."""
    for layer in _layers(modules):
        if isinstance(layer, Attention):
            layer.sharding = WHOLE_HEADS
        elif isinstance(layer, DenseMLP):
            layer.sharding = WHOLE_FEATURES
        else:
            layer.sharding = WHOLE_EXPERTS
    for linear in (linear for module in modules for linear in module.submodules()):
        linear.cut = linear.place = None


def _layers(modules: Sequence[Module]) -> list[Attention | DenseMLP | MoE]:
    """Return the modules that may have parts on several devices, also those that another module holds."""
    found: dict[int, Module] = {}
    left = list(modules)
    while left:
        module = left.pop()
        if id(module) not in found:
            found[id(module)] = module
            left += [part for part in vars(module).values() if isinstance(part, Module)]
    return [module for module in found.values() if isinstance(module, Attention | DenseMLP | MoE)]


def _shard_experts(module: MoE, context: TensorParallel) -> None:
    shards = context.shares.experts(len(module.experts))
    module.sharding = WHOLE_EXPERTS if context.exchange.whole else ShardedExperts(context, shards)
    for expert, shard in zip(module.experts, shards, strict=True):
        for linear in expert:
            linear.place = context.device(shard)
            linear.cut = None if context.is_local(shard) else WholeElsewhere(context)
