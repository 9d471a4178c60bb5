"""How the devices of a sharded model pass results to each other."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ...transfer import send

__all__ = ["Exchange", "LocalExchange", "Parts"]

Parts = Sequence[tuple[int, tuple[int, ...]]]
"""(device number, shape) of every part of a result, device by device."""
T = TypeVar("T")


class Exchange(ABC):
    """Brings the parts of a result to the home device, where hidden states and norms are.

    Attributes:
        shards: number of devices.
        home: number of the home device of this process.
        local: numbers of the devices that this process computes for.
        count: number of exchanges so far.
    """

    def __init__(self, shards: int, home: int, local: Sequence[int]) -> None:
        self.shards = shards
        self.home = home
        self.local = frozenset(local)
        self.count = 0

    @property
    def whole(self) -> bool:
        """Whether this process computes for every device."""
        return len(self.local) == self.shards

    def collect(self, parts: Parts, made: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Return all parts of a result on the home device, in the order of `parts`.

        Args:
            parts: device and shape of every part.
            made: the parts of this process' devices, in order, each on its device.
            like: a tensor on the home device with the type of all parts.

        Raises:
            PeerError: another process is gone, or computes something else.
        """
        self.count += 1
        return self._collect(parts, made, like)

    @abstractmethod
    def _collect(self, parts: Parts, made: Sequence[Tensor], like: Tensor) -> list[Tensor]: ...

    @abstractmethod
    def agree(self, value: T) -> T:
        """Return the value of the first device's process, in every process. Raises PeerError."""

    @abstractmethod
    def check_same(self, what: str, digest: bytes) -> None:
        """Raise PeerError unless all processes call this with equal digests of at least 8 bytes."""

    @abstractmethod
    def close(self) -> None:
        """Free what the exchange holds. The model cannot run any more."""


class LocalExchange(Exchange):
    """All devices belong to this process: results are copied between them, on the CPU not even that.

    Between GPUs these are torch's copies to the home device, one a part.
    """

    def __init__(self, shards: int) -> None:
        super().__init__(shards, 0, range(shards))

    def _collect(self, parts: Parts, made: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        return [send(values, like.device) for values in made]

    def agree(self, value: T) -> T:
        """Return the value."""
        return value

    def check_same(self, what: str, digest: bytes) -> None:
        """Do nothing: there is only this process."""

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


def split_flat(parts: Parts, shards: int, flat: Sequence[Tensor]) -> list[Tensor]:
    """Cut one flat tensor a device, which holds that device's parts one after the other, into `parts`."""
    offsets = [0] * shards
    found = []
    for shard, shape in parts:
        begin = offsets[shard]
        offsets[shard] = begin + math.prod(shape)
        found.append(flat[shard][begin : offsets[shard]].view(shape))
    return found


def joined_flat(made: Sequence[Tensor], size: int, like: Tensor) -> Tensor:
    """Join tensors to a flat one of `size` elements; elements after the last one are undefined."""
    out = torch.empty(size, dtype=like.dtype, device=like.device)
    begin = 0
    for values in made:
        out[begin : begin + values.numel()] = values.reshape(-1)
        begin += values.numel()
    return out
