"""The feed-forward half of a layer with its norms and residual: gated, plain, or (in `moe`) a mixture of experts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from exl_kernels.activation import activation as activate
from exl_kernels.activation import gated_activation
from exl_kernels.block import MlpBlock

from ..architectures.base import Activation
from ..execution.batch import Step
from ..execution.sharded.matrix import Part, SplitMatrix, over_parts
from .description import MlpDescription
from .linear import Linear
from .norm import Norm, block_norm
from .sublayer import SubLayer

if TYPE_CHECKING:
    from ..contracts import Adapter

__all__ = ["FeedForward", "GatedMLP", "PlainMLP"]


class FeedForward(SubLayer[MlpBlock]):
    """x + post(inner(norm(x))), where either norm may be absent."""

    def __init__(self, key: str, layer_idx: int, norm: Norm | None, post: Norm | None, activation: Activation) -> None:
        self.key = key
        self.layer_idx = layer_idx
        self.norm = norm
        self.post = post
        self.activation: Activation = activation

    @abstractmethod
    def inner(self, h: Tensor, loras: Sequence[Adapter] = ()) -> Tensor:
        """Compute the sub-layer without norms and residual: [T, hidden] -> a new tensor [T, hidden]."""

    def _described(self, of: type[FeedForward], first: tuple[Linear, ...], last: Linear) -> MlpDescription:
        return MlpDescription(
            module=self,
            of=of,
            norm=self.norm,
            post=self.post,
            float_residual=self.float_residual,
            first=first,
            last=last,
            activation=self.activation,
        )

    def _parts(self) -> Iterator[Norm | Linear]:
        yield from (norm for norm in (self.norm, self.post) if norm is not None)
        yield from self.submodules()

    @property
    def loaded(self) -> bool:
        """Whether all matrices are loaded."""
        return all(linear.matrix is not None for linear in self.submodules())

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Run the half on x [T, hidden], in place where possible, and return the result."""
        if self.block is not None and not any(linear.adapted(step.loras) for linear in self.submodules()):
            return self.block.forward(x)
        return self.forward_by_operator(x, step.loras)

    def forward_by_operator(self, x: Tensor, loras: Sequence[Adapter] = ()) -> Tensor:
        """Run operator by operator, bitwise identical: for padded matrices, adapters, and as the block's twin."""
        y = self.inner(x if self.norm is None else self.norm.forward(x), loras)
        if self.post is not None:
            y = self.post.apply(y.to(x.dtype))
        return x.add_(y)


class GatedMLP(FeedForward):
    """inner(h) = down(act(gate(h)) * up(h))."""

    name = "MLP"

    def __init__(
        self,
        key: str,
        layer_idx: int,
        norm: Norm | None,
        projections: tuple[Linear, Linear, Linear],
        activation: Activation,
        post: Norm | None = None,
    ) -> None:
        super().__init__(key, layer_idx, norm, post, activation)
        self.gate_proj, self.up_proj, self.down_proj = projections

    def describe(self) -> MlpDescription:
        """Return the description of the half."""
        return self._described(GatedMLP, (self.gate_proj, self.up_proj), self.down_proj)

    def submodules(self) -> Iterator[Linear]:
        """Yield gate, up and down."""
        yield from (self.gate_proj, self.up_proj, self.down_proj)

    def _make_block(self) -> MlpBlock | None:
        if not all(linear.fits_block() for linear in self.submodules()):
            return None
        matrices = (self.up_proj.quant, self.down_proj.quant)
        norm, post = block_norm(self.norm), block_norm(self.post)
        return MlpBlock(norm, self.gate_proj.quant, matrices, self.activation, post=post)

    def inner(self, h: Tensor, loras: Sequence[Adapter] = ()) -> Tensor:
        """Compute down(act(gate(h)) * up(h))."""
        gate, up = self.gate_proj.parts_for(loras), self.up_proj.parts_for(loras)
        if gate is not None and up is not None:
            return _multiplied(self.down_proj, (gate, up), h, self._gated, loras)
        y = self.gate_proj.forward(h, loras)
        gated_activation(y, self.up_proj.forward(h, loras), self.activation, out=y)
        return self.down_proj.forward(y, loras)

    def _gated(self, h: Tensor, parts: Sequence[Part]) -> Tensor:
        y = parts[0].matmul(h)
        return gated_activation(y, parts[1].matmul(h), self.activation, out=y)


class PlainMLP(FeedForward):
    """inner(h) = down(act(up(h)))."""

    name = "MLP"

    def __init__(
        self,
        key: str,
        layer_idx: int,
        norm: Norm | None,
        projections: tuple[Linear, Linear],
        activation: Activation,
        post: Norm | None = None,
    ) -> None:
        super().__init__(key, layer_idx, norm, post, activation)
        self.up_proj, self.down_proj = projections

    def describe(self) -> MlpDescription:
        """Return the description of the half."""
        return self._described(PlainMLP, (self.up_proj,), self.down_proj)

    def submodules(self) -> Iterator[Linear]:
        """Yield up and down."""
        yield from (self.up_proj, self.down_proj)

    def _make_block(self) -> MlpBlock | None:
        if not all(linear.fits_block() for linear in self.submodules()):
            return None
        matrices = (self.up_proj.quant, self.down_proj.quant)
        return MlpBlock(block_norm(self.norm), None, matrices, self.activation, post=block_norm(self.post))

    def inner(self, h: Tensor, loras: Sequence[Adapter] = ()) -> Tensor:
        """Compute down(act(up(h)))."""
        whole = self.up_proj.parts_for(loras)
        if whole is not None:
            return _multiplied(self.down_proj, (whole,), h, self._activated, loras)
        up = self.up_proj.forward(h, loras)
        return self.down_proj.forward(activate(up, self.activation, out=up), loras)

    def _activated(self, h: Tensor, parts: Sequence[Part]) -> Tensor:
        up = parts[0].matmul(h)
        return activate(up, self.activation, out=up)


def _multiplied(
    down: Linear,
    matrices: Sequence[SplitMatrix],
    h: Tensor,
    run: Callable[[Tensor, Sequence[Part]], Tensor],
    loras: Sequence[Adapter],
) -> Tensor:
    """Multiply `down` with the hidden features that `run` computes on each device from its parts of `matrices`."""
    sums = down.sums_for(loras)
    if sums is not None:
        return sums.after(h, matrices, run)
    return down.forward(over_parts(h, matrices, run), loras)
