"""Applying packed masks to logits: numpy arrays in place or copied, torch tensors on any device, nothing imported."""

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

    Entries beyond the width of the mask are excluded; allowed ones keep their value, -inf included. Takes numpy arrays
    and torch tensors of a float dtype.
    """
    if words is None:
        return logits
    if isinstance(logits, np.ndarray):
        return bits.apply(words, logits)
    return logits.masked_fill_(_excluded(logits, words), float("-inf"))


def masked(logits: Any, words: Words) -> Any:
    """As `apply_mask`, on a copy."""
    if isinstance(logits, np.ndarray):
        return bits.apply(words, logits.copy())
    return logits.masked_fill(_excluded(logits, words), float("-inf"))


def _excluded(logits: Any, words: Words) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(logits, torch.Tensor):
        raise FilterUsageError(f"logits must be a numpy array or a torch tensor, got {type(logits).__name__}")
    return torch.from_numpy(bits.expand(words, logits.shape[-1]) == 0).to(logits.device)
