"""The properties of a model that caches, adapters, embeddings and executors use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from .config import ExLlamaV2Config
    from .execution.sharded.context import TensorParallel
    from .layers.linear import Linear
    from .layers.module import Module
    from .placement import Placement
    from .rope import RopeTable

__all__ = ["LanguageModel", "LoadedModel"]


class LoadedModel(Protocol):
    """The properties by which any code knows a model, such as that of a cache or an adapter."""

    @property
    def arrangement(self) -> Sequence[Module]:
        """The modules as one list object that is replaced when one of them is."""
        ...

    @property
    def device(self) -> torch.device | None:
        """The device of the logits; None until devices are decided."""
        ...


class LanguageModel(LoadedModel, Protocol):
    """The state of an `ExLlamaV2`: its modules, their devices, and the loaded weights.

    Users of this protocol change nothing.
    """

    @property
    def config(self) -> ExLlamaV2Config:
        """The configuration of the model."""

    @property
    def modules(self) -> Sequence[Module]:
        """The modules in the order of the forward pass."""
        ...

    @property
    def arrangement(self) -> list[Module]:
        """The modules as one list object that is replaced when one of them is."""
        ...

    @property
    def loaded(self) -> bool:
        """Whether the weights are loaded."""

    @property
    def load_count(self) -> int:
        """Number of loads so far: adapters belong to one load."""
        ...

    @property
    def device(self) -> torch.device | None:
        """The device of the logits; None until devices are decided."""
        ...

    @property
    def placement(self) -> Placement:
        """The device of every module."""
        ...

    @property
    def cache_map(self) -> Mapping[int, str]:
        """Layer index -> device of its keys and values."""
        ...

    @property
    def tp_context(self) -> TensorParallel | None:
        """The sharding of matrices over devices, or None."""
        ...

    @property
    def rope(self) -> RopeTable:
        """The main RoPE table."""

    @property
    def rope_alt(self) -> RopeTable | None:
        """A second table, in families that have one."""
        ...

    @property
    def head_layer_idx(self) -> int:
        """Index of the head among the modules."""
        ...

    @property
    def last_kv_layer_idx(self) -> int:
        """Index of the last attention among the modules."""
        ...

    @property
    def packed_rows(self) -> int:
        """Most rows of a pass on a GPU that run on packed weights: their results are batch-invariant."""
        ...

    def linears(self) -> Iterator[Linear]:
        """Yield every linear of every module."""
        ...

    def update_loras(self) -> None:
        """React to the unloading of an adapter."""
        ...
