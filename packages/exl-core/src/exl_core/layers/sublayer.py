"""The base of the two halves of a layer: norms and linears that load together, and how the pass over them runs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ..execution.batch import Step
from ..loading.checkpoint import TensorSource
from .description import HalfDescription
from .linear import Linear
from .module import Module
from .norm import Norm

__all__ = ["BY_OPERATOR", "OwnPass", "SubLayer"]


class OwnPass(Protocol):
    """A way to run a half as its module."""

    def run(self, half: SubLayer, x: Tensor, step: Step) -> Tensor:
        """Run the half on x [T, hidden], in place where possible, and return the result."""
        ...


class ByOperator:
    """The way that needs nothing but the half."""

    def run(self, half: SubLayer, x: Tensor, step: Step) -> Tensor:
        """See `OwnPass`."""
        return half.forward_by_operator(x, step)


BY_OPERATOR = ByOperator()


class SubLayer(Module):
    """Half of a layer, with its norms and residual.

    `own_pass` runs `forward`. `execution/own_pass.py` chooses it when the model loads the half.
    """

    norm: Norm | None
    post: Norm | None
    own_pass: OwnPass = BY_OPERATOR
    float_residual = False  # the hidden state is float32 on a GPU, too

    def describe(self) -> HalfDescription:
        """Return what this half computes. This one holds for no half: executors have only its own forward pass."""
        return HalfDescription(
            module=self, of=SubLayer, norm=self.norm, post=self.post, float_residual=self.float_residual
        )

    def normed(self, x: Tensor) -> Tensor:
        """Return the input of the first matrices."""
        return x if self.norm is None else self.norm.forward(x)

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        """Add post(y) to x in place and return x."""
        return x.add_(y if self.post is None else self.post.apply(y.to(x.dtype)))

    @abstractmethod
    def _parts(self) -> Iterator[Norm | Linear]:
        """Yield everything with weights."""

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Run the half on x [T, hidden], in place where possible, and return the result."""
        return self.own_pass.run(self, x, step)

    @abstractmethod
    def forward_by_operator(self, x: Tensor, step: Step) -> Tensor:
        """Run operator by operator: the oracle of every other way, but for the router of a mixture (`MoE.route`)."""

    def load(self, source: TensorSource, device: torch.device) -> None:
        """Load all parts; an error leaves the module unloaded."""
        self.own_pass = BY_OPERATOR
        try:
            for part in self._parts():
                part.load(source, device)
        except BaseException:
            self.unload()
            raise

    def unload(self) -> None:
        """Drop the weights."""
        self.own_pass = BY_OPERATOR
        for part in self._parts():
            part.unload()

    def weight_bytes(self) -> int:
        """Return the bytes of loaded weights."""
        return sum(part.weight_bytes() for part in self._parts())
