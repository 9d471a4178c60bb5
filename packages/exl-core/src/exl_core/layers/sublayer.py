"""What the two halves of a layer share: norms and linears that live together, and one native call for all of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch

from ..loading.checkpoint import TensorSource
from .linear import Linear
from .module import Module
from .norm import Norm

__all__ = ["SubLayer"]

Block = TypeVar("Block")


class SubLayer(Module, Generic[Block]):
    """Half of a layer, with its norms and residual; `block` is all of `forward` as one native call, if there is one."""

    block: Block | None = None

    @abstractmethod
    def _parts(self) -> Iterator[Norm | Linear]:
        """Everything that has weights."""

    def _fuse(self) -> Block | None:
        """All of `forward` as one native call, where the kind and the matrices allow it."""
        return None

    def load(self, source: TensorSource, device: torch.device) -> None:
        try:
            for part in self._parts():
                part.load(source, device)
            self.block = self._fuse()
        except BaseException:
            self.unload()
            raise

    def unload(self) -> None:
        self.block = None
        for part in self._parts():
            part.unload()

    def weight_bytes(self) -> int:
        return sum(part.weight_bytes() for part in self._parts())
