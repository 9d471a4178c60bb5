"""The twin of `peer.ExchangeBuffers.gather`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["gather"]


def gather(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts [rows, width] of all devices side by side, in CPU memory."""
    return torch.cat([part.cpu() for part in parts], dim=1)
