"""Numbers that are added to the logits of some tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SparseBias"]


@dataclass(frozen=True, slots=True, eq=False)
class SparseBias:
    """A bias of a few ids, as a small fraction of the memory that one value for each id of a vocabulary takes.

    `ids`: int32 [k] on the CPU, each id once; `values`: float32 [k], -inf bans; `rest`: bias of all other ids, -inf to
    allow none of them.
    """

    ids: Tensor
    values: Tensor
    rest: float = 0.0

    @classmethod
    def of(cls, values: Mapping[int, float], rest: float = 0.0) -> SparseBias:
        """The bias of each id in `values`."""
        ids = torch.tensor(list(values), dtype=torch.int32)
        return cls(ids, torch.tensor(list(values.values()), dtype=torch.float32), rest)

    def dense(self, width: int) -> Tensor:
        """float32 [width]: the same bias with a value for each id from 0 to `width` - 1; other ids are ignored."""
        bias = torch.full((width,), self.rest, dtype=torch.float32)
        inside = (self.ids >= 0) & (self.ids < width)
        bias[self.ids[inside].long()] = self.values[inside]
        return bias
