"""`exllamav2.compat`: moving tensors between devices."""

from itertools import pairwise
from typing import Any

import torch

from exllamav2._names import without_counterpart

__all__ = ["pairwise", "safe_move_tensor"]


def safe_move_tensor(tensor: Any, device: torch.device | str | int, non_blocking: bool = False) -> Any:
    """Return the tensor, or each of a list or tuple of tensors, on `device`."""
    if isinstance(tensor, (list, tuple)):
        return type(tensor)(safe_move_tensor(part, device, non_blocking) for part in tensor)
    return tensor.to(device, non_blocking=non_blocking)


__getattr__ = without_counterpart(__name__)
