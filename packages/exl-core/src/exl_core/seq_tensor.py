"""A tensor that grows along one dimension without copying its content on every append."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import ShapeError

__all__ = ["SeqTensor"]

STEP = 256  # capacity grows in multiples of this many positions


class SeqTensor:
    """A growing tensor of `len()` positions along `seq_dim`, initially empty.

    Args:
        shape: the shape; the size of `seq_dim` is ignored.
        dtype: element type.
        seq_dim: the dimension that grows.
        device: device of the memory.
        init_cap: positions to reserve; -1 for the default.

    Raises:
        ShapeError: seq_dim is no dimension of the shape.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        seq_dim: int,
        device: str | torch.device = "cpu",
        init_cap: int = -1,
    ) -> None:
        self.seq_dim = seq_dim if seq_dim >= 0 else len(shape) + seq_dim
        if not 0 <= self.seq_dim < len(shape):
            raise ShapeError(f"seq_dim {seq_dim} is no dimension of shape {list(shape)}")
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.seq_len = 0
        self._data = self._allocate(STEP if init_cap < 0 else _round_up(init_cap))

    @staticmethod
    def from_tensor(tensor: Tensor, seq_dim: int) -> SeqTensor:
        """Return a SeqTensor that holds a copy of `tensor`."""
        result = SeqTensor(tuple(tensor.shape), tensor.dtype, seq_dim, tensor.device, tensor.shape[seq_dim])
        result.append(tensor)
        return result

    @property
    def seq_cap(self) -> int:
        """Positions that fit without growing."""
        return self._data.shape[self.seq_dim]

    def __len__(self) -> int:
        return self.seq_len

    def __bool__(self) -> bool:
        return self.seq_len > 0

    def append(self, new: Tensor | SeqTensor | None) -> None:
        """Add the positions of `new` at the end; None adds none. Raises ShapeError if the other dimensions differ."""
        if new is None:
            return
        tensor = new.torch() if isinstance(new, SeqTensor) else new
        mine, theirs = list(self.shape), list(tensor.shape)
        if len(mine) != len(theirs) or any(
            a != b for d, (a, b) in enumerate(zip(mine, theirs, strict=True)) if d != self.seq_dim
        ):
            raise ShapeError(f"append: shape {theirs} does not fit {mine} (dimension {self.seq_dim} grows)")
        added = tensor.shape[self.seq_dim]
        self._reserve(self.seq_len + added)
        self._data.narrow(self.seq_dim, self.seq_len, added).copy_(tensor)
        self.seq_len += added

    def set(self, new: Tensor | SeqTensor | None = None) -> None:
        """Replace the content by `new`; None leaves it empty. Raises ShapeError if the other dimensions differ."""
        self.clear()
        self.append(new)

    def clear(self) -> None:
        """Drop the content; the memory is kept."""
        self.seq_len = 0

    def truncate(self, new_len: int) -> None:
        """Keep the first `new_len` positions. Raises ShapeError if there are fewer."""
        if not 0 <= new_len <= self.seq_len:
            raise ShapeError(f"truncate: length {new_len} is not between 0 and {self.seq_len}")
        self.seq_len = new_len

    def clone(self, drop: int | None = None) -> SeqTensor:
        """Return a copy without the last `drop` positions."""
        result = SeqTensor(self.shape, self.dtype, self.seq_dim, self.device, self.seq_len)
        result.append(self.torch_slice(None, self.seq_len - (drop or 0)))
        return result

    def slice(self, a: int | None, b: int | None) -> SeqTensor:
        """Return a copy of positions [a, b); negative positions count from the end."""
        return SeqTensor.from_tensor(self.torch_slice(a, b), self.seq_dim)

    def torch_slice(self, a: int | None, b: int | None) -> Tensor:
        """Return positions [a, b) as a view."""
        begin, end, _ = slice(a, b).indices(self.seq_len)
        return self._data.narrow(self.seq_dim, begin, max(end - begin, 0))

    def torch(self) -> Tensor:
        """Return the whole content as a view, valid until the next append."""
        return self._data.narrow(self.seq_dim, 0, self.seq_len)

    def _allocate(self, capacity: int) -> Tensor:
        shape = (*self.shape[: self.seq_dim], capacity, *self.shape[self.seq_dim + 1 :])
        with torch.inference_mode(False):  # later appends may come in another mode
            return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _reserve(self, length: int) -> None:
        if length > self.seq_cap:
            grown = self._allocate(_round_up(length))
            grown.narrow(self.seq_dim, 0, self.seq_len).copy_(self.torch())
            self._data = grown


def _round_up(length: int) -> int:
    return max(-(-length // STEP) * STEP, STEP)
