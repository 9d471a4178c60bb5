"""What caches, adapters, embeddings and executors ask of a model."""

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

__all__ = ["LanguageModel"]


class LanguageModel(Protocol):
    """The state of an `ExLlamaV2`: its modules, where they are, and what was loaded. Readers change none of it."""

    @property
    def config(self) -> ExLlamaV2Config: ...
    @property
    def modules(self) -> Sequence[Module]:
        """In the order of the forward pass."""
        ...

    @property
    def arrangement(self) -> list[Module]:
        """The modules as one list object that is replaced when one of them is."""
        ...

    @property
    def loaded(self) -> bool: ...
    @property
    def load_count(self) -> int:
        """How often weights were loaded: adapters belong to one load."""
        ...

    @property
    def device(self) -> torch.device | None:
        """Where logits come out; None until devices are decided."""
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
        """How matrices are cut over devices, if they are."""
        ...

    @property
    def rope(self) -> RopeTable: ...
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

    def linears(self) -> Iterator[Linear]:
        """Every linear of every module."""
        ...

    def update_loras(self) -> None:
        """Called when an adapter is unloaded."""
        ...
