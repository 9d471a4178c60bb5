"""The number of logits of a vocabulary. Imports nothing, so that settings and masks may ask at no cost."""

from __future__ import annotations

__all__ = ["padded_vocabulary"]

PADDING = 32


def padded_vocabulary(size: int) -> int:
    """Return the number of logits for `size` tokens: rounded up to a multiple of PADDING."""
    return -(-size // PADDING) * PADDING
