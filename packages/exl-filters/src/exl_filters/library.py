"""llguidance itself: imported when it is first needed, its exceptions as errors of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from exl_filters.errors import FilterCompileError, MissingExtra

__all__ = ["caught", "llguidance"]


def llguidance() -> Any:
    """Import llguidance. Raises `MissingExtra` where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtra("ExLlamaV2GrammarFilter", "grammar", "llguidance") from error
    return llguidance


def caught(work: Callable[[], Any]) -> Any:
    """Run llguidance code and return its result.

    Raises:
        FilterCompileError: for every exception and panic of llguidance except the following.
        MemoryError: unchanged, because it says nothing about the grammar.
    """
    try:
        return work()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise FilterCompileError(f"llguidance: {error}") from error
