"""Copy tensors from one device to another."""

from __future__ import annotations

import threading
from functools import cache

import torch
from torch import Tensor

__all__ = ["is_direct", "queueing", "send"]

queueing = threading.Lock()
"""Held while work is queued that makes one GPU wait for another: the graphs of a step, copies between GPUs.

All GPUs then get such work of all threads in one order. Otherwise a copy of one thread between two graphs of another
thread's step would let each GPU wait for work that is queued behind its own. An allocation that waits for a GPU may
hold the lock: whatever was queued under it ends without further work of the host.
"""


def send(x: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return x on `device`, or x itself if it is there.

    The copy goes through host memory where direct copies between two GPUs fail.
    """
    dtype = dtype or x.dtype
    if x.device == device or "cpu" in (x.device.type, device.type):
        return x.to(device, dtype)
    if not is_direct(x.device, device):
        return x.cpu().to(device, dtype)
    with queueing:
        return x.to(device, dtype)


def is_direct(source: torch.device, target: torch.device) -> bool:
    """Return whether a copy from one device to the other may be direct: not between GPUs whose copies fail a test."""
    return source == target or "cpu" in (source.type, target.type) or _arrives(str(source), str(target))


@cache
def _arrives(source: str, target: str) -> bool:
    """Return whether a copy between two GPUs arrives intact: on some machines it silently does not. Tested once."""
    pattern = torch.arange(1 << 14, dtype=torch.int32, device=source)
    try:
        with queueing:
            moved = pattern.to(target)
        return bool(torch.equal(moved.cpu(), pattern.cpu()))
    except RuntimeError:
        return False
