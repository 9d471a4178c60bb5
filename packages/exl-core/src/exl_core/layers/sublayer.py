"""The base of the two halves of a layer: norms and linears that load together, and one native call for all of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..loading.checkpoint import TensorSource
from .description import HalfDescription
from .linear import Linear
from .module import Module
from .norm import Norm

__all__ = ["SubLayer"]

Block = TypeVar("Block")


class SubLayer(Module, Generic[Block]):
    """Half of a layer, with its norms and residual.

    `block` is a native call that computes all of `forward`, or None.
    """

    norm: Norm | None
    post: Norm | None
    block: Block | None = None
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

    def _make_block(self) -> Block | None:
        """Return a native call that computes all of `forward`, if the kind and the matrices allow it."""
        return None

    def load(self, source: TensorSource, device: torch.device) -> None:
        """Load all parts and make the block; an error leaves the module unloaded."""
        try:
            for part in self._parts():
                part.load(source, device)
            self.block = self._make_block()
        except BaseException:
            self.unload()
            raise

    def unload(self) -> None:
        """Drop the weights."""
        self.block = None
        for part in self._parts():
            part.unload()

    def weight_bytes(self) -> int:
        """Return the bytes of loaded weights."""
        return sum(part.weight_bytes() for part in self._parts())
