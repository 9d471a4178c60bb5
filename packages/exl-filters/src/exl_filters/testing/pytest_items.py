"""The pytest items of `--filter-contract`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from exl_filters.errors import FilterError
from exl_filters.testing.runner import Outcome, Subject, read_xfail, select_laws
from exl_filters.testing.targets import targets

__all__ = ["items_for"]


class _Failed(Exception):  # noqa: N818 - named as the statement about a law
    """A broken law, as an exception for pytest."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(str(outcome))
        self.outcome = outcome


class LawItem(pytest.Item):
    """One law of one filter."""

    def __init__(self, *, subject: Subject, law: Any, known: dict[str, str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.subject, self.law, self.known = subject, law, known

    def runtest(self) -> None:
        """Run the law; a known failure is an xfail."""
        outcome = self.subject.outcome(self.law, self.known)
        if outcome.status == "known":
            pytest.xfail(outcome.message)
        if not outcome.ok:
            raise _Failed(outcome)

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """Format a broken law by its outcome, without a traceback."""
        if isinstance(excinfo.value, _Failed):
            return str(excinfo.value.outcome)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Return the item's place and name."""
        return self.path, None, self.name


def items_for(session: pytest.Session, target: str) -> Iterator[LawItem]:
    """Yield one item for every law that applies to the target."""
    option = session.config.getoption
    known = read_xfail(option("--filter-xfail"))
    for name, factory in targets(target):
        subject = Subject.of(
            factory,
            profile=option("--filter-profile"),
            examples=option("--filter-examples"),
            seed=option("--filter-seed"),
        )
        try:
            subject.require_filter()
        except FilterError as error:
            raise pytest.UsageError(f"--filter-contract {name}: {error}") from error
        wanted = option("--filter-laws")
        for law in select_laws(wanted.split(",") if wanted else None):
            if not subject.not_applicable(law):
                title = f"{name}[{law.id} {law.title}]"
                yield LawItem.from_parent(session, name=title, subject=subject, law=law, known=known)
