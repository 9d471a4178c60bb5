"""Memory in which the blocks of a product of 9 to 64 rows meet: all ones before and after every launch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["meeting_in", "meeting_memory"]

_by_stream: dict[tuple[torch.device, int], list[Tensor]] = {}
"""By device and stream, whose launches follow one another. The last is used, captured graphs may hold others."""

_current = threading.local()


@contextlib.contextmanager
def meeting_in(held: list[Tensor]) -> Iterator[None]:
    """Within it, launches of this thread meet in the last tensor of `held`, to which larger ones are added.

    For capturing. Launches that share memory must not run at the same time. Keep the list as long as the graph.
    Without this, every captured launch fills memory of its own first.
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
    if held is None:
        held = _by_stream.setdefault((device, stream), [])
    if held and held[-1].device == device and held[-1].numel() >= size:
        return held[-1]
    made = torch.full((size,), 255, dtype=torch.uint8, device=device)
    if not torch.cuda.is_current_stream_capturing():
        held.append(made)
    return made
