"""MLPs and mixtures whose matrices are on several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ...layers.mlp import activated
from .matrix import Part, SplitMatrix, over_parts
from .sums import SumMatrix

if TYPE_CHECKING:
    from ...contracts import Adapter
    from ...layers import DenseMLP, MoE
    from .context import TensorParallel

__all__ = ["ShardedExperts", "ShardedFeatures"]


class ShardedFeatures:
    """The features between the matrices of an MLP, which stay on the devices that have them (`MlpSharding`)."""

    def inner(self, mlp: DenseMLP, h: Tensor, loras: Sequence[Adapter], *, invariant: bool | None) -> Tensor:
        """Compute `mlp.inner` of these arguments. Adapters are added on the home device."""
        parts = [m for a in mlp.first if isinstance(m := a.matrix, SplitMatrix) and not a.adapted(loras)]
        if len(parts) < len(mlp.first):
            first = [linear.forward(h, loras, invariant=invariant) for linear in mlp.first]
            return mlp.down_proj.forward(activated(first, mlp.activation), loras, invariant=invariant)

        def features(x: Tensor, own: Sequence[Part]) -> Tensor:
            return activated([part.matmul(x, invariant=invariant) for part in own], mlp.activation)

        last = mlp.down_proj
        if isinstance(last.matrix, SumMatrix) and not last.adapted(loras):
            return last.matrix.after(h, parts, features)
        return last.forward(over_parts(h, parts, features), loras, invariant=invariant)


class ShardedExperts:
    """The experts of a mixture on the devices of several processes (`ExpertSharding`).

    All processes exchange the outputs of every expert, also one that has every expert.
    """

    apart = True

    def __init__(self, context: TensorParallel, shards: Sequence[int]) -> None:
        """shards: the device number of each expert."""
        self.context, self.shards = context, shards

    def outputs(
        self,
        mixture: MoE,
        h: Tensor,
        places: Sequence[Tensor],
        out: Tensor,
        loras: Sequence[Adapter],
        *,
        invariant: bool | None,
    ) -> None:
        """Fill `out`; each process runs its own experts."""
        chosen = [found for found in zip(mixture.experts, self.shards, places, strict=True) if len(found[2])]
        parts = [(shard, (len(rows), out.shape[-1])) for _, shard, rows in chosen]
        made = [
            mixture.run_expert(expert, h[rows // mixture.chosen], loras, invariant=invariant).float()
            for expert, shard, rows in chosen
            if self.context.is_local(shard)
        ]
        for (_, _, rows), values in zip(chosen, self.context.exchange.collect(parts, made, out), strict=True):
            out[rows] = values
