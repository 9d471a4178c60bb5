"""The feed-forward half of a layer with its norms and residual: gated, plain, or (in `moe`) a mixture of experts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from exl_kernels.activation import activation as activate
from exl_kernels.activation import gated_activation

from ..architectures.base import Activation
from ..execution.batch import Step
from .description import MlpDescription
from .linear import Linear, store_alike
from .norm import Norm
from .sublayer import SubLayer

if TYPE_CHECKING:
    from ..contracts import Adapter

__all__ = ["WHOLE_FEATURES", "DenseMLP", "FeedForward", "GatedMLP", "MlpSharding", "PlainMLP", "activated"]


class FeedForward(SubLayer):
    """x + post(inner(norm(x))), where either norm may be absent."""

    layer_idx: int

    def __init__(self, key: str, layer_idx: int, norm: Norm | None, post: Norm | None, activation: Activation) -> None:
        self.key = key
        self.layer_idx = layer_idx
        self.norm = norm
        self.post = post
        self.activation: Activation = activation

    @abstractmethod
    def inner(self, h: Tensor, loras: Sequence[Adapter] = (), *, invariant: bool | None = None) -> Tensor:
        """Compute the sub-layer without norms and residual: [T, hidden] -> a new tensor [T, hidden].

        `invariant` is as for `QuantMatrix.matmul`.
        """

    def _parts(self) -> Iterator[Norm | Linear]:
        yield from (norm for norm in (self.norm, self.post) if norm is not None)
        yield from self.submodules()

    @property
    def loaded(self) -> bool:
        """Whether all matrices are loaded."""
        return all(linear.matrix is not None for linear in self.submodules())

    def forward_by_operator(self, x: Tensor, step: Step) -> Tensor:
        """See `SubLayer.forward_by_operator`."""
        return self.added(x, self.inner(self.normed(x), step.loras, invariant=step.invariant))


def activated(results: Iterable[Tensor], activation: Activation) -> Tensor:
    """Apply an activation to the first result, in its memory, and multiply that by the second one, if there is one."""
    inner, *up = results
    if up:
        return gated_activation(inner, up[0], activation, out=inner)
    return activate(inner, activation, out=inner)


class MlpSharding(Protocol):
    """Runs MLPs between their norms: all features here, or those of several devices."""

    def inner(self, mlp: DenseMLP, h: Tensor, loras: Sequence[Adapter], *, invariant: bool | None) -> Tensor:
        """Compute `mlp.inner` of these arguments."""
        ...


class WholeFeatures:
    """All features on the device of the hidden state."""

    def inner(self, mlp: DenseMLP, h: Tensor, loras: Sequence[Adapter], *, invariant: bool | None) -> Tensor:
        """See `MlpSharding`."""
        first = [linear.forward(h, loras, invariant=invariant) for linear in mlp.first]
        return mlp.down_proj.forward(activated(first, mlp.activation), loras, invariant=invariant)


WHOLE_FEATURES = WholeFeatures()


class DenseMLP(FeedForward):
    """inner(h) = down(act(gate(h)) * up(h)), or down(act(up(h))) without gate.

    Attributes:
        first: gate and up, or up.
        sharding: runs `inner`. `execution/sharded/cutting.py` gives another one to a model that is sharded.
    """

    name = "MLP"
    sharding: MlpSharding = WHOLE_FEATURES

    def __init__(
        self,
        key: str,
        layer_idx: int,
        norm: Norm | None,
        projections: tuple[Linear, ...],
        activation: Activation,
        post: Norm | None = None,
    ) -> None:
        """projections: the matrices of `first`, and down."""
        super().__init__(key, layer_idx, norm, post, activation)
        *first, self.down_proj = projections
        self.first = tuple(first)
        store_alike(first)
        self.gate_proj = self.first[0] if len(self.first) > 1 else None
        self.up_proj = self.first[-1]

    def _described(self, of: type[DenseMLP]) -> MlpDescription:
        return MlpDescription(
            module=self,
            of=of,
            norm=self.norm,
            post=self.post,
            float_residual=self.float_residual,
            first=self.first,
            last=self.down_proj,
            activation=self.activation,
        )

    def submodules(self) -> Iterator[Linear]:
        """Yield gate, if there is one, up and down."""
        yield from (*self.first, self.down_proj)

    def inner(self, h: Tensor, loras: Sequence[Adapter] = (), *, invariant: bool | None = None) -> Tensor:
        """Compute the first matrices, the activation, and down."""
        return self.sharding.inner(self, h, loras, invariant=invariant)


class GatedMLP(DenseMLP):
    """inner(h) = down(act(gate(h)) * up(h))."""

    def describe(self) -> MlpDescription:
        """Return the description of the half."""
        return self._described(GatedMLP)


class PlainMLP(DenseMLP):
    """inner(h) = down(act(up(h)))."""

    def describe(self) -> MlpDescription:
        """Return the description of the half."""
        return self._described(PlainMLP)
