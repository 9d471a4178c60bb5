"""Adapters of a batch whose rows have different ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl_kernels.linear.lora import LoraEntry, LoraGroup, LoraTable

from .adding import refusal_of_group
from .pairs import LoraPair, added_by_kernels

if TYPE_CHECKING:
    from exl_kernels.linear import QuantMatrix

    from ..contracts import Adapter, AdapterPair
    from .pairs import EmbeddingPair

__all__ = ["RowAdapters", "of_all_rows"]


class RowAdapters:
    """The adapters of every row of a pass, in the place of one adapter in `Step.loras`.

    A row in slot i has the adapters of `sets[i]`, in their order; a negative slot means none. They may change matrices
    only through pairs: no whole matrices, no embeddings, no experts. A row's result is bitwise identical to that of a
    pass whose rows all have its adapters.

    Args:
        sets: the combinations of adapters.
        slots: int32 [T] on the device of the pass, the slot of each row. The values may change later, like those of a
            captured step's inputs.
        q_len: tokens a sequence.
    """

    replacements: Mapping[str, QuantMatrix] = {}
    embedding: Tensor | None = None
    embedding_pair: EmbeddingPair | None = None

    def __init__(self, sets: Sequence[tuple[Adapter, ...]], slots: Tensor, q_len: int) -> None:
        self.slots = slots
        self._ends = slots if q_len == 1 else slots[q_len - 1 :: q_len]
        keys = {key: None for adapters in sets for adapter in adapters for key in adapter.pairs}
        self.pairs: dict[str, _RowPairs] = {key: _RowPairs(self, sets, key) for key in keys}
        self.touched = frozenset(keys)
        self._set_count = len(sets)
        self._groups: dict[tuple[str, ...], LoraGroup] = {}

    def slots_of(self, x: Tensor) -> Tensor:
        """Return the slots of the rows of x: of all tokens, or of the last token of each sequence for a head."""
        found = self.slots if x.shape[0] == self.slots.shape[0] else self._ends
        return found.to(x.device)

    def groups(self, keys: Sequence[str], in_features: int, widths: Sequence[int]) -> bool:
        """Return whether `group` supports these matrices: their sizes, and the pairs of all adapters for them."""
        pairs = [self.pairs[key] for key in keys if key in self.pairs]
        return refusal_of_group(pairs, in_features, widths) is None

    def group(self, keys: Sequence[str], in_features: int, widths: Sequence[int]) -> LoraGroup | None:
        """Return the adapters of the matrices of one joined matmul; None where no adapter changes any of them.

        Args:
            keys: keys of one to three matrices.
            in_features: inputs of each matrix.
            widths: outputs of each matrix.
        """
        key = tuple(keys)
        if self.touched.isdisjoint(key):
            return None
        if key not in self._groups:
            lines = [self.pairs[one].entries if one in self.pairs else [] for one in key]
            none: list[LoraEntry | None] = [None] * self._set_count
            levels = [[line[n] if n < len(line) else none for line in lines] for n in range(max(map(len, lines)))]
            self._groups[key] = LoraGroup(levels, in_features, widths)
        return self._groups[key]


class _RowPairs:
    """The pairs that the adapters of a batch add to one matrix."""

    def __init__(self, rows: RowAdapters, sets: Sequence[tuple[Adapter, ...]], key: str) -> None:
        self._rows = rows
        # The n-th adapters of all sets, then the next ones: each set's adapters add up in its order.
        chains = [[a.pairs[key] for a in adapters if key in a.pairs] for adapters in sets]
        depth = max(map(len, chains))
        self._levels = [[chain[n] if n < len(chain) else None for chain in chains] for n in range(depth)]
        self._tables: list[LoraTable | None] = [_table(level) for level in self._levels]

    @property
    def for_kernels(self) -> bool:
        """Whether the kernels support every pair."""
        return all(table is not None for table in self._tables)

    @property
    def entries(self) -> list[list[LoraEntry | None]]:
        """The entries of the kernels by level and set."""
        return [_entries(level) for level in self._levels]

    def add_to(self, x: Tensor, y: Tensor, *, invariant: bool | None = None) -> None:
        """Add the results of each row's adapters for x [T, in] to y [T, out]."""
        slots = self._rows.slots_of(x)
        for level, table in zip(self._levels, self._tables, strict=True):
            if added_by_kernels(table, x, y, slots, invariant=invariant):
                continue
            for slot, pair in enumerate(level):
                rows = (slots == slot).nonzero().squeeze(1)
                if pair is not None and len(rows):
                    part = y[rows]
                    pair.add_to(x[rows], part, invariant=invariant)
                    y[rows] = part


def _entries(level: Sequence[AdapterPair | None]) -> list[LoraEntry | None]:
    return [pair.entry if isinstance(pair, LoraPair) else None for pair in level]


def _table(level: Sequence[AdapterPair | None]) -> LoraTable | None:
    """Return a table of the pairs; None where the kernels do not support one of them."""
    entries = _entries(level)
    if any(pair is not None and entry is None for pair, entry in zip(level, entries, strict=True)):
        return None
    return LoraTable(entries)


def of_all_rows(sets: Sequence[tuple[Adapter, ...]], q_len: int, device: torch.device | None) -> tuple[Adapter, ...]:
    """Return adapters for all rows of a pass in which each sequence has the adapters of its entry in `sets`."""
    different = list(dict.fromkeys(sets))
    if len(different) <= 1:
        return different[0] if different else ()
    numbers = {adapters: slot for slot, adapters in enumerate(filter(None, different))}
    slots = torch.tensor([numbers.get(adapters, -1) for adapters in sets], dtype=torch.int32)
    return (RowAdapters(list(numbers), slots.repeat_interleave(q_len).to(device), q_len),)
