"""Workspace for what blocks of a matmul compute for one another: sums of 9 to 128 rows, and one or two rows times A.

Before and after every launch all bytes are ones, except the counters of `gemm_batch` at its beginning, which keep
counting. Only the blocks of the launch write to the workspace, and the block that takes a word restores the ones
(`Batch::take` in `kernels/linear/batch.cuh`), or the last block that reads it (`ring_adapters.cuh`).
So a launch of any size can follow any other. The next launch on the stream reads the workspace after its programmatic
wait, so it may begin at any time. No block waits for a block that may not be resident: a block that does not see the
others leaves its part to the last block (`Batch::agree`), or does theirs, too (`Adding::gather`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["block_workspace", "forget_workspaces", "workspaces_in"]

_by_stream: dict[tuple[torch.device, int], Tensor] = {}
"""Workspace by device and stream, allocated on that stream. Launches of one stream are ordered; captured launches never
use these tensors."""


class _Current(threading.local):
    """The workspaces that one thread's launches take."""

    held: list[Tensor] | None = None


_current = _Current()


@contextlib.contextmanager
def workspaces_in(held: list[Tensor]) -> Iterator[None]:
    """Take the workspaces of this thread's launches from `held`, to which larger tensors are added.

    For capturing, after a run of the same launches that was not captured. Launches that share memory must not run at
    the same time. Keep the tensors as long as the graph. Outside this context, every captured launch first fills
    separate memory.
    """
    before = _current.held
    _current.held = held
    try:
        yield
    finally:
        _current.held = before


def block_workspace(device: torch.device, stream: int, size: int) -> Tensor | None:
    """Return at least `size` bytes (uint8, all ones) that only launches on this stream use; None where size is 0."""
    if size == 0:
        return None
    held = _current.held
    capturing = torch.cuda.is_current_stream_capturing()
    known = None if capturing else _by_stream.get((device, stream))  # another thread may be removing it
    for memory in [known] if held is None else held:
        if memory is not None and memory.device == device and memory.numel() >= size:
            return memory
    made = torch.full((size,), 255, dtype=torch.uint8, device=device)
    if not capturing:
        if held is None:
            _by_stream[device, stream] = made
        else:
            held.append(made)
    return made


def forget_workspaces(device: torch.device | str) -> None:
    """Free the workspaces of this device's streams; the next launches allocate new ones.

    Captured launches keep theirs. Queued launches may still use the memory: torch reuses freed memory at once only on
    the stream of its allocation, in order. Other streams get it when the device is idle.
    """
    place = torch.device(device)
    for key in list(_by_stream):  # a copy: another thread may be adding keys
        if key[0] == place:
            _by_stream.pop(key, None)
