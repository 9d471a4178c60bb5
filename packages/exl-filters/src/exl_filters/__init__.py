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
from exl_filters.masking import apply_mask
from exl_filters.prefix import ExLlamaV2PrefixFilter
from exl_filters.registry import create, from_spec, get, names, register, unregister
from exl_filters.select import ExLlamaV2SelectFilter
from exl_filters.state_filter import Choice, StateFilter
from exl_filters.vocabulary import Vocabulary, vocabulary_of

__all__ = [
    "AmbiguousPlugin",
    "Choice",
    "Diagnosis",
    "ExLlamaV2Filter",
    "ExLlamaV2PrefixFilter",
    "ExLlamaV2SelectFilter",
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
    "StateFilter",
    "Status",
    "UnknownFilter",
    "Vocabulary",
    "apply_mask",
    "as_filter",
    "create",
    "from_spec",
    "get",
    "names",
    "register",
    "unregister",
    "vocabulary_of",
]
