"""Answers of filters that restrict: their type says that they may also be None."""

from __future__ import annotations

from typing import Any

from exl_filters import bits

__all__ = ["allowed_ids", "mask_ids"]


def allowed_ids(filter_: Any) -> list[int]:
    """Return the ids that a filter allows now, which must be some."""
    found = filter_.next()[0]
    assert found is not None
    return list(found)


def mask_ids(stack: Any) -> list[int]:
    """Return the ids in the next mask of a stack, which must restrict."""
    words = stack.next_mask()
    assert words is not None
    return bits.to_ids(words)
