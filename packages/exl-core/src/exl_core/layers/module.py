"""The base of a model's modules: a key, load and unload, and a forward pass over flat token rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import ModelStateError
from ..loading.checkpoint import TensorSource

if TYPE_CHECKING:
    from ..execution.batch import Step
    from .linear import Linear

__all__ = ["Module", "WeightModule", "is_changed"]


def is_changed(module: Module) -> bool:
    """Return whether a method of its class was replaced in this one module (`module.forward = ...`)."""
    return any(callable(getattr(type(module), name, None)) for name in vars(module))


class Module(ABC):
    """A node of `model.modules`."""

    key: str
    name: str
    layer_idx: int | None = None  # number of its layer; None for modules outside of the layers

    @abstractmethod
    def load(self, source: TensorSource, device: torch.device) -> None:
        """Read the weights. An error leaves the module unloaded."""

    @abstractmethod
    def unload(self) -> None:
        """Drop the weights."""

    @property
    @abstractmethod
    def loaded(self) -> bool:
        """Whether the weights are loaded."""

    @abstractmethod
    def weight_bytes(self) -> int:
        """Return the bytes of loaded weights."""

    @abstractmethod
    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Map the hidden state [T, hidden], float32 or, on a GPU, half. May work in place on `x`."""

    @property
    def capturable(self) -> bool:
        """Whether `forward` on a GPU makes no decision on the host, so that a CUDA graph can hold it."""
        return True

    def refusal_of_rows(self, rows: int) -> str | None:
        """Return why a captured `forward` of so many rows on a GPU is not batch-invariant; None where it is.

        The step is `invariant`. The module is loaded.
        """
        if not self.capturable:
            return f"{self.key} ({self.name}) decides on the host what to launch"
        return None

    def submodules(self) -> Iterator[Linear]:
        """Yield the linears inside, which replace this module in `model.modules_dict`."""
        return iter(())


class WeightModule(Module):
    """A module of one weight."""

    weight: Tensor | None = None

    def unload(self) -> None:
        """Drop the weight."""
        self.weight = None

    @property
    def loaded(self) -> bool:
        """Whether the weight is loaded."""
        return self.weight is not None

    def weight_bytes(self) -> int:
        """Return the bytes of the loaded weight."""
        return 0 if self.weight is None else self.weight.nbytes

    @property
    def loaded_weight(self) -> Tensor:
        """The loaded weight. Raises ModelStateError before load()."""
        if self.weight is None:
            raise ModelStateError(f"{self.key} is not loaded: call model.load() first")
        return self.weight
