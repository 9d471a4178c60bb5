"""Filters made of filters, by name: what a spec such as `{"type": "all-of", "filters": [...]}` is built by.

The registry builds the inner specs first, under the same allow-list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from exl_filters.base import ExLlamaV2Filter
from exl_filters.combine import AllOf, AnyOf, TriggeredFilter
from exl_filters.logged import LoggedFilter
from exl_filters.sequence import SequenceFilter

__all__ = ["all_of", "any_of", "logged", "sequence", "triggered"]


def all_of(vocab: Any, filters: Sequence[Any]) -> ExLlamaV2Filter:
    """What every one of `filters` allows."""
    return AllOf(filters)


def any_of(vocab: Any, filters: Sequence[Any]) -> ExLlamaV2Filter:
    """What at least one of `filters` allows."""
    return AnyOf(filters)


def sequence(vocab: Any, filters: Sequence[Any]) -> ExLlamaV2Filter:
    """A sentence of each of `filters`, one after another."""
    return SequenceFilter(filters)


def triggered(
    vocab: Any, inner: Any, on: int | str, after: Literal["stop", "release", "rearm"] = "stop"
) -> ExLlamaV2Filter:
    """`inner`, once `on` has appeared."""
    return TriggeredFilter(inner, on, after, tokenizer=vocab)


def logged(vocab: Any, inner: Any) -> ExLlamaV2Filter:
    """`inner`, telling the logger `exl_filters` what it does."""
    return LoggedFilter(inner)
