"""The law kit: property tests of every rule that a filter must obey (extra `testing`).

Each law searches for a counterexample and shrinks it. There are three entry points: the decorator `filter_laws` (or the
mixin `FilterContract`) in a pytest file; `check_filter` for a report; `exl-filters check MODULE:FACTORY` or `pytest
--filter-contract MODULE:FACTORY` from the shell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import hypothesis as _hypothesis  # noqa: F401
except ImportError as error:
    from exl_filters.errors import MissingExtra

    raise MissingExtra("exl_filters.testing", "testing", "hypothesis") from error

from exl_filters.testing.case import Broken, Case
from exl_filters.testing.languages import Language, anything, finite, json_schema, regex, starts_with
from exl_filters.testing.laws import LAWS, Law
from exl_filters.testing.machine import check_machine, filter_machine
from exl_filters.testing.runner import Outcome, Report, Subject, check_filter
from exl_filters.testing.vocabularies import real_vocabulary, standard_vocabulary, vocabularies

if TYPE_CHECKING:
    from exl_filters.testing.entry_points import FilterContract, filter_laws

__all__ = [
    "LAWS",
    "Broken",
    "Case",
    "FilterContract",
    "Language",
    "Law",
    "Outcome",
    "Report",
    "Subject",
    "anything",
    "check_filter",
    "check_machine",
    "filter_laws",
    "filter_machine",
    "finite",
    "json_schema",
    "real_vocabulary",
    "regex",
    "standard_vocabulary",
    "starts_with",
    "vocabularies",
]


def __getattr__(name: str) -> object:
    """Import the entry points that need pytest when they are first used: the rest of the kit works without it."""
    if name in ("FilterContract", "filter_laws"):
        from exl_filters.testing import entry_points

        return getattr(entry_points, name)
    raise AttributeError(name)
