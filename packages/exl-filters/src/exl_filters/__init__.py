"""Constrained decoding for any language model: filters, plugins, and the laws they must obey.

Importing this package imports numpy and nothing else; libraries behind the extras are loaded by the filter that needs
them.
"""

from __future__ import annotations

from exl_filters.base import ExLlamaV2Filter
from exl_filters.context import FilterContext
from exl_filters.errors import (
    AmbiguousPlugin,
    Diagnosis,
    FilterBusy,
    FilterCompileError,
    FilterDeadEnd,
    FilterError,
    FilterFailed,
    FilterRejected,
    FilterUsageError,
    MissingExtra,
    PluginError,
    UnknownFilter,
)
from exl_filters.foreign import ForeignFilter, as_filter
from exl_filters.host import FilterStack, Status
from exl_filters.vocabulary import Vocabulary, vocabulary_of

__all__ = [
    "AmbiguousPlugin",
    "Diagnosis",
    "ExLlamaV2Filter",
    "FilterBusy",
    "FilterCompileError",
    "FilterContext",
    "FilterDeadEnd",
    "FilterError",
    "FilterFailed",
    "FilterRejected",
    "FilterStack",
    "FilterUsageError",
    "ForeignFilter",
    "MissingExtra",
    "PluginError",
    "Status",
    "UnknownFilter",
    "Vocabulary",
    "as_filter",
    "vocabulary_of",
]
