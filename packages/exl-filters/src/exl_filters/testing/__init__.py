"""The law kit: what every filter must obey, as properties that find the smallest counterexample (extra `testing`).

Three doors over one set of laws: the decorator `filter_laws` (or the mixin `FilterContract`) in a pytest file,
`check_filter` for a report, and `exl-filters check MODULE:FACTORY` or `pytest --filter-contract MODULE:FACTORY` from
outside.
"""

from __future__ import annotations

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
    """The doors that are pytest's are opened when asked for: the rest of the kit does without pytest."""
    if name in ("FilterContract", "filter_laws"):
        from exl_filters.testing import doors

        return getattr(doors, name)
    raise AttributeError(name)
