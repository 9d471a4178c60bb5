"""Constrained decoding for any language model: filters, plugins, and the laws that filters must obey.

Importing this package imports numpy and nothing else. The filter that needs an optional library (an extra) imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from exl_filters.base import ExLlamaV2Filter
from exl_filters.combine import AllOf, AnyOf, TriggeredFilter
from exl_filters.compiling import CompileBudget, compile_in_background, compile_within
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
from exl_filters.logged import LoggedFilter
from exl_filters.masking import apply_mask
from exl_filters.prefix import ExLlamaV2PrefixFilter
from exl_filters.registry import create, from_spec, get, names, register, unregister
from exl_filters.select import ExLlamaV2SelectFilter
from exl_filters.sequence import SequenceFilter
from exl_filters.state_filter import Choice, StateFilter
from exl_filters.together import prefetch_together
from exl_filters.token_filters import BanFilter, LengthFilter, TokenSetFilter
from exl_filters.vocabulary import Vocabulary, vocabulary_of

if TYPE_CHECKING:
    from exl_filters.grammar import ExLlamaV2GrammarFilter
    from exl_filters.token_enforcer import ExLlamaV2TokenEnforcerFilter

__all__ = [
    "AllOf",
    "AmbiguousPlugin",
    "AnyOf",
    "BanFilter",
    "Choice",
    "CompileBudget",
    "Diagnosis",
    "ExLlamaV2Filter",
    "ExLlamaV2GrammarFilter",
    "ExLlamaV2PrefixFilter",
    "ExLlamaV2SelectFilter",
    "ExLlamaV2TokenEnforcerFilter",
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
    "LengthFilter",
    "LoggedFilter",
    "MissingExtra",
    "PluginError",
    "SequenceFilter",
    "StateFilter",
    "Status",
    "TokenSetFilter",
    "TriggeredFilter",
    "UnknownFilter",
    "Vocabulary",
    "apply_mask",
    "as_filter",
    "compile_in_background",
    "compile_within",
    "create",
    "from_spec",
    "get",
    "names",
    "prefetch_together",
    "register",
    "unregister",
    "vocabulary_of",
]


def __getattr__(name: str) -> object:
    """Import the filters that need an extra when they are first asked for."""
    if name == "ExLlamaV2GrammarFilter":
        from exl_filters.grammar import ExLlamaV2GrammarFilter

        return ExLlamaV2GrammarFilter
    if name == "ExLlamaV2TokenEnforcerFilter":
        from exl_filters.token_enforcer import ExLlamaV2TokenEnforcerFilter

        return ExLlamaV2TokenEnforcerFilter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
