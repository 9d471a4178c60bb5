"""Filters made of filters, by name: the factories behind a spec such as `{"type": "all-of", "filters": [...]}`.

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
    """Build a filter that allows the tokens that every one of `filters` allows."""
    return AllOf(filters)


def any_of(vocab: Any, filters: Sequence[Any]) -> ExLlamaV2Filter:
    """Build a filter that allows the tokens that at least one of `filters` allows."""
    return AnyOf(filters)


def sequence(vocab: Any, filters: Sequence[Any]) -> ExLlamaV2Filter:
    """Build a filter for a sentence of each of `filters`, one after another."""
    return SequenceFilter(filters)


def triggered(
    vocab: Any, inner: Any, on: int | str, after: Literal["stop", "release", "rearm"] = "stop"
) -> ExLlamaV2Filter:
    """Build a filter that is `inner` once `on` has appeared."""
    return TriggeredFilter(inner, on, after, tokenizer=vocab)


def logged(vocab: Any, inner: Any) -> ExLlamaV2Filter:
    """Build a filter that logs the calls and answers of `inner` to the logger `exl_filters`."""
    return LoggedFilter(inner)
