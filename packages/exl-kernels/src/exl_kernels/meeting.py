"""Memory in which blocks of a product of 9 to 64 rows meet: all ones but for counters before and after every launch.

Only the launch's own blocks write there, and who takes a word puts ones in its place (`Batch::take` in
`kernels/batch.cuh`); counters count on. A launch of any size finds it as the one before leaves it. The next launch on
the stream reads it behind its programmatic wait, so that nothing depends on when it begins. No block waits for one that
may not be resident: one that does not see the others leaves what it has to the last (`Batch::agree`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["forget_meeting_memory", "meeting_in", "meeting_memory"]

_by_stream: dict[tuple[torch.device, int], Tensor] = {}
"""By device and stream, whose launches follow one another; captured launches never use it. Each is allocated on its
stream."""

_current = threading.local()


@contextlib.contextmanager
def meeting_in(held: list[Tensor]) -> Iterator[None]:
    """Within it, launches of this thread meet in tensors of `held`, to which larger ones are added.

    For capturing, after a run of the same launches that was not captured. Launches that share memory must not run at
    the same time. Keep the tensors as long as the graph. Without this, every captured launch fills memory of its own
    first.
    """
    before = getattr(_current, "held", None)
    _current.held = held
    try:
        yield
    finally:
        _current.held = before


def meeting_memory(device: torch.device, stream: int, size: int) -> Tensor | None:
    """At least `size` bytes, uint8, all ones, that only launches on this stream use; None where size is 0."""
    if size == 0:
        return None
    held: list[Tensor] | None = getattr(_current, "held", None)
    capturing = torch.cuda.is_current_stream_capturing()
    known = None if capturing else _by_stream.get((device, stream))  # another thread may be forgetting it
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


def forget_meeting_memory(device: torch.device | str) -> None:
    """Give back what launches on this device's streams have met in; the next ones make it anew.

    Captured launches keep theirs. Launches that are still queued may use it: torch gives freed memory to the stream
    that it was allocated on, behind them, and to others only when the device has come to rest.
    """
    place = torch.device(device)
    for key in list(_by_stream):  # a copy: another thread may be making some
        if key[0] == place:
            _by_stream.pop(key, None)
