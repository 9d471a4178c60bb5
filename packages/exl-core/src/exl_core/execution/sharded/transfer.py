"""Copy tensors from one device to another."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

__all__ = ["send"]


def send(x: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return x on `device`, or x itself if it is there.

    The copy goes through host memory where direct copies between two GPUs fail.
    """
    if x.device == device or "cpu" in (x.device.type, device.type) or _direct(str(x.device), str(device)):
        return x.to(device, dtype or x.dtype)
    return x.cpu().to(device, dtype or x.dtype)


@cache
def _direct(source: str, target: str) -> bool:
    """Return whether a copy between two GPUs arrives intact: on some machines it silently does not. Tested once."""
    pattern = torch.arange(1 << 14, dtype=torch.int32, device=source)
    try:
        return bool(torch.equal(pattern.to(target).cpu(), pattern.cpu()))
    except RuntimeError:
        return False
