"""All errors of filters and their hosts, under one base class with stable codes."""

# ruff: noqa: N818 - a name says what happened, not that it is an error

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

__all__ = [
    "AmbiguousPlugin",
    "Diagnosis",
    "FilterBusy",
    "FilterCompileError",
    "FilterDeadEnd",
    "FilterError",
    "FilterFailed",
    "FilterRejected",
    "FilterUsageError",
    "MissingExtra",
    "Opinion",
    "PluginError",
    "UnknownFilter",
]


class FilterError(Exception):
    """Base of every error of this package. `code` is stable; the text is for people."""

    code: ClassVar[str] = "filter_error"


class FilterUsageError(FilterError, ValueError):
    """An argument or an order of calls that no filter accepts."""

    code = "filter_usage"


class FilterRejected(FilterError, ValueError):
    """A token was fed that the filter does not allow here. The filter's state is as before the call.

    Args:
        message: the text of the error.
        token: the id that was fed; None if it is not known.
    """

    code = "filter_rejected"

    def __init__(self, message: str, token: int | None = None) -> None:
        super().__init__(message)
        self.token = token


class FilterBusy(FilterError, RuntimeError):
    """One stateful filter object was given to two jobs at once, or two computations were started on it."""

    code = "filter_busy"


class FilterCompileError(FilterError, ValueError):
    """A schema, pattern or grammar cannot be enforced. Raised at construction, never swallowed."""

    code = "filter_compile"


class FilterFailed(FilterError, RuntimeError):
    """A filter raised an exception that is not a `FilterError`. The original exception is `__cause__`."""

    code = "filter_failed"


class MissingExtra(FilterError, ImportError):
    """An optional library is not installed.

    Args:
        what: the feature that needs it, as the message begins.
        extra: the extra of exl-filters that installs it.
        library: its name.
    """

    code = "missing_extra"

    def __init__(self, what: str, extra: str, library: str) -> None:
        super().__init__(
            f'{what} needs {library}: in a checkout, pip install "./packages/exl-filters[{extra}]" installs it'
        )
        self.extra = extra
        self.library = library


class PluginError(FilterError, RuntimeError):
    """A plugin could not be loaded; the message names its distribution. The original exception is `__cause__`."""

    code = "plugin"


class UnknownFilter(PluginError, LookupError):
    """No filter of that name is registered, or the allow-list excludes it."""

    code = "unknown_filter"


class AmbiguousPlugin(PluginError):
    """Two distributions register one name; ask for `dist:name`."""

    code = "ambiguous_plugin"


@dataclass(frozen=True)
class Opinion:
    """One filter's answer in a dead end: how many ids it allows (None: no opinion), and a few of them as text."""

    filter: str
    allowed: int | None
    samples: tuple[str, ...] = ()
    complete: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """Why nothing may follow: the `opinions` of all filters, the `text` so far and its number of `tokens`."""

    opinions: Sequence[Opinion] = field(default_factory=tuple)
    text: str = ""
    tokens: int = 0

    def __str__(self) -> str:
        says = "; ".join(
            f"{o.filter}: " + ("no opinion" if o.allowed is None else f"{o.allowed} ids" + _quoted(o.samples))
            for o in self.opinions
        )
        return f"after {self.tokens} tokens, text {self.text[-80:]!r}: {says}"


class FilterDeadEnd(FilterError, RuntimeError):
    """No token is allowed by all filters together. `diagnosis` holds the opinion of each."""

    code = "filter_dead_end"

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(f"the filters leave no token: {diagnosis}")
        self.diagnosis = diagnosis


def _quoted(samples: Sequence[str]) -> str:
    return f" such as {', '.join(repr(s) for s in samples)}" if samples else ""
