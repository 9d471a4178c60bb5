"""Apply packed masks to logits: numpy arrays, and torch tensors on any device. Does not import torch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from exl_filters import bits
from exl_filters.bits import Words
from exl_filters.errors import FilterUsageError

__all__ = ["apply_mask", "masked"]


def apply_mask(logits: Any, words: Words | None) -> Any:
    """Set excluded entries of `logits` [..., W] to -inf in place and return it; `words` None changes nothing.

    Args:
        logits: A numpy array or torch tensor of a float dtype. Allowed entries keep their value, -inf included.
        words: A packed mask, int32. Entries of `logits` beyond its width are excluded.

    Raises:
        FilterUsageError: `logits` is neither an array nor a tensor.
    """
    if words is None:
        return logits
    if isinstance(logits, np.ndarray):
        return bits.apply(words, logits)
    return logits.masked_fill_(_excluded(logits, words), float("-inf"))


def masked(logits: Any, words: Words) -> Any:
    """Apply a mask as `apply_mask` does, to a copy of `logits`."""
    if isinstance(logits, np.ndarray):
        return bits.apply(words, logits.copy())
    return logits.masked_fill(_excluded(logits, words), float("-inf"))


def _excluded(logits: Any, words: Words) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(logits, torch.Tensor):
        raise FilterUsageError(f"logits must be a numpy array or a torch tensor, got {type(logits).__name__}")
    return torch.from_numpy(bits.expand(words, logits.shape[-1]) == 0).to(logits.device)
