"""Pack matrices into pinned memory of bounded size and copy them to a GPU while the next part is packed.

A matrix is on its GPU when it is made. `Uploads` delays that wait for all matrices of a model to their end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from .. import _native

__all__ = ["Uploads", "moved", "packed_image", "settle"]

SLOTS = 3
SLOT_BYTES = 16 << 20

Pack = Callable[[int, Tensor], None]
"""Packs the tiles from a number on that fill a uint8 tensor on the CPU into it."""


class _Slots:
    """Pinned buffers of one GPU, used in turn. A buffer is filled again once the last copy from it has ended."""

    @torch.inference_mode(False)
    def __init__(self, device: torch.device, size: int) -> None:
        self._buffers = [_pinned(size) for _ in range(SLOTS)]
        self._copied = [torch.cuda.Event() for _ in range(SLOTS)]  # type: ignore[no-untyped-call]
        self._device, self._turn, self.size = device, 0, size

    def send(self, first: int, to: Tensor, pack: Pack) -> None:
        """Pack the tiles from `first` on that `to`, uint8 on the GPU, holds, and queue their copy."""
        self._turn = (self._turn + 1) % SLOTS
        copied = self._copied[self._turn]
        copied.synchronize()  # at once if nothing was copied yet
        part = self._buffers[self._turn][: to.numel()]
        pack(first, part)
        to.copy_(part, non_blocking=True)
        copied.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Wait for all copies: the buffers may be freed."""
        for copied in self._copied:
            copied.synchronize()


def _pinned(size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # the system has no more of it; copies are slower then
        return torch.empty(size, dtype=torch.uint8)


class Uploads:
    """Let matrices that are made within its `with` blocks return before they are on their GPU.

    `finish` waits until all of them are, and frees the pinned buffers: `SLOTS` times `SLOT_BYTES` a GPU. Until then the
    matrices may be used only by work on the streams that they were loaded on. One thread at a time.
    """

    def __init__(self) -> None:
        self._slots: dict[torch.device, _Slots] = {}
        self._devices: set[torch.device] = set()

    def __enter__(self) -> Self:
        _current.uploads.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _current.uploads.pop()

    def slots(self, device: torch.device, least: int) -> _Slots:
        """Return buffers of at least `least` bytes each."""
        held = self._slots.get(device)
        if held is not None and held.size < least:
            held.wait()
            held = None
        if held is None:
            held = self._slots[device] = _Slots(device, max(least, SLOT_BYTES))
        return held

    def note(self, device: torch.device) -> None:
        """Note that work is queued on a GPU."""
        self._devices.add(device)

    def finish(self) -> None:
        """Wait for all copies, and free the buffers."""
        for held in self._slots.values():
            held.wait()
        self._slots.clear()
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._devices.clear()


class _Current(threading.local):
    """The `with` blocks that this thread is in."""

    def __init__(self) -> None:
        self.uploads: list[Uploads] = []


_current = _Current()


def _uploads() -> Uploads | None:
    return _current.uploads[-1] if _current.uploads else None


def packed_image(layout: _native.CudaLayout, device: torch.device, pack: Pack) -> Tensor:
    """Return the image of a matrix on a GPU: uint8 [tiles * tile_bytes], packed by `pack`.

    Within `Uploads` its copies may be under way still.
    """
    tiles, each = layout.tiles, layout.tile_bytes
    image = torch.empty(tiles * each, dtype=torch.uint8, device=device)
    uploads = _uploads()
    if uploads is not None:
        slots = uploads.slots(device, each)
    else:
        slots = _Slots(device, max(each, min(SLOT_BYTES, tiles * each)))
    most = max(slots.size // max(each, 1), 1)
    for first in range(0, tiles, most):
        last = min(first + most, tiles)
        slots.send(first, image[first * each : last * each], pack)
    if uploads is None:
        slots.wait()
    return image


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a small CPU tensor on a GPU. Within `Uploads` its copy may be under way still."""
    if _uploads() is None:
        return tensor.to(device)
    try:
        pinned = tensor.pin_memory()  # torch keeps it until it is copied
    except RuntimeError:
        pinned = tensor
    return pinned.to(device, non_blocking=True)


def settle(device: torch.device) -> None:
    """Wait until what is queued on torch's current stream is done; within `Uploads`, `finish` does.

    Weights must be in place before a kernel that starts early reads them (programmatic dependent launch).
    """
    uploads = _uploads()
    if uploads is None:
        torch.cuda.current_stream(device).synchronize()
    else:
        uploads.note(device)
