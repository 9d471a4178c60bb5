"""A law: its number, its level, the condition under which it applies, and its check."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

from exl_filters.base import overrides
from exl_filters.testing.case import Case
from exl_filters.testing.languages import Language

__all__ = ["LAWS", "Law", "applicable", "law"]

Level = Literal["must", "should", "capability"]


@dataclass(frozen=True)
class Law:
    """A property of filters.

    Args:
        id: "LAW-" and two digits.
        title: The property in one sentence.
        level: "must", "should", or "capability" for a law of an optional method.
        check: Raises when the law does not hold for the case.
        needs: Methods of which one must be overridden for the law to apply.
        oracle: Whether the law applies only with a language.
        unless: A claim that exempts a filter (`canonical_only`: it narrows to canonical tokenizations).
        examples: Share of the profile's examples.
    """

    id: str
    title: str
    level: Level
    check: Callable[[Case], None]
    needs: tuple[str, ...] = ()
    oracle: bool = False
    unless: str = ""
    examples: float = 1.0


LAWS: dict[str, Law] = {}


def law(
    number: int,
    *,
    level: Level = "must",
    needs: Collection[str] = (),
    oracle: bool = False,
    unless: str = "",
    examples: float = 1.0,
) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Register a check in LAWS under its number. The first line of its docstring is the law's title."""

    def add(check: Callable[[Case], None]) -> Callable[[Case], None]:
        name, line = f"LAW-{number:02d}", (check.__doc__ or "").partition("\n")[0].removesuffix(".")
        title = line[:1].lower() + line[1:]
        LAWS[name] = Law(name, title, "capability" if needs else level, check, tuple(needs), oracle, unless, examples)
        return check

    return add


def applicable(entry: Law, sample: Any, language: Language | None, capabilities: Collection[str]) -> str:
    """Return "" if the law applies to a filter like `sample`, else the reason that it does not."""
    if entry.oracle and language is None:
        return "needs a language"
    if entry.unless and entry.unless in capabilities:
        return f"the filter claims {entry.unless}"
    if entry.needs and not any(n in capabilities or overrides(sample, n) for n in entry.needs):
        return f"the filter has no {' or '.join(entry.needs)} of its own"
    return ""
